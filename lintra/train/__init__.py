"""Training: a Lightning Trainer around a task, which can be killed at any moment and resumed exactly."""

from lintra.tasks import Task
from lintra.train.config import Config, Verbosity
from lintra.train.curve import curves
from lintra.train.run import Run

__all__ = ["Config", "Run", "curves", "fit"]


def fit(run: Run, task: Task | None = None, *, verbosity: Verbosity = "progress") -> None:
    """Train the run to its last step or until its time is up, from its newest checkpoint if it has one.

    task: the result of `run.task.build()`, if it has read its data already; verbosity: its last line alone
    ("result"), or its choices too ("all"). Raises Diverged, Interrupted and checkpoint.Error; checkpoints
    saved before remain.
    """
    from lintra.train.loop import fit

    fit(run, task, verbosity)

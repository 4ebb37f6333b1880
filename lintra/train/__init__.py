"""Training: a Lightning Trainer around a task, that can be killed at any moment and resumed exactly."""

from lintra.tasks import Task
from lintra.train.config import Config, Verbosity
from lintra.train.curve import curves
from lintra.train.run import Run

__all__ = ["Config", "Run", "curves", "fit"]


def fit(run: Run, task: Task | None = None, *, verbosity: Verbosity = "progress") -> None:
    """Train the run to its last step or until its time is up, from its newest checkpoint if it has one.

    task: what `run.task.build()` gave, where it has read its data already; verbosity: its last line alone
    ("result"), or what is chosen too ("all"). Raises Diverged, Interrupted and checkpoint.Error; what had
    been saved before stays.
    """
    from lintra.train.loop import fit

    fit(run, task, verbosity)

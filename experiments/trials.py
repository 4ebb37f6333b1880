"""Many short trainings, a few at a time: folders of `lintra train`, killed and gone on with at any moment."""

import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lintra import checkpoint, evaluate, train
from lintra.allocator import keep_freed_memory

SAMPLES = 2_000  # a trial is judged by, or by all if there are fewer
BATCH = 50


@dataclasses.dataclass(frozen=True)
class Trial:
    """One model trained on one problem, and its score on the problem's first test samples."""

    name: str
    folder: Path
    task: Any  # the task's Config
    model: Any  # the model's Config
    training: train.Config
    score: str  # what the task's score calls it
    samples: int = SAMPLES

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    def scored(self) -> float | None:
        """The score, once it is trained."""
        return json.loads(self.result.read_text())[self.score] if self.result.exists() else None

    def train(self) -> None:
        """To the end, from wherever it is, and its score."""
        if (self.folder / "run.json").exists():
            run = train.Run.read(self.folder)
        else:
            run = train.Run.create(self.folder, task=self.task, model=self.model, train=self.training)
        train.fit(run)
        text = json.dumps({"steps": self.training.steps, self.score: self._evaluate()}, indent=1)
        checkpoint.write_atomically(self.result, lambda place: place.write_text(text))

    def _evaluate(self) -> float:
        task, model = self.task.build(), checkpoint.load(self.folder)
        places = range(min(self.samples, len(task.test)))
        return evaluate.scores(model, task, places, batch=BATCH)[self.score].mean


def train_all(trials: Sequence[Trial], *, workers: int | None, minutes: float) -> None:
    """Trains what is not trained yet, a core to each; begins no further one after so many minutes."""
    todo = [trial for trial in trials if trial.scored() is None]
    end = time.time() + 60 * minutes
    with multiprocessing.get_context("spawn").Pool(workers, _worker) as pool:
        for done, told in enumerate(pool.imap_unordered(_train_one, [(x, end) for x in todo]), 1):
            print(f"{done} of {len(todo)}: {told}", flush=True)


def updates(task: Any, model: Any, batches: Sequence[Any]) -> Callable[[], None]:
    """A call that updates a fresh model, of a Config, once for each of these batches: what a step costs."""
    torch.manual_seed(0)
    network = model.build()
    optimizer = torch.optim.RAdam(network.parameters(), 1e-4)

    def step() -> None:
        for batch in batches:
            optimizer.zero_grad()
            task.loss(network, batch).backward()
            optimizer.step()

    return step


def tell(trials: Sequence[Trial]) -> None:
    """What is done and what is not."""
    for trial in trials:
        print("to do" if trial.scored() is None else "done ", trial.name)


def _worker() -> None:
    """One thread, and none outlives the program that started it."""
    keep_freed_memory()
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _train_one(work: tuple[Trial, float]) -> str:
    """One trial to its end, unless the time is up -> what there is to say of it."""
    trial, end = work
    if time.time() > end:
        return f"{trial.name}: no time left, the same command goes on"
    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trial.train()
    return f"{trial.name}: {trial.score} {trial.scored():.3f}, {time.monotonic() - began:.0f} s"

"""A trained model with its task, for the commands that use one."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from lintra import checkpoint, train
from lintra.cli.arguments import UsageError
from lintra.io.files import expanded, is_own_folder, is_part_of
from lintra.tasks import PixelTask, Task
from lintra.train.data_checks import check_held_out

Device = Literal["auto", "cpu", "cuda"]
SPLITS = {"test": "test", "validate": "validation"}  # what a task's `judged_by` is called


class Opened(NamedTuple):
    """A trained model, in evaluation mode, with its run and its task."""

    model: Any
    folder: Path  # of its weights: for a run, of its newest checkpoint
    run: train.Run
    task: Task  # that of the run, or the same with other data


def open_model(folder: Path, device: Device, data: str | None) -> Opened:
    """Load a model from a run, one of its checkpoints or a folder with a run.json of its own, and its task,
    whose data is where it was in training or in `data`.

    Raises checkpoint.Error, UsageError, and DataError for `data` of a task that reads no files.
    """
    model, found = checkpoint.load_from(folder, chosen(device))
    run = train.Run.around(folder)
    task = (run.task if data is None else run.task.with_data(data)).build()
    return Opened(model, found, run, task)


def chosen(device: Device) -> str:
    """Return the device that was asked for. Raises UsageError if there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is cuda, but PyTorch finds no CUDA device here: leave --device out")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def sampled(n: int, limit: int | None, seed: int) -> list[int]:
    """Return the indices of `limit` of n samples, chosen at random, in order; None: all. Raises
    UsageError."""
    if limit is None:
        return list(range(n))
    if limit > n:
        raise UsageError(f"limit must be at most the {n:,} samples there are, got {limit:,}")
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:limit].sort().values.tolist()


def refuse_data(opened: Opened, written: Iterable[Path]) -> None:
    """Raise UsageError if an output would replace a file that the task reads, in training or now, or be a new
    one among those that it would read next time."""
    for config in (opened.run.task, opened.task.config):
        named = [getattr(config, name) for name in config.PATHS]
        for data in [expanded(x) for x in named if x is not None]:
            for file in written:
                if not is_part_of(file, data) or _in_own_folder(file, data):
                    continue
                joins = config.SEARCHED is None or file.suffix.lower() in config.SEARCHED
                if joins or file.exists() or not data.is_dir():
                    raise UsageError(
                        f"{file} would be among the data of {opened.run.folder}: write to another folder"
                    )


def _in_own_folder(file: Path, data: Path) -> bool:
    """Return whether a file lies in a run, model or prepared text below `data`, none of which is data."""
    between = [x for x in file.resolve().parents if data.resolve() in x.parents]
    return any(map(is_own_folder, between))


def refuse_changed_data(opened: Opened) -> None:
    """Raise Error if the samples to score on were held out of the run's own data, and these have changed
    since training began, which may have moved some that were learned from among them."""
    run, task = opened.run, opened.task
    own = all(getattr(task.config, x) == getattr(run.task, x) for x in task.config.PATHS if x != "test")
    if task.judged_by == "validate" and own and run.data is not None:
        check_held_out(task, run.data, run.folder)


def refuse_unless_images(task: Task, folder: Path, asked: Mapping[str, object]) -> None:
    """Raise UsageError for an option of image models if the task is another."""
    if not isinstance(task, PixelTask):
        for name, value in asked.items():
            if value:
                raise UsageError(f"{name} is for models of images, {folder} is of the task {task.name}")

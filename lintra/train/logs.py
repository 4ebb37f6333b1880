"""Loggers of a run: files for TensorBoard and as CSV, and Weights & Biases where asked for."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from lintra.checkpoint import to_json
from lintra.io.files import Error, read_json, write_atomically
from lintra.io.packages import package
from lintra.train.launch import is_first_process
from lintra.train.run import Run

_STEP = "trainer/global_step"  # as Lightning calls it
_ID = "wandb.json"  # in the folder of logs: a resumed run continues its lines


@contextlib.contextmanager
def loggers(run: Run, *, quiet: bool) -> Iterator[list[Logger]]:
    """Yield the loggers of a run and close them afterwards. Raises ModuleNotFoundError without the package of
    one, Error where it cannot log."""
    logs = run.folder / "logs"
    files = [
        CSVLogger(logs, name="csv", flush_logs_every_n_steps=1),
        TensorBoardLogger(logs, name="tensorboard"),
    ]
    if run.train.wandb is None:
        yield files
        return
    if not is_first_process():  # which logs for all
        yield files
        return
    online, exit_code = _begin(run, run.train.wandb, logs, quiet), 1
    try:
        yield [*files, WandbLogger(experiment=online)]
        exit_code = 0
    finally:
        online.finish(exit_code=exit_code)


def check_wandb() -> ModuleType:
    """Return the package wandb. Raises ModuleNotFoundError that says how to install it."""
    return package("wandb", extra="wandb", needs="logging to Weights & Biases needs")


def _begin(run: Run, project: str, logs: Path, quiet: bool) -> Any:
    """Begin or resume the run at Weights & Biases, or in files where WANDB_MODE=offline. Raises Error."""
    library = check_wandb()
    logs.mkdir(parents=True, exist_ok=True)
    try:
        online = library.init(
            project=project,
            name=run.folder.name,
            id=_id(logs),
            resume="allow",
            dir=logs,
            config={name: to_json(getattr(run, name)) for name in ("task", "model", "train")},
            settings=library.Settings(silent=quiet),
        )
    except library.Error as error:  # no account, no network
        raise Error(
            f"Weights & Biases cannot log, set WANDB_MODE=offline to log to files: {error}"
        ) from error
    online.define_metric(_STEP)
    online.define_metric("*", step_metric=_STEP, step_sync=True)
    return online


def _id(logs: Path) -> str:
    """The run's name at Weights & Biases, from its first training on."""
    file = logs / _ID
    if not file.exists():
        name = secrets.token_hex(4)
        write_atomically(file, lambda place: place.write_text(f'{{"id": "{name}"}}\n'))
    found = read_json(file)
    if not isinstance(found, dict) or not isinstance(found.get("id"), str):
        raise Error(f"{file} is damaged: delete it, and Weights & Biases has the rest as another run")
    return found["id"]

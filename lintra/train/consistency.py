"""Checks that the processes that train one run agree."""

import hashlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

import lintra
from lintra.agreement import check_alike
from lintra.checkpoint import newest, to_json
from lintra.train.file_copies import copied
from lintra.train.run import Run

_LOOKED_AT, _PART = 16, 2**16  # parts of a file that are in its digest, and the bytes of each


class AlikeCallback(Callback):
    """Stop all processes before the first step, naming the ranks, if something differs that must not."""

    def __init__(self, run: Run, data: dict[str, Any], start: Path | None):
        self.run, self.data, self.start = run, data, start

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size == 1:
            return
        begun_from = self.run.train.start_from if self.start is None else None
        own = {
            "lintra": lintra.__version__,
            "torch": torch.__version__,
            **_settings(self.run),
            **{f"data.{name}": value for name, value in self.data.items()},
            "checkpoint": self.start and digest_of_folder(self.start),
            "start_from": begun_from and digest_of_folder(newest(Path(begun_from))),
        }
        check_alike("what a run is trained with", own)


def _settings(run: Run) -> dict[str, Any]:
    """Return all settings by their names in run.json, except places of files, which nodes may have
    elsewhere."""
    places = {"task": {*run.task.PATHS, *copied(run.task)}, "train": {*run.train.PATHS}}
    parts = {name: to_json(getattr(run, name)) for name in ("task", "model", "train")}
    return {
        f"{part}.{name}": value
        for part, values in parts.items()
        for name, value in values.items()
        if name not in places.get(part, ())
    }


def digest_of_folder(folder: Path) -> str:
    """Return a digest of the names, the sizes and evenly spread parts of all files in a folder, such as a
    checkpoint."""
    digest = hashlib.sha256()
    for file in sorted(x for x in folder.rglob("*") if x.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size} ".encode())
        with file.open("rb") as content:
            for place in sorted({(size - _PART) * i // (_LOOKED_AT - 1) for i in range(_LOOKED_AT)}):
                content.seek(max(0, place))
                digest.update(content.read(_PART))
    return digest.hexdigest()[:16]

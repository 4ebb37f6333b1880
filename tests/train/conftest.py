"""A run so small that a step takes milliseconds, with everything that has a state: dropout, RAdam."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lintra import train
from lintra.attention import linear
from lintra.tasks import digits


@pytest.fixture
def new_run(tmp_path, one_thread):
    def create(name: str = "run", task=None, dropout=0.2, attention=None, **settings) -> train.Run:
        task = task or digits.Config()
        model = task.build().model(attention or linear.Config())
        small = {"steps": 12, "batch": 8, "precision": "32", "save_every": 5, "validate_every": 6, "lr": 3e-3}
        return train.Run.create(
            tmp_path / name,
            task=task,
            model=dataclasses.replace(model, layers=1, heads=2, width=16, dropout=dropout),
            train=train.Config(**(small | settings)),
        )

    return create


def weights(run: train.Run) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    return load_file(run.checkpoints()[-1] / "model.safetensors")


def assert_same_weights(run: train.Run, other: train.Run) -> None:
    a, b = weights(run), weights(other)
    assert run.checkpoints()[-1].name == other.checkpoints()[-1].name
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def folders(run: train.Run) -> list[str]:
    return sorted(path.name for path in Path(run.folder).iterdir() if path.name.startswith((".", "step")))

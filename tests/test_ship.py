"""experiments/ship.py: a run becomes a model to pass on, and nothing else is written over."""

import dataclasses
import runpy
from pathlib import Path

import numpy as np
import pytest

from lintra import checkpoint, train
from lintra.attention import linear
from lintra.tasks import images

pack = runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "ship.py"))["pack"]


def contents(folder):
    return {x.relative_to(folder): x.read_bytes() for x in folder.rglob("*") if x.is_file()}


def test_only_what_it_wrote_is_replaced(tmp_path, monkeypatch, one_thread):
    source = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 1), np.uint8)
    found = images._files.Splits(train=[lambda: source], test=[lambda: source])
    monkeypatch.setattr(images, "_locate", lambda data, data_dir: found)
    task = images.Config(validate_images=2)
    model = dataclasses.replace(task.build().model(linear.Config()), layers=1, heads=2, width=16)
    settings = train.Config(steps=10, batch=1, precision="32")  # the first that is logged
    run = train.Run.create(tmp_path / "run", task=task, model=model, train=settings)
    train.fit(run)
    for _ in range(2):
        pack(run, tmp_path / "model", hours=1.0, grown_from=None)
    assert checkpoint.load(tmp_path / "model").config == model
    (tmp_path / "model" / "notes.txt").write_text("precious")
    for folder in (tmp_path / "model", run.folder):
        before = contents(folder)
        with pytest.raises(checkpoint.Error, match=f"{folder} exists and is not a saved model"):
            pack(run, folder, hours=1.0, grown_from=None)
        assert contents(folder) == before

"""experiments/ship.py: a run becomes a model for distribution, and nothing else is overwritten."""

import csv
import dataclasses
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from lintra import checkpoint, train
from lintra.attention import linear, softmax
from lintra.tasks import images
from lintra.tasks.datasets import mnist

ship = runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "ship.py"))
pack = ship["pack"]


def contents(folder):
    return {x.relative_to(folder): x.read_bytes() for x in folder.rglob("*") if x.is_file()}


@pytest.fixture
def trained(tmp_path, monkeypatch, one_thread):
    """trained(folder, **settings): a run of 10 steps, the first step that is logged."""
    source = np.random.default_rng(0).integers(0, 256, (260, 28, 28, 1), np.uint8)
    found = images.data_files.Splits(train=[lambda: source], test=[lambda: source[:4]])
    monkeypatch.setattr(images, "locate", lambda data, data_dir: found)
    monkeypatch.setattr(mnist, "TRAIN_IMAGES", 260)
    task = images.Config(validate_images=2)
    model = dataclasses.replace(task.build().model(linear.Config()), layers=1, heads=2, width=16)

    def make(folder, **settings):
        settings = train.Config(**{"steps": 10, "batch": 1, "precision": "32"} | settings)
        run = train.Run.create(tmp_path / folder, task=task, model=model, train=settings)
        train.fit(run)
        return run

    return make


def test_only_what_it_wrote_is_replaced(tmp_path, trained):
    run = trained("run")
    for _ in range(2):
        pack(run, tmp_path / "model", hours=1.0)
    assert checkpoint.load(tmp_path / "model").config == run.model
    (tmp_path / "model" / "notes.txt").write_text("precious")
    for folder in (tmp_path / "model", run.folder):
        before = contents(folder)
        with pytest.raises(checkpoint.Error, match=f"{folder} exists and is not a saved model"):
            pack(run, folder, hours=1.0)
        assert contents(folder) == before


def test_a_training_goes_on_with_the_log_of_the_one_before_it(tmp_path, trained):
    """Three trainings, each from the packed result of the last: one log, and the settings of each."""
    folder = None
    for number in range(1, 4):
        run = trained(f"run-{number}", start_from=folder and str(folder), seed=number, lr=number / 1000)
        folder = tmp_path / f"model-{number}"
        pack(run, folder)
    with pytest.raises(SystemExit, match="model-2: pack it in another folder"):
        pack(run, tmp_path / "model-2")
    with (folder / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["10", "20", "30"]
    minutes = [float(row["minutes"]) for row in rows]
    assert minutes == sorted(set(minutes))
    stages = [folder / "before" / "before", folder / "before", folder]
    assert [train.Run.read(stage).train.seed for stage in stages] == [1, 2, 3]
    scores = {x: {"mean": 8, "error": 0} for x in ("bits_per_dim", "bits_per_dim_without_the_first")}
    for samples in (3, 4):
        told = {name: score | {"samples": samples} for name, score in scores.items()}
        content = {"test_samples": 4, "partial": False, "scores": told, "weights": checkpoint.digest(folder)}
        (folder / "evaluation.json").write_text(json.dumps(content))
        if samples < 4:
            with pytest.raises(SystemExit, match="is of a part of the test samples"):
                pack(run, folder)
    pack(run, folder)
    before = contents(folder)
    other = dataclasses.replace(run, folder=tmp_path / "run-1")
    with pytest.raises(SystemExit, match=r"evaluation.json is of other weights: remove it"):
        pack(other, folder)
    assert contents(folder) == before
    card = (folder / "README.md").read_text()
    # Two of the 260 images are held out for validation.
    assert card.count("10 steps of 1 images, 0.04 times over the data") == 3
    assert "258 training images of MNIST" in card
    assert "has seen them 0.1 times" in card
    assert "first test images" not in card
    older = dataclasses.replace(run, task=dataclasses.replace(run.task, validate_on="test"))
    assert "first test images" in ship["_validated"]([older, run])
    again = card[card.index("**Again**") :]
    commands = [f"--{word} runs/stage-{stage}" for stage in (1, 2) for word in ("dir", "start-from")]
    assert sorted(commands, key=again.index) == commands


def test_a_training_from_a_shipped_model_names_it(tmp_path):
    """Models that come with lintra are named, not only found as folders."""
    run = train.Run(folder=tmp_path, task=None, model=None, train=train.Config(start_from="mnist-small"))
    assert ship["_before"](run) == checkpoint.SHIPPED / "mnist-small"
    gone = dataclasses.replace(run, train=train.Config(start_from=str(tmp_path / "gone")))
    assert ship["_before"](gone) is None


def test_a_run_that_is_not_over_is_not_packed(tmp_path, trained):
    run = trained("run", max_minutes=1e-9, save_every=1)
    with pytest.raises(SystemExit, match=r"has done \d of 10 steps: resume it"):
        pack(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_card_does_not_tell_of_a_hybrid(tmp_path):
    task = images.Config(validate_images=2)
    model = dataclasses.replace(task.build().model(linear.Config()), layers=2)
    hybrid = dataclasses.replace(model, attention=(linear.Config(), softmax.Config()))
    assert ship["_command"](train.Run(folder=tmp_path, task=task, model=model, train=train.Config()))
    with pytest.raises(ValueError, match="a card is of one mechanism, this model has 2"):
        ship["_command"](train.Run(folder=tmp_path, task=task, model=hybrid, train=train.Config()))

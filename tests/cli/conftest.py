"""The program, and small untrained models for it to use."""

import dataclasses
from pathlib import Path

import pytest
import torch

from lintra import checkpoint, pictures, train
from lintra.attention import linear
from lintra.cli import main
from lintra.tasks import speech
from tests.tasks.speech import RATE, text_of, write_manifest

QUICK = ["--steps", "40", "--lr", "3e-2", "--warmup", "0", "--dropout", "0", "--layers", "1", "--heads", "2"]


@pytest.fixture
def lintra_says(capsys):
    """Run the program -> (exit code, standard output, standard error)."""

    def run(*args: str) -> tuple[int, str, str]:
        try:
            code = main(list(args))
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def drawn(monkeypatch):
    """What goes into pictures, by their names."""
    found = {}
    for name in ("samples", "completions"):
        monkeypatch.setattr(pictures, name, lambda *args, name=name: found.__setitem__(name, args))
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch, one_thread):
    """Save the run of a small model of a task in ./NAME, in the folder where commands then run."""
    monkeypatch.chdir(tmp_path)

    def write(name, task, step=1, **changes):
        torch.manual_seed(0)
        small = {"layers": 1, "heads": 2, "width": 16, "dropout": 0.0} | changes
        model = dataclasses.replace(task.build().model(linear.Config()), **small)
        run = train.Run.create(tmp_path / name, task=task, model=model, train=train.Config())
        checkpoint.save(model.build(), run.folder / f"step-{step:08d}")
        return run

    return write


@pytest.fixture
def recogniser(tmp_path, monkeypatch, one_thread):
    """A run of a small untrained model in ./run, with its recordings in ./audio."""
    monkeypatch.chdir(tmp_path)

    def write(streaming=True, **changes):
        manifest = write_manifest(Path("audio"), [text_of(i) for i in range(12)])
        task = speech.Config(
            manifest=str(manifest), rate=RATE, bins=20, subsample=2, streaming=streaming, **changes
        )
        problem = task.build()
        config = problem.model(linear.Config())
        shape = {"layers": 1, "heads": 2, "width": 16, "inputs": 16, "dropout": 0.0}
        config = dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, **shape))
        torch.manual_seed(0)
        model = config.build()
        problem.prepare(model)
        model.head.bias.data[0] -= 0.5  # fewer blanks, so that it writes something
        run = train.Run.create("run", task=task, model=config, train=train.Config())
        checkpoint.save(model, run.folder / "step-00000001")
        return checkpoint.load("run")

    return write


@pytest.fixture
def classifier(lintra_says, tmp_path, monkeypatch, one_thread):
    """A model that tells texts of a's from texts of b's, in ./run; its data have been deleted."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{'ab'[i % 2] * 3}\t{'ab'[i % 2] * (i % 9 + 1)}\n" for i in range(60)]
    (tmp_path / "data.tsv").write_text("".join(lines))
    learn = ["train", "text-classification", "--data", "data.tsv", "--length", "8", *QUICK, "--width", "16"]
    assert lintra_says(*learn, "--dir", "run")[0] == 0
    (tmp_path / "data.tsv").unlink()
    return tmp_path / "run"

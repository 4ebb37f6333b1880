"""A run that starts from a trained model has its weights before the first step, and no longer needs it."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from lintra import checkpoint, train
from lintra.attention import softmax
from lintra.audio import features
from lintra.audio.symbols import Symbols
from lintra.cli import main
from lintra.models import ctc, encoder
from lintra.tasks import text
from lintra.train.run import first_model
from tests.train.conftest import weights


@pytest.fixture
def trained(new_run):
    run = new_run("trained", steps=3)
    train.fit(run)
    return run


def test_the_first_weights_are_those_of_the_trained_model(new_run, trained):
    """With a learning rate too small to change anything in float32."""
    run = new_run("next", steps=1, start_from=str(trained.folder), lr=1e-25, seed=1)
    train.fit(run)
    for name, x in weights(trained).items():
        assert torch.equal(weights(run)[name], x), name


def test_a_model_of_16_bits_is_trained_in_float32_as_a_resumed_one_is(new_run, trained, tmp_path):
    checkpoint.save(checkpoint.load(trained.folder).bfloat16(), tmp_path / "half")
    run = new_run("next", steps=1, start_from=str(tmp_path / "half"), precision="32")
    train.fit(run)
    assert {x.dtype for x in weights(run).values() if x.is_floating_point()} == {torch.float32}


def test_it_goes_on_without_the_trained_model(new_run, trained):
    run = new_run("next", steps=2, start_from=str(trained.folder))
    train.fit(run)
    shutil.rmtree(trained.folder)
    train.fit(train.Run.read(run.folder).changed(steps=4))
    assert run.checkpoints()[-1].name == "step-00000004"


def test_it_begins_from_another_working_directory(new_run, trained, tmp_path, monkeypatch):
    """A folder is stored as an absolute path, and a model that comes with lintra by its name."""
    monkeypatch.chdir(tmp_path)
    run = new_run("next", steps=1, start_from="trained")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train.fit(train.Run.read(run.folder))
    assert run.checkpoints()
    assert new_run("shipped", start_from="mnist-small").train.start_from == "mnist-small"
    Path("mnist-small").mkdir()  # without a model, it does not stand for that which comes with lintra
    assert new_run("other", start_from="mnist-small").train.start_from == "mnist-small"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_run("home", start_from="~/trained").train.start_from == str(trained.folder)
    assert checkpoint.newest(Path("~/trained")) == trained.checkpoints()[-1]


def test_data_are_found_from_another_working_directory(new_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("once upon a time " * 40)
    run = new_run(task=text.Config(data="book.txt", length=8), steps=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train.fit(train.Run.read(run.folder))
    assert run.checkpoints()


def test_another_mechanism_may_take_the_weights_over(new_run, trained):
    run = new_run("next", start_from=str(trained.folder), attention=softmax.Config())
    model = first_model(run.model, run.train)
    assert model.config.attention == softmax.Config()
    assert torch.equal(model.head.weight, checkpoint.load(trained.folder).head.weight)


def test_a_model_of_other_features_is_refused(tmp_path):
    """Its features have as many numbers per frame, so that the weights would fit."""
    model = ctc.Config(
        symbols=Symbols("character", ("A", "B")),
        features=features.Config(bins=20),
        encoder=encoder.Config(inputs=16, layers=1, heads=2, width=16, causal=True),
    )
    checkpoint.save(model.build(), tmp_path / "trained")
    other = dataclasses.replace(model, features=features.Config(bins=20, shift_ms=12.5))
    with pytest.raises(checkpoint.Error, match="trained has other features than the model to be trained"):
        first_model(other, train.Config(start_from=str(tmp_path / "trained")))


def test_other_shapes_and_missing_models_are_refused(new_run, trained, tmp_path, capsys):
    run = new_run("next", start_from=str(trained.folder))
    with pytest.raises(checkpoint.Error, match=r"trained: embedding.* must be .*, got .*\["):
        first_model(dataclasses.replace(run.model, width=32), run.train)
    with pytest.raises(checkpoint.Error, match=r": it was trained with width=16, this model has width=32$"):
        first_model(dataclasses.replace(run.model, width=32), run.train)
    arguments = ["train", "digits", "--dir", str(tmp_path / "other"), "--start-from"]
    assert main([*arguments, str(trained.folder)]) == 2
    assert "lacks tensor 'blocks.1" in capsys.readouterr().err
    assert main([*arguments, "nowhere"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()

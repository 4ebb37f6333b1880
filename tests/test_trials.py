"""experiments/trials.py: a folder must hold the results of its own trial; a failed trial stops no other."""

import dataclasses
import json
import math
import os
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lintra import checkpoint, train
from lintra.attention import linear
from lintra.io.files import locked
from lintra.tasks import digits, images
from lintra.train.callbacks import Interrupted

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
from trials import Trial, tell, train_all

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.fixture
def trial(tmp_path, one_thread):
    task = digits.Config()
    model = dataclasses.replace(task.build().model(linear.Config()), layers=1, heads=2, width=16)
    training = train.Config(steps=1, batch=2, precision="32")
    return Trial("one", tmp_path / "one", task, model, training, "bits_per_dim", samples=4)


def test_it_goes_on_with_its_own_run_only(trial):
    trial.train()
    trial.check()
    dataclasses.replace(trial, training=dataclasses.replace(trial.training, precision="auto")).check()
    asked = dataclasses.replace(trial.model, attention=linear.Config(chunk=32))
    other = dataclasses.replace(trial, model=asked, training=dataclasses.replace(trial.training, lr=0.5))
    with pytest.raises(ValueError, match=r"one holds a run of other settings than 'one': ") as refused:
        other.train()
    assert "model.attention.chunk is 64 there and 32 here, train.lr is 0.001 there and 0.5 here" in str(
        refused.value
    )


def test_a_trial_is_scored_on_what_it_is_for(trial, tmp_path):
    """On test samples, or on others if the score selects something: the mean over those alone."""
    for split in ("test", "validate"):
        one = dataclasses.replace(trial, folder=tmp_path / split, split=split)
        one.train()
        task, model = one.task.build(), checkpoint.load(one.folder)
        expected = task.score(model, getattr(task, split).__getitems__(range(4)))["bits_per_dim"]
        assert one.scored() == pytest.approx(expected.item(), rel=1e-5)  # float32


def test_one_process_trains_it_at_a_time(trial):
    trial.train()
    before = trial.result.stat().st_mtime_ns
    lock = trial.folder.with_name(".one.lock")
    with locked(lock), pytest.raises(checkpoint.Error, match="another process"):
        trial.train()
    trial.train()  # it is finished
    assert trial.result.stat().st_mtime_ns == before


def test_fields_that_a_run_lacks_have_their_defaults(trial):
    run = train.Run.create(trial.folder, task=trial.task, model=trial.model, train=trial.training)
    content = json.loads((run.folder / "run.json").read_text())
    del content["train"]["patience"], content["model"]["context"]
    (run.folder / "run.json").write_text(json.dumps(content))
    trial.check()
    with pytest.raises(ValueError, match=r"train\.patience is 3 there and 4 here"):
        dataclasses.replace(trial, training=dataclasses.replace(trial.training, patience=4)).check()


def test_nothing_is_trained_beside_a_folder_of_another(trial, tmp_path, capsys):
    trial.train()
    other = dataclasses.replace(trial, training=dataclasses.replace(trial.training, seed=1))
    trials = [dataclasses.replace(trial, name="two", folder=tmp_path / "two"), other]
    with pytest.raises(SystemExit, match=r"one holds a run of other settings .* train\.seed is 0 there"):
        train_all(trials, workers=1, minutes=1)
    assert not (tmp_path / "two").exists()
    capsys.readouterr()
    tell(trials)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "to do two"
    assert second.endswith("delete or rename the folder")


def test_what_another_machine_has_trained_is_not_trained_again(trial, tmp_path, capsys):
    kept = tmp_path / "one.json"
    kept.write_text(json.dumps({"settings": trial.settings(), "score": 1.0}))
    there = dataclasses.replace(trial, kept=kept)
    train_all([there], workers=1, minutes=1)
    tell([there])
    assert capsys.readouterr().out == "done  one\n"
    assert not trial.folder.exists()
    assert there.concluded()["score"] == 1.0
    older = json.loads(kept.read_text())
    assert older["settings"]["train"].pop("ema") is None  # as if written before this setting existed
    kept.write_text(json.dumps(older))
    assert there.concluded() is not None
    other = dataclasses.replace(there, training=dataclasses.replace(trial.training, seed=1))
    with pytest.raises(SystemExit, match=r"one\.json is of other settings than 'one'"):
        train_all([other], workers=1, minutes=1)


def test_what_came_of_a_training_is_kept_once(trial, tmp_path):
    ten = dataclasses.replace(trial.training, steps=10)  # the first step that is logged with its time
    kept = dataclasses.replace(trial, training=ten, kept=tmp_path / "kept" / "one.json")
    kept.conclude("train", lambda one: {"score": one.scored()})
    assert not kept.kept.exists()
    kept.train()
    kept.conclude("train", lambda one: {"score": one.scored()})
    told = kept.concluded()
    assert told["score"] == kept.scored()
    assert set(told["curve"]) == {"10"}
    assert told["minutes_by_the_clock"] == max(train.curves(kept.folder)["minutes"].values()) > 0
    kept.conclude("train", lambda one: {"score": None})
    assert kept.concluded() == told


def test_one_that_diverges_is_kept_as_such(trial, tmp_path):
    training = dataclasses.replace(trial.training, steps=10, warmup=0, optimizer="adamw", lr=1e29, clip=None)
    kept = dataclasses.replace(trial, training=training, kept=tmp_path / "kept.json")
    kept.train()
    assert math.isnan(kept.scored())
    kept.conclude("train", lambda one: pytest.fail("there is nothing to find in it"))
    told = kept.concluded()
    assert told["diverged"] is True
    assert "not finite" in told["why"]
    train_all([kept], workers=1, minutes=1)  # it is not trained again


def test_a_rate_with_which_speech_diverges_loses_its_search(monkeypatch, tmp_path):
    run = runpy.run_path(str(EXPERIMENTS / "speech" / "run.py"))
    rates = run["RATES"]["an4", "softmax"]
    gone = {"curve": {}, "diverged": True}
    kept = {lr: {"curve": {"4000": 0.1 * lr}} for lr in rates} | {rates[0]: gone}
    monkeypatch.setitem(
        run["searched"].__globals__,
        "trial",
        lambda corpus, model, seed, data, lr: SimpleNamespace(concluded=lambda: kept[lr], seed=seed, lr=lr),
    )
    assert run["searched"]("an4", "softmax", tmp_path)[rates[0]] is None
    assert {one.lr for one in run["seeds"]("an4", "softmax", tmp_path)} == {rates[1]}
    kept |= dict.fromkeys(rates, gone)
    assert run["seeds"]("an4", "softmax", tmp_path) == []


def test_where_the_data_lies_is_no_setting(trial):
    here, there = (
        dataclasses.replace(trial, task=images.Config(data="mnist", data_dir=place)) for place in "ab"
    )
    assert here.settings() == there.settings()


@pytest.mark.slow
def test_one_that_fails_stops_no_other(trial, tmp_path, capsys):
    bad = dataclasses.replace(trial, name="bad", folder=tmp_path / "bad", score="none")
    with pytest.raises(SystemExit, match=r"^bad failed: KeyError: 'none'$"):
        train_all([bad, trial], workers=1, minutes=1)
    assert trial.scored() is not None
    assert "2 of 2: one: bits_per_dim" in capsys.readouterr().out


class Killed(Trial):
    """As the system kills a process that uses too much memory."""

    def train(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Stopped(Trial):
    """As by Ctrl-C, which also reaches the training processes."""

    def train(self) -> None:
        run = train.Run.create(self.folder, task=self.task, model=self.model, train=self.training)
        raise Interrupted(signal.SIGINT, run, 0)


@pytest.mark.parametrize("kind", [Killed, pytest.param(Stopped, marks=pytest.mark.slow)])
def test_one_that_is_stopped_ends_all(trial, tmp_path, kind):
    values = {field.name: getattr(trial, field.name) for field in dataclasses.fields(trial)}
    gone = kind(**{**values, "folder": tmp_path / "gone"})
    with pytest.raises(SystemExit, match="a training was stopped or killed: the same command resumes"):
        train_all([gone, trial], workers=1, minutes=1)
    assert trial.scored() is None

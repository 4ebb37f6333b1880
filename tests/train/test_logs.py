"""Where metrics go besides files: Weights & Biases, offline, and what a stand-in for it receives."""

import json
import sys
import time
from types import SimpleNamespace

import pytest

from lintra import train
from lintra.checkpoint import Error
from lintra.io.files import read_json
from lintra.train import logs
from lintra.train.callbacks import Interrupted, StopCallback

SMALL = {"steps": 12, "validate_every": 6, "wandb": "tests"}


class Told:
    """A run of Weights & Biases that records what it receives."""

    def __init__(self):
        self.lines, self.ended, self.begun = [], [], []

    def init(self, **settings):
        self.begun.append(settings)
        return self

    def define_metric(self, *args, **settings):
        pass

    def log_metrics(self, metrics, step):
        self.lines.append({"step": step, **metrics})

    def save(self):
        pass

    def finish(self, exit_code):
        self.ended.append(exit_code)


@pytest.fixture
def told(monkeypatch):
    """Replaces the package, and the logger of Lightning around a run of it."""
    told = Told()
    package = SimpleNamespace(init=told.init, Settings=lambda **given: given, Error=ConnectionError)
    monkeypatch.setitem(sys.modules, "wandb", package)

    class Logger(logs.CSVLogger):
        def __init__(self, experiment):
            super().__init__(experiment.begun[-1]["dir"], name="told")
            self.log_metrics = experiment.log_metrics

    monkeypatch.setattr(logs, "WandbLogger", Logger)
    return told


def test_what_a_run_tells(new_run, told):
    run = new_run(**SMALL)
    train.fit(run)
    (begun,) = told.begun
    assert (begun["project"], begun["name"], begun["resume"]) == ("tests", "run", "allow")
    assert begun["config"]["train"]["steps"] == 12
    assert {line["step"] for line in told.lines} == {6, 10, 12}
    assert all("train_loss" in line for line in told.lines if line["step"] == 10)
    assert any("validate_loss" in line for line in told.lines if line["step"] == 6)
    train.fit(train.Run.read(run.folder).changed(steps=20), verbosity="result")
    again = told.begun[1]
    assert again["id"] == begun["id"] == read_json(run.folder / "logs" / "wandb.json")["id"]
    assert (begun["settings"], again["settings"]) == ({"silent": False}, {"silent": True})
    assert told.lines[-1]["step"] == 20
    assert told.ended == [0, 0]


def test_a_run_that_is_stopped_says_so(new_run, told, monkeypatch):
    monkeypatch.setattr(StopCallback, "on_train_batch_end", lambda stop, *args: setattr(stop, "signum", 2))
    with pytest.raises(Interrupted):
        train.fit(new_run(**SMALL))
    assert told.ended == [1]


def test_no_account(new_run, told):
    def refuse(**settings):
        raise ConnectionError("No API key configured")

    sys.modules["wandb"].init = refuse
    run = new_run(**SMALL)
    with pytest.raises(Error, match="set WANDB_MODE=offline to log to files: No API key configured"):
        train.fit(run)
    (run.folder / "logs" / "wandb.json").write_text(json.dumps({"id": 3}))
    with pytest.raises(Error, match=r"wandb\.json is damaged: delete it"):
        train.fit(run)


def test_without_the_package(new_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lintra\[wandb\]'"):
        train.fit(new_run(**SMALL))
    with pytest.raises(ValueError, match="wandb must be the name of a project, got ''"):
        train.Config(wandb="")


@pytest.mark.slow  # starts and ends a process of Weights & Biases
@pytest.mark.filterwarnings("default")  # those of its packages
def test_offline(new_run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = new_run(**SMALL)
    train.fit(run)
    name = read_json(run.folder / "logs" / "wandb.json")["id"]
    (file,) = run.folder.glob(f"logs/wandb/offline-run-*-{name}/run-{name}.wandb")
    until = time.monotonic() + 60  # its process may write the last of it after fit has returned
    while b"bits_per_dim" not in file.read_bytes() and time.monotonic() < until:
        time.sleep(0.1)
    content = file.read_bytes()
    assert b"validate_loss" in content
    assert b"bits_per_dim" in content

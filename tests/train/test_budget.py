"""A schedule that fits into the time, by a fake clock on which a step takes a second."""

import json

import pytest

from lintra import checkpoint, train
from lintra.train import Config
from lintra.train.budget import shortened
from lintra.train.callbacks import StopCallback
from lintra.train.learner import Learner
from lintra.train.schedule import learning_rate
from tests.train.conftest import assert_same_weights

ASKED = {"steps": 5_000, "warmup": 500, "schedule": "cosine", "max_minutes": 2, "validate_every": 1_000}


class Clock:
    """Seconds since training began or was resumed. The first step takes five of them."""

    def __init__(self):
        self.seconds, self.step, self.validation = 0.0, 1.0, 0.0
        self.begun = False

    def start(self):
        self.seconds, self.begun = 0.0, False

    def after_step(self):
        self.seconds += self.step if self.begun else 5.0
        self.begun = True


@pytest.fixture
def clock(monkeypatch):
    clock, step, validate = Clock(), Learner.training_step, Learner.validation_step

    def training_step(learner, batch, batch_idx):
        clock.after_step()
        return step(learner, batch, batch_idx)

    def validation_step(learner, batch, batch_idx):
        clock.seconds += clock.validation if batch_idx == 0 else 0
        validate(learner, batch, batch_idx)

    monkeypatch.setattr(StopCallback, "on_train_start", lambda *_: clock.start())
    monkeypatch.setattr(StopCallback, "elapsed", lambda stop: clock.seconds)
    monkeypatch.setattr(Learner, "training_step", training_step)
    monkeypatch.setattr(Learner, "validation_step", validation_step)
    return clock


def test_the_schedule_fits_into_the_time(new_run, clock, capsys):
    run = new_run(**ASKED)
    train.fit(run)
    out = capsys.readouterr().out
    # The second step ends after 6 seconds, a 20th of the time: 114 more of a second each fit into the rest.
    assert out.count("116 steps fit into 2 minutes, of 5,000: the schedule is shortened") == 1
    assert "done: step 116" in out
    assert clock.seconds == 120
    rates = train.curves(run.folder)["lr"]
    fitted = shortened(run.train, 116)
    assert fitted.warmup == 12  # 11.6
    for step in range(10, 120, 10):
        assert rates[step] == pytest.approx(learning_rate(fitted, step - 1))
    written = train.Run.read(run.folder)
    assert (written.train, written.fitted_steps, written.steps) == (run.train, 116, 116)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_schedule(new_run, clock, monkeypatch, capsys):
    """Even if the machine is faster by then."""
    whole, halved = new_run("whole", **ASKED), new_run("halved", **ASKED, save_every=30)
    train.fit(whole)
    step = Learner.training_step

    def killed(learner, batch, batch_idx):
        if learner.trainer.global_step == 40:
            raise OSError("killed")
        return step(learner, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "training_step", killed)
        with pytest.raises(OSError, match="killed"):
            train.fit(halved)
    clock.step = 0.5
    capsys.readouterr()
    train.fit(train.Run.read(halved.folder))
    assert "fit into" not in capsys.readouterr().out
    assert_same_weights(whole, halved)


@pytest.mark.slow
def test_other_steps_are_fitted_anew(new_run, clock, capsys):
    run = new_run(**ASKED)
    train.fit(run)
    again = train.Run.read(run.folder).changed(steps=5_000)
    assert train.Run.read(run.folder).fitted_steps is None
    train.fit(again)
    assert "116 steps fit into 2 minutes, up to step 232, of 5,000" in capsys.readouterr().out
    assert train.Run.read(run.folder).steps == 232


def test_more_time_after_the_last_step_is_used(new_run, clock, capsys):
    run = new_run(**ASKED)
    train.fit(run)
    again = train.Run.read(run.folder).changed(max_minutes=2.0)
    assert again.fitted_steps is None
    train.fit(again)
    assert "116 steps fit into 2 minutes, up to step 232, of 5,000" in capsys.readouterr().out


def test_more_time_before_the_last_step_changes_no_schedule(new_run):
    run = new_run(**ASKED).changed(fitted_steps=116)
    assert run.changed(max_minutes=4.0).fitted_steps == 116


def test_the_time_of_validations_counts(new_run, clock, capsys):
    """Their time is known after the first: eight validations of five seconds leave time for 76 steps."""
    clock.validation = 5.0
    run = new_run(**ASKED | {"validate_every": 10})
    train.fit(run)
    out = capsys.readouterr().out
    steps = train.Run.read(run.folder).steps
    assert 70 <= steps <= 80
    assert f"done: step {steps}" in out
    assert clock.seconds <= 120 + clock.validation  # the last validation is of the final weights


def test_no_schedule_becomes_longer(new_run, clock, capsys):
    run = new_run(**ASKED | {"steps": 30, "warmup": 3})
    train.fit(run)
    assert "fit into" not in capsys.readouterr().out
    assert train.Run.read(run.folder) == train.Run.read(run.folder).changed(steps=30)
    assert run.checkpoints()[-1].name == "step-00000030"


def test_training_stops_at_the_limit_whatever_the_speed_was(new_run, clock, monkeypatch, capsys):
    step = Learner.training_step

    def slower(learner, batch, batch_idx):
        clock.step = 1.0 if learner.trainer.global_step < 40 else 10.0
        return step(learner, batch, batch_idx)

    monkeypatch.setattr(Learner, "training_step", slower)
    run = new_run(**ASKED)
    train.fit(run)
    assert "time is up" in capsys.readouterr().out
    assert clock.seconds < 120 + 10
    assert train.Run.read(run.folder).steps == 116


def test_what_is_shortened():
    asked = Config(steps=1_000, warmup=100, drop_at=300, schedule="step")
    assert shortened(asked, 1_000) == asked
    assert shortened(asked, 100) == Config(steps=100, warmup=10, drop_at=30, schedule="step")
    assert shortened(asked, 1).warmup == 1
    assert shortened(Config(steps=1_000), 10).warmup == 0


@pytest.mark.parametrize(
    ("steps", "message"),
    [("7", "fitted_steps must be int or None, got '7'"), (13, r"fitted_steps must lie in 1 \.\. steps")],
)
def test_damaged_steps(new_run, steps, message):
    run = new_run()
    file = run.folder / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"fitted_steps": steps}))
    with pytest.raises(checkpoint.Error, match=message):
        train.Run.read(run.folder)

"""Settings: what is refused, what the learning rate does, what a run stores of them."""

import dataclasses
import json
import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from lintra import checkpoint, train
from lintra.attention import linear
from lintra.io.files import locked
from lintra.models import bilstm, encoder
from lintra.tasks import text_classification
from lintra.train import Config
from lintra.train.schedule import LearningRateSchedule, learning_rate, notices


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seed": 99999999999999999999999}, r"seed must lie in 0 .. 2\^64 - 1, got 99999999999999999999999"),
        ({"seed": -1}, r"seed must lie in 0 .. 2\^64 - 1, got -1"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"lr": 0.0}, "lr must be above 0 and below 1e30, got 0.0"),
        ({"lr": float("nan")}, "lr must be above 0 and below 1e30, got nan"),
        ({"max_minutes": -1.0}, "max_minutes must be above 0 and below 1e30, got -1.0"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0 and finite, got nan"),
        ({"warmup": -1}, "warmup must be at least 0 and finite, got -1"),
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"timeout": 0.0}, "timeout must be above 0 and at most 1e7 seconds, got 0.0"),
        ({"timeout": float("inf")}, "timeout must be above 0 and at most 1e7 seconds, got inf"),
        ({"optimizer": "sgd"}, "optimizer must be 'radam' or 'adamw' or 'muon', got 'sgd'"),
        (
            {"schedule": "linear"},
            "schedule must be 'constant' or 'step' or 'cosine' or 'wsd' or 'plateau', got 'linear'",
        ),
    ],
)
def test_refusals(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Config(**settings)


def test_devices_share_a_batch_evenly(new_run):
    """A batch of sequences; one of tokens can be divided among any number of devices."""
    run = new_run(batch=3, devices=2)
    with pytest.raises(ValueError, match="batch must be a multiple of devices=2, got 3"):
        train.fit(run)
    assert run.checkpoints() == []
    Config(batch=16, devices=3).check_batch(batch_tokens=2_000)


def test_learning_rates():
    step = Config(lr=1.0, schedule="step", drop_at=10, warmup=3)
    assert [learning_rate(step, s) for s in (0, 1, 2, 3, 9, 10, 99)] == [0.25, 0.5, 0.75, 1, 1, 0.1, 0.1]
    cosine = Config(lr=1.0, schedule="cosine", warmup=0, steps=100)
    assert learning_rate(cosine, 0) == 1
    assert learning_rate(cosine, 50) == pytest.approx(0.5)
    assert learning_rate(cosine, 100) == learning_rate(cosine, 200) == 0
    warmed = Config(lr=1.0, schedule="cosine", warmup=10, steps=110)
    assert [learning_rate(warmed, s) for s in (10, 60, 110)] == [1, pytest.approx(0.5), 0]
    wsd = Config(lr=1.0, schedule="wsd", steps=100)
    assert [learning_rate(wsd, s) for s in (0, 60, 80, 100, 200)] == [1, 1, 0.5, 0, 0]
    assert learning_rate(Config(lr=0.5), 10**6) == 0.5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"warmup": 100}, []),
        ({"warmup": 1_000}, ["The learning rate rises to the last step: --warmup is 1,000 of 1,000 steps"]),
        (
            {"schedule": "step"},
            ["The learning rate never drops: --drop-at is 3,000 of 1,000 steps"],
        ),
        ({"schedule": "step", "drop_at": 999}, []),
        (
            {"schedule": "plateau"},
            ["The learning rate is never halved: --patience is 3 validations, one every 500 of 1,000 steps"],
        ),
        (
            {"schedule": "plateau", "validate_every": 250},  # halved at the last step, with no effect
            ["The learning rate is never halved: --patience is 3 validations, one every 250 of 1,000 steps"],
        ),
        ({"schedule": "plateau", "validate_every": 249}, []),
    ],
)
def test_what_a_schedule_does_not_come_to_is_said(settings, said):
    assert notices(train.Config(steps=1_000, **settings)) == said


def test_a_plateau_halves_the_learning_rate():
    """After so many validations without a new lowest loss, counted again from each halving."""
    rate, factors = LearningRateSchedule(Config(schedule="plateau", patience=2)), []
    for loss in (3.0, 2.0, 2.5, 1.9, 1.9, 2.0, 3.0, 1.9, 1.8, 1.7):
        rate.update(loss)
        factors.append(rate.factor)
    assert factors == [1, 1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_a_validation_counts_once():
    """Even if it is made twice at a step."""
    rate = LearningRateSchedule(Config(schedule="plateau", patience=2, validate_every=5))
    for step in (5, 10, 10):
        trainer = SimpleNamespace(global_step=step, callback_metrics={"validate_loss": 1.0})
        rate.on_validation_end(trainer, None)
    assert (rate.factor, rate.waited) == (1, 1)


def test_a_run_remembers_everything(new_run):
    run = new_run(warmup=7, clip=None, schedule="cosine", max_minutes=2)
    assert train.Run.read(run.folder) == run
    assert train.Run.read(run.changed(steps=99).folder) == dataclasses.replace(
        run, train=dataclasses.replace(run.train, steps=99)
    )


def test_a_run_knows_the_kind_of_its_model(new_run, tmp_path):
    run = new_run()
    content = json.loads((run.folder / "run.json").read_text())
    assert content["model"]["name"] == "decoder"
    task = text_classification.Config(data="reviews.tsv")
    for model in (
        encoder.Config(vocabulary=256, outputs=2, pool="mean"),
        bilstm.Config(vocabulary=256, outputs=2, pool="first"),
    ):
        other = train.Run.create(tmp_path / type(model).__module__, task=task, model=model, train=Config())
        assert train.Run.read(other.folder) == other


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_a_run_that_another_program_is_beginning_is_not_begun(tmp_path):
    task = text_classification.Config(data="reviews.tsv")
    model = encoder.Config(vocabulary=256, outputs=2, pool="mean")
    with locked(tmp_path), pytest.raises(checkpoint.Error, match="by another process"):
        train.Run.create(tmp_path, task=task, model=model, train=Config())
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_never_overwritten(new_run):
    run = new_run()
    with pytest.raises(checkpoint.Error, match=rf"{run.folder} holds a run already: .*--resume"):
        new_run(seed=1)
    assert train.Run.read(run.folder) == run
    checkpoint.save(run.model.build(), run.folder / "step-00000001")
    (run.folder / "run.json").unlink()  # its weights would otherwise be taken for those of the next run
    with pytest.raises(checkpoint.Error, match=rf"{run.folder} holds checkpoints without their run.json"):
        new_run(seed=1)


def test_damaged_runs(new_run, tmp_path):
    with pytest.raises(checkpoint.Error, match=r"nothing holds no run: there is no run\.json"):
        train.Run.read(tmp_path / "nothing")
    run = new_run()
    good = json.loads((run.folder / "run.json").read_text())
    for change, message in [
        ({"format": 3}, r"run.json has format 3, this lintra reads formats 1 and 2"),
        ({"format": None}, r"run.json has format None, this lintra reads formats 1 and 2"),
        ({"task": 3}, "task must be an object, got 3"),
        ({"train": None}, "train must be an object, got None"),
        ({"train": good["train"] | {"pace": 1}}, "unknown field 'pace'"),
        ({"train": good["train"] | {"steps": 0}}, "steps must be at least 1"),
        (
            {"task": {"name": "juggling"}},
            r"run.json: its task is 'juggling', which does not come with lintra \(copy, .*\): the program",
        ),
        ({"task": ["digits"]}, r"task must be an object, got \['digits'\]"),
        ({"task": good["task"] | {"name": ["digits"] * 1000}}, r"its task is \['digits', .* \.\.\., which"),
        ({"model": good["model"] | {"name": ["x"] * 1000}}, r"model must be one of .*; got \['x', "),
        ({"train": ["x"] * 1000}, r"train must be an object, got \['x', "),
        ({"format": ["x"] * 1000}, r"run.json has format \['x', .* \.\.\., this lintra reads"),
        ({"model": None}, "model must be an object"),
        (
            {"model": {"name": "gpt"}},
            "model must be one of bilstm, ctc, decoder, encoder, forecaster, seq2seq; got 'gpt'",
        ),
    ]:
        (run.folder / "run.json").write_text(json.dumps(good | change))
        with pytest.raises(checkpoint.Error, match=message) as found:
            train.Run.read(run.folder)
        assert "is damaged" not in str(found.value)
        assert len(str(found.value).replace(str(run.folder), "")) < 400
    (run.folder / "run.json").write_text("{")
    with pytest.raises(checkpoint.Error, match="is damaged"):
        train.Run.read(run.folder)


@dataclass(frozen=True, kw_only=True)
class MineConfig(linear.Config):
    """A custom mechanism, in no folder of lintra."""


def test_a_mechanism_of_one_s_own_begins_no_run(new_run, tmp_path):
    """None of its checkpoints could be saved: this is detected before the first step."""
    with pytest.raises(
        TypeError, match=r"model\.attention is a MineConfig of tests\.train\.test_config, which no"
    ):
        new_run(attention=MineConfig())
    assert not list(tmp_path.iterdir())

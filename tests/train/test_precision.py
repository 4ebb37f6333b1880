"""The choice of a precision: what is measured, and what happens if memory is short."""

import pytest
import torch

from lintra.attention import linear
from lintra.tasks import digits
from lintra.train import Config, precision
from lintra.train.precision import choose_precision


@pytest.fixture
def passes(monkeypatch):
    """Passes of a fixed time, twice as fast in bf16 -> (samples, recomputed, bf16) of each."""
    found = []

    def seconds(model, task, batch, bf16):
        found.append((len(batch["tokens"]), model.config.checkpoint_blocks, bf16))
        return 0.01 if bf16 else 0.02

    monkeypatch.setattr(precision, "_seconds", seconds)
    return found


def chosen(**settings):
    task = digits.Config().build()
    return choose_precision(task.model(linear.Config()), task, Config(precision="auto", **settings))


@pytest.mark.parametrize(("half", "expected"), [(0.95, "32"), (0.5, "bf16")])
def test_float32_stays_where_bf16_gains_little(monkeypatch, half, expected):
    monkeypatch.setattr(precision, "_seconds", lambda model, task, batch, bf16: half if bf16 else 1.0)
    assert chosen(batch=8) == expected


def test_no_more_samples_are_measured_than_are_computed_at_once(passes):
    assert chosen(batch=64, accumulate=8, checkpoint_blocks=True) == "bf16"
    assert [samples for samples, _, _ in passes] == [1] * 6 + [4] * 6 + [8] * 6
    assert all(recomputed for _, recomputed, _ in passes)


def test_where_float32_finds_no_room_the_last_size_that_does_decides(passes, monkeypatch):
    measured = precision._seconds

    def seconds(model, task, batch, bf16):
        if len(batch["tokens"]) > limit and not bf16:
            raise torch.OutOfMemoryError("no room")
        return measured(model, task, batch, bf16) * (1 if bf16 else 0.1)  # float32 is faster here

    monkeypatch.setattr(precision, "_seconds", seconds)
    limit = 4
    assert chosen(batch=64) == "32"
    limit = 0
    assert chosen(batch=64) == "bf16"

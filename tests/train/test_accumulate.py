"""A batch computed in parts, or with recomputed blocks, is the same batch: only the memory differs."""

import pytest
import torch

from lintra import train
from lintra.attention import linear
from lintra.nn import Block
from lintra.tasks import copy
from tests.train.conftest import assert_same_weights, weights


@pytest.mark.parametrize("accumulate", [2, 3, 20])
def test_a_batch_in_parts(new_run, accumulate):
    """Parts of the copy task hold different numbers of predictions; 20 parts are more than there are samples.

    To the order of sums in float32: 1e-5, where the weights have moved by 1e-2."""
    settings = {"task": copy.Config(length=12), "dropout": 0.0, "steps": 4, "lr": 0.1, "ema": 0.5}
    whole, parts = (new_run(str(x), **settings, accumulate=x) for x in (1, accumulate))
    train.fit(whole)
    train.fit(parts)
    torch.testing.assert_close(weights(parts), weights(whole), rtol=0, atol=1e-5)


@pytest.mark.parametrize("counting", [1, 0], ids=["in some parts", "in none"])
def test_parts_without_a_token_that_counts(new_run, monkeypatch, counting):
    """Each part is one sample; in every second one, or in all, no token counts.

    To the order of sums in float32, where the weights have moved by 1e-1."""
    getitems = copy.CopySamples.__getitems__

    def some_count(samples, indices):
        batch = getitems(samples, indices)
        batch["counted"] &= (torch.arange(len(indices)) % 2 < counting)[:, None]
        return batch

    monkeypatch.setattr(copy.CopySamples, "__getitems__", some_count)
    settings = {"task": copy.Config(length=12), "dropout": 0.0, "steps": 20, "lr": 0.1}
    whole, parts = (new_run(str(x), **settings, accumulate=x) for x in (1, 8))
    losses = []
    for run in (whole, parts):
        train.fit(run)
        losses.append(train.curves(run.folder)["train_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    torch.testing.assert_close(weights(parts), weights(whole), rtol=0, atol=1e-4)


def test_the_score_of_no_predictions_is_0():
    task = copy.Config(length=12).build()
    batch = task.train.__getitems__([0, 1])
    batch["counted"][:] = False
    score = task.score(task.model(linear.Config()).build(), batch)
    assert score == {"loss": 0, "accuracy": 0, "weight": 0}


def test_parts_are_resumed_exactly(new_run):
    whole, halved = (new_run(name, accumulate=2, steps=8, save_every=3) for name in ("whole", "halved"))
    train.fit(whole)
    train.fit(halved.changed(steps=4))
    train.fit(halved.changed(steps=8))
    assert_same_weights(whole, halved)


def test_blocks_computed_again(new_run, monkeypatch):
    """With the same dropout as the first time."""
    plain = new_run("plain", steps=3)
    again = new_run("again", steps=3, checkpoint_blocks=True)
    calls, forward = [], Block.forward
    monkeypatch.setattr(Block, "forward", lambda *args, **named: calls.append(1) or forward(*args, **named))
    train.fit(plain)
    once = len(calls)
    train.fit(again)
    assert len(calls) - once == once + 3  # one block, in three steps; a validation recomputes none
    assert_same_weights(plain, again)

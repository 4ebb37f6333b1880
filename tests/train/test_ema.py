"""A running mean of the weights: its value, and that a run with one can be stopped anywhere as well."""

import pytest
import torch

from lintra import checkpoint, train
from lintra.attention import performer
from lintra.train import callbacks
from lintra.train.data_checks import spread
from tests.train.conftest import assert_same_weights, weights


@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_the_mean_is_that_of_the_weights_after_each_step(new_run, monkeypatch, decay):
    monkeypatch.setattr(callbacks, "KEPT", 12)
    plain = new_run("plain", save_every=1)
    averaged = new_run("averaged", ema=decay)
    train.fit(plain)
    train.fit(averaged)
    steps = [dict(checkpoint.load(folder).named_parameters()) for folder in plain.checkpoints()]
    assert len(steps) == 12
    mean = {name: x.detach().double() for name, x in steps[0].items()}
    for done, step in enumerate(steps[1:], 1):
        kept = min(decay, (1 + done) / (10 + done))
        mean = {name: kept * x + (1 - kept) * step[name].detach().double() for name, x in mean.items()}
    model = checkpoint.load(averaged.folder)
    for name, x in model.named_parameters():
        torch.testing.assert_close(x.detach().double(), mean[name], rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(x, steps[-1][name]) for name, x in model.named_parameters())


def test_a_decay_of_0_is_no_mean(new_run):
    whole, averaged = new_run("whole"), new_run("averaged", ema=0.0)
    train.fit(whole)
    train.fit(averaged)
    assert_same_weights(whole, averaged)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 5, 6, 7])
def test_resumed_at_any_step_is_the_same(new_run, stop):
    """The trained weights are stored beside the mean, even at the end: a run may be given more steps."""
    whole, halved = new_run("whole", ema=0.9), new_run("halved", ema=0.9, steps=stop)
    train.fit(whole)
    train.fit(halved)
    train.fit(train.Run.read(halved.folder).changed(steps=12))
    assert_same_weights(whole, halved)


def test_random_features_are_not_averaged(new_run):
    """A mean of orthogonal directions is not orthogonal: the latest directions are used."""
    settings = {"attention": performer.Config(features=16, redraw_every=3), "steps": 8}
    plain, averaged = new_run("plain", **settings), new_run("averaged", ema=0.9, **settings)
    train.fit(plain)
    train.fit(averaged)
    buffers = dict(checkpoint.load(plain.folder).named_buffers())
    same = [torch.equal(weights(averaged)[name], weights(plain)[name]) for name in buffers]
    assert same
    assert all(same)


def test_validation_is_of_the_mean(new_run):
    run = new_run(ema=0.99, steps=6)
    train.fit(run)
    task, model = run.task.build(), checkpoint.load(run.folder)
    places = spread(len(task.validate), 16 * 8)
    batches = [task.validate.__getitems__(places[first : first + 8]) for first in range(0, 128, 8)]
    with torch.no_grad():
        losses = [float(task.score(model, batch)["loss"]) for batch in batches]
    found = train.curves(run.folder)["validate_loss"][6]
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize("ema", [1.0, -0.1, float("nan")])
def test_refused(ema):
    with pytest.raises(ValueError, match="ema must be at least 0 and below 1"):
        train.Config(ema=ema)

"""Random features are redrawn between steps: when the configuration says so, alike on every process."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from lintra import train
from lintra.attention import linear
from lintra.tasks import digits
from lintra.train.learner import Learner


class Drawn(linear.LinearAttention):
    """For the tests: records what it was given to draw from."""

    def __init__(self, config, **shape):
        super().__init__(linear.Config(), **shape)
        self.config = config
        self.drawn = []

    def redraw(self, generator):
        self.drawn.append(torch.rand(3, generator=generator))


@dataclass(frozen=True, kw_only=True)
class Config:
    redraw_every: int | None

    def build(self, **shape):
        return Drawn(self, **shape)


def learner(every, seed=0):
    task = digits.Config().build()
    config = dataclasses.replace(
        task.model(Config(redraw_every=every)), layers=2, heads=2, width=16, position="sinusoidal"
    )
    return Learner(config.build(), task, train.Config(seed=seed))


def drawn(learning):
    return [block.attn.attention.drawn for block in learning.model.blocks]


def test_at_every_so_many_steps_but_not_at_the_first():
    learning = learner(3)
    before = torch.get_rng_state()
    for step in range(10):
        learning._redraw(step)
    assert torch.equal(torch.get_rng_state(), before)
    one, other = drawn(learning)
    assert len(one) == len(other) == 3
    assert len(torch.stack(one + other).unique(dim=0)) == 6  # every layer and every step has its own
    resumed = learner(3)
    resumed._redraw(6)
    assert torch.equal(drawn(resumed)[1][0], other[1])  # whatever was drawn before
    another = learner(3, seed=1)
    another._redraw(6)
    assert not torch.equal(drawn(another)[1][0], other[1])


@pytest.mark.parametrize("every", [None, 0])
def test_never_unless_asked_for(every):
    learning = learner(every)
    for step in range(10):
        learning._redraw(step)
    assert drawn(learning) == [[], []]


def test_training_draws_between_its_steps(new_run, monkeypatch):
    """Before the step with that number."""
    steps = []
    redraw = Learner._redraw
    monkeypatch.setattr(Learner, "_redraw", lambda self, step: steps.append(step) or redraw(self, step))
    train.fit(new_run(steps=3))
    assert steps == [0, 1, 2]

"""What the optimiser is given."""

import dataclasses

import torch

from lintra import train
from lintra.attention import delta, linear
from lintra.tasks import digits
from lintra.train._learner import Learner
from tests.train.conftest import assert_same_weights


def groups(mechanism):
    task = digits.Config().build()
    model = dataclasses.replace(task.model(mechanism), layers=2, heads=2, width=16).build()
    learner = Learner(model, task, train.Config(weight_decay=0.1))
    names = {id(x): name for name, x in learner.named_parameters()}
    optimizer = learner.configure_optimizers()
    return [({names[id(x)] for x in g["params"]}, g["weight_decay"]) for g in optimizer.param_groups], names


def test_what_a_mechanism_wants_left_alone_does_not_decay():
    (decayed, others), names = groups(delta.Config())
    assert decayed[0] | others[0] == set(names.values())
    assert {name.rpartition(".")[2] for name in others[0]} == {"A_log", "dt_bias"}
    assert len(others[0]) == 4  # of two layers
    assert (decayed[1], others[1]) == (0.1, 0.0)
    (everything,), names = groups(linear.Config())
    assert everything == (set(names.values()), 0.1)


def test_two_groups_are_resumed_exactly(new_run):
    whole, parts = (new_run(name, attention=delta.Config()) for name in ("whole", "parts"))
    train.fit(whole)
    train.fit(parts.changed(steps=5))
    train.fit(parts.changed(steps=12))
    assert_same_weights(parts, whole)
    assert torch.isfinite(torch.tensor(list(train.curves(whole.folder)["train_loss"].values()))).all()

"""Blocks compiled with torch.compile learn the same as without it."""

import functools

import pytest
import torch
from torch import nn

from lintra import train
from lintra.attention import linear, softmax
from lintra.tasks import copy
from tests.train.conftest import assert_same_weights, weights


@pytest.fixture
def compiled(monkeypatch):
    """The modules that are compiled, with a backend that computes like PyTorch."""
    found, compile = [], nn.Module.compile

    def traced(module):
        found.append(type(module).__name__)
        compile(module, backend="eager", fullgraph=True)

    monkeypatch.setattr(nn.Module, "compile", traced)
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"ema": 0.5, "accumulate": 2}, {"checkpoint_blocks": True}])
@pytest.mark.parametrize("attention", [linear.Config(), softmax.Config()])
def test_the_same_weights(new_run, compiled, attention, changes):
    """Bit for bit: each block is one graph of the same operators. Checkpoints have the usual names."""
    settings = {"attention": attention, "dropout": 0.0, "steps": 4, "validate_every": 2, "save_every": 2}
    plain = new_run("plain", **settings, **changes)
    fast = new_run("compiled", **settings, **changes, compile=True)
    train.fit(plain)
    assert not compiled
    train.fit(fast.changed(steps=2))
    train.fit(fast.changed(steps=4))
    assert set(compiled) == {"Block"}
    assert_same_weights(plain, fast)


def test_validation_compiles_nothing(new_run, monkeypatch):
    """Neither evaluation mode nor the smaller last batch triggers another compilation."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=count))
    run = new_run("run", steps=3, batch=6, validate_every=1, compile=True)
    train.fit(run)
    torch.compiler.reset()
    assert len(graphs) == 1


@pytest.mark.slow
def test_the_usual_compiler(new_run):
    """Up to the rounding of float32, where weights have moved by 1e-2."""
    task = copy.Config(length=12)
    plain, fast = (
        new_run(str(on), task=task, dropout=0.0, steps=4, lr=0.1, compile=on) for on in (False, True)
    )
    train.fit(plain)
    train.fit(fast)
    torch.testing.assert_close(weights(fast), weights(plain), rtol=0, atol=1e-4)

"""The timed functions compute what their names say."""

import pytest
import torch
from torch.testing import assert_close

from lintra.bench import calls, points


@pytest.mark.parametrize("causal", [True, False])
def test_softmax_written_out_is_the_fused_one(causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 11, 3, 5, dtype=torch.float64, requires_grad=True)
    found = []
    for attend in (calls.written_out, calls.fused):
        y = attend(q, k, v, causal=causal)
        found.append([y, *torch.autograd.grad(y.square().sum(), (q, k, v))])
    assert_close(*found)


def test_rounds_of_lsh_are_those_of_its_name(monkeypatch):
    asked = []
    monkeypatch.setattr(calls, "mechanism", lambda name, inputs, **options: asked.append((name, options)))
    point = points.Point(who="lsh-8", batch=1, tokens=4, heads=1, dim=2, device="cpu")
    points.call(point, points.draw(point))
    assert asked == [("lsh", {"causal": True, "rounds": 8})]


def test_shorter_inputs_are_the_beginning_of_longer_ones():
    point = points.Point(who="", batch=1, tokens=64, heads=2, dim=3, device="cpu")
    long = points.draw(point)
    short = points.cut(long, points.Point(who="", batch=4, tokens=8, heads=2, dim=3, device="cpu"))
    for whole, part in zip(long, short, strict=True):
        assert part.shape == (4, 8, 2, 3)
        assert part.is_leaf
        assert part.requires_grad
        assert torch.equal(part.flatten(0, 1), whole[0, :32])

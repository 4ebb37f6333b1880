"""The band equals the dense definition for any length, window, dilation and padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.ops import banded
from lintra.ops.banded import banded_attention, banded_attention_reference
from lintra.ops.softmax_attention import merge_lse, softmax_attention
from lintra.testing.laws import EXACT, Largest, gradients, weighted


def draw(t, s=None, h=4, g=2, d=4, e=3, batch=2):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, n, heads, w, generator=generator, dtype=torch.float64).requires_grad_()
        for n, heads, w in ((t, h, d), (s or t, g, d), (s or t, g, e))
    ]


def same(inputs, **options):
    """Assert that values and gradients of o and of the logsumexp are those of the definition."""
    ours, expected = banded_attention(*inputs, **options), banded_attention_reference(*inputs, **options)
    assert_close(ours, expected, **EXACT)
    seen = expected.logsumexp.isfinite()
    for a, b in ((ours.o, expected.o), (ours.logsumexp[seen], expected.logsumexp[seen])):
        assert_close(gradients(a, inputs), gradients(b, inputs), **EXACT)
    both = [torch.cat((x.o, x.logsumexp.masked_fill(~seen, 0.0)[..., None]), -1) for x in (ours, expected)]
    assert_close(gradients(both[0], inputs), gradients(both[1], inputs), **EXACT)


@given(
    t=st.integers(1, 70),
    earlier=st.integers(0, 30),
    before=st.integers(0, 20),
    after=st.integers(0, 20),
    dilation=st.integers(1, 5) | st.just(1000),
    padded=st.booleans(),
)
def test_equals_its_definition(t, earlier, before, after, dilation, padded):
    visible = torch.rand(2, t + earlier, generator=torch.Generator().manual_seed(t)) > 0.4 if padded else None
    inputs = draw(t, t + earlier)
    same(inputs, before=before, after=after, dilation=dilation, visible=visible)


@pytest.mark.parametrize(("before", "after"), [(64, 0), (40, 70), (0, 3), (0, 0)])
def test_equals_its_definition_over_many_blocks(before, after):
    same(draw(300, h=2, g=1, batch=1), before=before, after=after, scale=0.7)


@pytest.mark.parametrize("scores", [1, 40 * 144 * 3])
def test_in_how_many_parts_the_blocks_come_changes_nothing(scores, monkeypatch):
    """One block of one head at a time; three at a time, with a remainder."""
    monkeypatch.setattr(banded, "CACHED", scores)
    same(draw(300), before=60, after=20)


def test_equals_its_definition_with_a_dilation_for_each_head():
    same(draw(60, 70), before=5, after=2, dilation=(3, 1, 3, 40))
    same(draw(60), before=2, after=2, dilation=(2, 2, 2, 2))


def test_second_derivatives():
    """They equal those of the definition, also for a loss that is linear in the outputs, where they would be
    silently incomplete: PyTorch detects a once-differentiable function only by the incoming gradient."""
    visible = torch.rand(1, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    inputs, options = draw(7, 9, h=2, g=1, d=2, e=2, batch=1), {"before": 2, "after": 1, "visible": visible}

    def ours(*x):
        o, logsumexp = banded_attention(*x, **options)
        return o, logsumexp.masked_fill(logsumexp == -math.inf, 0.0)

    for constant in range(4):
        some = [x.detach().requires_grad_(i != constant) for i, x in enumerate(inputs)]
        assert torch.autograd.gradgradcheck(ours, some)
    assert torch.autograd.gradgradcheck(lambda v: ours(*(x.detach() for x in inputs[:2]), v)[0], inputs[2])
    found = []
    for attention in (banded_attention, banded_attention_reference):
        y = attention(*inputs, **options).o + inputs[0].square()  # one part that does not come from the band
        first = torch.autograd.grad(weighted(y), inputs, create_graph=True)
        found.append(gradients(torch.cat([g.flatten() for g in first]), inputs))
    assert_close(*found, **EXACT)


@pytest.mark.parametrize(("batch", "t", "s"), [(2, 0, 0), (2, 0, 7), (0, 5, 5), (0, 0, 0)])
def test_nothing_to_do(batch, t, s):
    q, k, v = (x[:batch] for x in draw(max(t, 1), max(s, 1)))
    o, logsumexp = banded_attention(q[:, :t], k[:, :s], v[:, :s], before=2, after=2, dilation=2)
    assert (o.shape, logsumexp.shape) == ((batch, t, 4, 3), (batch, t, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_scores_of_16_bits_are_not_rounded_to_them(dtype, autocast):
    """Only weights and the result are, each by at most half a unit in the last place of the largest value."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 100, 2, 64, generator=generator) * size for size in (6, 6, 1))
    exact = banded_attention_reference(*(x.to(dtype).double() for x in (q, k, v)), before=9, after=3).o
    with torch.autocast("cpu", dtype, enabled=autocast):
        q, k, v = (x.to(dtype).float() if autocast else x.to(dtype) for x in (q, k, v))
        o = banded_attention(q, k, v, before=9, after=3).o
    assert (o - exact).abs().max() <= torch.finfo(dtype).eps * v.abs().max()


def test_weights_are_divided_before_they_meet_the_values():
    """A sum of 512 values of 200 would exceed the largest float16."""
    q = torch.zeros(1, 600, 1, 4, dtype=torch.float16)
    v = torch.full_like(q, 200.0)
    o = banded_attention(q, q, v, before=511, after=0).o
    # A weight is rounded first, and then the sum.
    assert_close(o, v.to(o.dtype), rtol=2 * torch.finfo(torch.float16).eps, atol=0)


def test_everything_in_the_band_is_softmax():
    q, k, v = draw(50, h=2)
    whole = softmax_attention(*(x.movedim(1, 2) for x in (q, k, v)))
    assert_close(banded_attention(q, k, v, before=49, after=49).o.movedim(1, 2), whole.o, **EXACT)
    assert_close(banded_attention(q, k, v, before=10**9, after=10**9).o.movedim(1, 2), whole.o, **EXACT)


def test_a_band_of_the_own_place_returns_the_values():
    q, k, v = draw(50, h=2)
    assert_close(banded_attention(q, k, v, before=0, after=0).o, v, **EXACT)


def test_bands_join():
    """For any split of the keys."""
    q, k, v = draw(90)
    behind = banded_attention(q, k, v, before=7, after=0)
    nothing = torch.zeros(2, 90, dtype=torch.bool)
    assert_close(
        merge_lse(behind, banded_attention(q, k, v, before=7, after=4, visible=nothing)), behind, **EXACT
    )
    every = [i % 2 == 0 for i in range(90)]
    even = torch.tensor([every, every])
    parts = [banded_attention(q, k, v, before=9, after=5, visible=x) for x in (even, ~even)]
    assert_close(merge_lse(*parts), banded_attention(q, k, v, before=9, after=5), **EXACT)


def test_a_query_that_sees_nothing_gives_zero():
    inputs = draw(80)
    visible = torch.ones(2, 80, dtype=torch.bool)
    visible[0, 20:40] = False
    o, logsumexp = banded_attention(*inputs, before=3, after=3, visible=visible)
    assert (o[0, 23:37] == 0).all()
    assert (logsumexp[0, 23:37] == -torch.inf).all()
    dq, dk, dv = gradients(o, inputs)
    assert (dq[0, 23:37] == 0).all()
    assert (dk[0, 20:40] == 0).all()
    assert (dv[0, 20:40] == 0).all()
    assert all(g.isfinite().all() for g in (dq, dk, dv))


def test_what_is_not_visible_changes_nothing_however_large():
    q, k, v = draw(80)
    visible = torch.arange(80).expand(2, 80) % 3 > 0
    y = banded_attention(q, k, v, before=9, after=2, visible=visible)
    k, v = (x.masked_fill(~visible[..., None, None], 1e30) for x in (k, v))
    assert_close(banded_attention(q, k, v, before=9, after=2, visible=visible), y, rtol=0, atol=0)


def test_dropout_keeps_the_mean():
    q, k, v = (x.detach() for x in draw(40, h=2))
    torch.manual_seed(0)
    many = [x.repeat(400, 1, 1, 1) for x in (q, k, v)]
    dropped = banded_attention(*many, before=5, after=5, dropout=0.5)
    whole = banded_attention(q, k, v, before=5, after=5)
    assert not torch.allclose(dropped.o[:2], whole.o)
    # The mean of 400 draws; the standard deviation of one is at most max |v| = 4.
    assert_close(dropped.o.unflatten(0, (400, 2)).mean(0), whole.o, rtol=0, atol=5 * 4 / 400**0.5)
    assert_close(dropped.logsumexp[:2], whole.logsumexp)


@pytest.mark.parametrize(
    ("option", "value"), [("before", -1), ("after", -1), ("dilation", 0)], ids=lambda x: str(x)
)
def test_refuses(option, value):
    with pytest.raises(ValueError, match=rf"{option} must be at least \d, got {value}"):
        banded_attention(*draw(4), **{"before": 1, "after": 1} | {option: value})


def test_refuses_dilations_of_other_heads():
    with pytest.raises(ValueError, match=r"one for each of h=4 heads, got \(1, 2\)"):
        banded_attention(*draw(4), before=1, after=1, dilation=(1, 2))


def test_refuses_more_queries_than_keys():
    with pytest.raises(ValueError, match="got t=5, s=4"):
        banded_attention(*draw(5, 4), before=1, after=1)


def test_no_array_is_longer_than_the_band():
    """16,384 positions, forward and backward."""
    inputs = [x.float().detach().requires_grad_() for x in draw(16_384, h=1, g=1, batch=1)]
    with Largest() as largest:
        gradients(banded_attention(*inputs, before=32, after=32).o, inputs)
    assert largest.numbers <= 16_384 * (32 + 32 + banded.LARGEST)


def test_a_window_over_nearly_everything_is_no_matrix(monkeypatch):
    """Where all scores at once are too many, it is cut into blocks like any other."""
    for name in ("BUSY", "CACHED"):
        monkeypatch.setattr(banded, name, 2**12)
    monkeypatch.setattr(banded, "runs_natively", lambda *tensors: False)
    for before, after in ((99, 0), (95, 60), (200, 200)):
        same(draw(100, 100, h=2, g=1, d=3, e=2), before=before, after=after)
    inputs = draw(1000, h=1, g=1, batch=1)
    with Largest() as largest:
        gradients(banded_attention(*inputs, before=999, after=0).o, inputs)
    assert largest.numbers < 1000**2 // 8  # blocks have 64 x 1,063 scores

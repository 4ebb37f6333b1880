"""Attention by segments equals the dense definition for any length, segment, side and padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.ops.segments import segment_attention, segment_attention_reference
from lintra.ops.softmax_attention import softmax_attention
from lintra.testing.laws import EXACT, gradients


def draw(t, batch=2):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, t, heads, w, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, w in ((4, 4), (2, 4), (2, 3))
    ]


@settings(max_examples=40)
@given(
    t=st.integers(1, 40),
    segment=st.integers(1, 50),
    side=st.integers(0, 50),
    padded=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
def test_equals_its_definition(t, segment, side, padded, scale):
    visible = torch.rand(2, t, generator=torch.Generator().manual_seed(t)) > 0.4 if padded else None
    inputs, options = draw(t), {"segment": segment, "side": side, "visible": visible, "scale": scale}
    ours, expected = segment_attention(*inputs, **options), segment_attention_reference(*inputs, **options)
    assert_close(ours, expected, **EXACT)
    # A row without a key has a logsumexp of -inf and no gradient.
    both = [torch.cat((x.o, x.logsumexp.nan_to_num(neginf=0)[..., None]), -1) for x in (ours, expected)]
    assert_close(gradients(both[0], inputs), gradients(both[1], inputs), **EXACT)


def test_one_segment_is_softmax():
    q, k, v = draw(20)
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    whole = softmax_attention(*(x.movedim(1, 2) for x in (q, k, v))).o.movedim(1, 2)
    for segment, side in ((20, 0), (100, 7), (1, 19), (5, 10**6)):
        assert_close(segment_attention(q, k, v, segment=segment, side=side).o, whole, **EXACT)


def test_a_segment_of_one_token_returns_the_values():
    q, k, v = draw(20)
    o = segment_attention(q, k, v, segment=1, side=0).o
    assert_close(o, v.repeat_interleave(2, 2), **EXACT)


@pytest.mark.parametrize(("batch", "t"), [(2, 0), (0, 5), (0, 0)])
def test_nothing_to_do(batch, t):
    q, k, v = (x[:batch, :t] for x in draw(max(t, 1)))
    o, logsumexp = segment_attention(q, k, v, segment=3, side=2)
    assert (o.shape, logsumexp.shape) == ((batch, t, 4, 3), (batch, t, 4))


@pytest.mark.parametrize(("name", "least", "value"), [("segment", 1, 0), ("side", 0, -1)])
def test_refuses(name, least, value):
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {value}"):
        segment_attention(*draw(4), **{"segment": 2, "side": 1} | {name: value})

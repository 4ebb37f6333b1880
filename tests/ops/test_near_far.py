"""Near and far: weights in a band, a running sum beyond it, compared with every weight written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.ops.near_far import near_and_far
from lintra.testing.laws import EXACT, gradients


def draw(time, window, causal, rank):
    """k, v and the learned weights: a table, or two matrices."""
    generator = torch.Generator().manual_seed(time)
    shapes = [(2, time, 2, 3)] * 2
    shapes += [(time, window if causal else 2 * window - 1)] if rank is None else [(time, rank)] * 2
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def definition(k, v, learned, real, window, causal):
    time = k.shape[1]
    distance = torch.arange(time)[:, None] - torch.arange(time)
    near = (distance.abs() < window) & (distance >= 0 if causal else distance == distance)
    if len(learned) == 1:
        w = learned[0].gather(1, (window - 1 - distance).clamp(0, learned[0].shape[1] - 1))
    else:
        w = learned[0] @ learned[1].mT
    scores = k[:, None] + w.masked_fill(~near, 0.0)[:, :, None, None]
    hidden = (distance < 0 if causal else distance != distance)[None] | ~real[:, None]
    weight = scores.exp().masked_fill(hidden[..., None, None], 0.0)
    total = weight.sum(2)
    return torch.einsum("btsgd,bsgd->btgd", weight, v) / total.masked_fill(total == 0, 1.0)


@settings(max_examples=60)
@given(
    time=st.sampled_from([0, 1, 2, 7, 8, 9, 20, 33]),
    window=st.sampled_from([1, 2, 3, 5, 8, 50]),
    causal=st.booleans(),
    rank=st.sampled_from([None, 2]),
    some=st.booleans(),
)
def test_is_the_definition(time, window, causal, rank, some):
    k, v, *learned = inputs = draw(time, window, causal, rank)
    real = torch.arange(time) < torch.tensor([[time // 2], [time]])
    mask = real if some else None
    found = near_and_far(k, v, learned, mask, window=window, causal=causal).mean()
    real = real if some else torch.ones_like(real)
    expected = definition(k, v, learned, real, window, causal)
    assert_close(found, expected, **EXACT)
    assert_close(gradients(found, inputs), gradients(expected, inputs), **EXACT)


@pytest.mark.parametrize("rank", [None, 2])
def test_defect_17_keys_that_jump_within_a_block(rank):
    """exp(k) times the inverse of exp(highest) would be 0 times inf in the middle of a block."""
    k, v, *learned = (x.detach().float() for x in draw(32, 8, True, rank))
    k[:, 3] += 150
    k[:, 5] += 400
    k[:, 20:] -= 300
    found = near_and_far(k, v, learned, None, window=8, causal=True).mean()
    k, v, *learned = (x.double() for x in (k, v, *learned))
    exact = definition(k, v, learned, torch.ones(2, 32, dtype=torch.bool), 8, True)
    assert found.isfinite().all()
    assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)  # 400 + k has 5 digits of k left


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("weight", [-300.0, 300.0])
def test_weights_that_float32_has_no_exponential_of(weight, causal, rank):
    """If all are equal they cancel where no key is beyond the window; those of places before the first token
    and after the last have no effect."""
    k, v, *learned = (x.detach().float() for x in draw(9, 50, causal, rank))
    if rank is None:
        here = torch.arange(9)[:, None] - 49 + torch.arange(learned[0].shape[1])
        learned = [torch.full_like(learned[0], weight).masked_fill((here < 0) | (here >= 9), 400.0)]
    else:
        learned = [torch.full_like(learned[0], weight), torch.ones_like(learned[1])]
    found = near_and_far(k, v, learned, None, window=50, causal=causal).mean()
    k, v, *learned = (x.double() for x in (k, v, *learned))
    exact = definition(k, v, learned, torch.ones(2, 9, dtype=torch.bool), 50, causal)
    assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)  # 300 + k has 5 digits of k left

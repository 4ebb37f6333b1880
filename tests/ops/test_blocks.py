"""Gathered blocks equal the dense definition for any lists, padding and sharing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.ops.blocks import block_attention, block_attention_reference, random_ranks
from lintra.ops.softmax_attention import softmax_attention
from lintra.testing.laws import EXACT, Largest, gradients

BLOCK = 3


def draw(n, m, h=4, g=2, d=4, e=3, batch=2):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(
            batch, blocks * BLOCK, heads, w, generator=generator, dtype=torch.float64
        ).requires_grad_()
        for blocks, heads, w in ((n, h, d), (m, g, d), (m, g, e))
    ]


def lists(n, m, entries, batch=2, heads=2):
    """Random lists; one may hold a block twice, or be empty."""
    generator = torch.Generator().manual_seed(n + m)
    blocks = torch.randint(m, (batch, heads, n, entries), generator=generator)
    return blocks, torch.rand(blocks.shape, generator=generator) > 0.4


def same(inputs, *where, **options):
    """Assert that values and gradients are those of the definition."""
    ours = block_attention(*inputs, *where, block=BLOCK, **options)
    expected = block_attention_reference(*inputs, *where, block=BLOCK, **options)
    assert_close(ours, expected, **EXACT)
    assert_close(gradients(ours, inputs), gradients(expected, inputs), **EXACT)


@given(
    n=st.integers(1, 6),
    m=st.integers(1, 9),
    entries=st.integers(0, 5),
    padded=st.booleans(),
    causal=st.booleans(),
)
def test_equals_its_definition(n, m, entries, padded, causal):
    visible = torch.rand(2, m * BLOCK, generator=torch.Generator().manual_seed(n)) > 0.4 if padded else None
    own = (
        torch.randint(m, (2, n), generator=torch.Generator().manual_seed(m))
        if causal or not entries
        else None
    )
    same(draw(n, m), *lists(n, m, entries), own=own, visible=visible, scale=0.7)


def test_lists_may_lie_in_any_order():
    same(draw(6, 6), *(x.mT.contiguous().mT for x in lists(6, 6, 4)))


@pytest.mark.parametrize(("batch", "heads"), [(1, 2), (2, 1), (1, 1)])
def test_lists_may_be_shared(batch, heads):
    """Across samples or heads: one shared list equals copies of it."""
    blocks, listed = lists(4, 5, 3)
    same(draw(4, 5), blocks[:batch, :heads], listed[:batch, :heads], own=torch.tensor([[1, 4, 0, 2]]))
    same(draw(4, 5), blocks, listed[:batch, :heads])


def test_a_list_of_everything_is_softmax():
    q, k, v = draw(4, 5, h=2)
    everything = torch.arange(5).expand(1, 2, 4, 5)
    y = block_attention(q, k, v, everything, torch.ones_like(everything, dtype=torch.bool), block=BLOCK)
    expected = softmax_attention(*(x.movedim(1, 2) for x in (q, k, v))).o.movedim(1, 2)
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, [q, k, v]), gradients(expected, [q, k, v]), **EXACT)


def test_an_empty_list_gives_zero_and_no_gradient():
    inputs = draw(2, 3)
    blocks, listed = torch.zeros(1, 2, 2, 4, dtype=torch.int64), torch.ones(1, 1, 2, 4, dtype=torch.bool)
    listed[:, :, 0] = False
    y = block_attention(*inputs, blocks, listed, block=BLOCK)
    assert (y[:, :BLOCK] == 0).all()
    assert (y[:, BLOCK:] != 0).all()
    assert (gradients(y, inputs)[0][:, :BLOCK] == 0).all()
    assert all(g.isfinite().all() for g in gradients(y, inputs))


@pytest.mark.parametrize(("batch", "n", "m"), [(2, 0, 0), (2, 0, 3), (0, 2, 2)])
def test_nothing_to_do(batch, n, m):
    blocks, listed = lists(n, max(m, 1), 2, batch=batch)
    y = block_attention(
        *draw(n, m, batch=batch), blocks[..., : min(m, 2)], listed[..., : min(m, 2)], block=BLOCK
    )
    assert y.shape == (batch, n * BLOCK, 4, 3)


@pytest.mark.parametrize("causal", [False, True])
def test_large_and_small_scores(causal):
    """Scores in the thousands, and equal ones: the results are those of the definition, without NaN."""
    own = torch.arange(4)[None] if causal else None
    for size in (1e3, 0.0):
        inputs = [(x.detach() * size).requires_grad_() for x in draw(4, 4)[:2]] + draw(4, 4)[2:]
        y = block_attention(*inputs, *lists(4, 4, 3), block=BLOCK, own=own)
        expected = block_attention_reference(*inputs, *lists(4, 4, 3), block=BLOCK, own=own)
        assert_close(
            y, expected, rtol=1e-6, atol=1e-9
        )  # a score of 1e6 is accurate to 1e-10, and so is its weight
        assert all(g.isfinite().all() for g in gradients(y, inputs))


def test_no_array_has_a_score_outside_of_the_lists():
    time, entries = 3072, 4
    n = time // BLOCK
    inputs = [x.detach().float().requires_grad_() for x in draw(n, n, h=1, g=1, d=2, e=2, batch=1)]
    with Largest() as largest:
        y = block_attention(*inputs, *lists(n, n, entries, 1, 1), block=BLOCK, own=torch.arange(n)[None])
        gradients(y, inputs)
    assert largest.numbers <= 2 * time * (entries + 1) * BLOCK


def test_dropout_drops_weights():
    inputs, where = draw(4, 4), lists(4, 4, 3)
    whole = block_attention(*inputs, *where, block=BLOCK)
    torch.manual_seed(0)
    assert not torch.allclose(block_attention(*inputs, *where, block=BLOCK, dropout=0.5), whole)


def test_ranks_differ_until_all_are_taken():
    row = torch.arange(12)[None]
    found = random_ranks(torch.randint(2**32, (50, 4), generator=torch.Generator().manual_seed(0)), row, row)
    for others in range(12):
        for taken in found[0, :, others, :others].tolist():
            assert len(set(taken)) == min(4, others)
            assert all(0 <= rank < others for rank in taken)


def test_every_pair_of_ranks_is_as_likely():
    """Over seeds, and over the rows of one seed: 20 ordered pairs of 5, each within 4 sigma."""
    generator, many = torch.Generator().manual_seed(0), 20_000
    for heads, rows in ((many, 1), (1, many)):
        seeds = torch.randint(2**32, (heads, 2), generator=generator)
        row = torch.arange(7, 7 + rows)[None]
        first, second = random_ranks(seeds, row, torch.full_like(row, 5)).flatten(0, 2).unbind(-1)
        counts = torch.bincount(5 * first + second, minlength=25).reshape(5, 5)
        assert (counts.diagonal() == 0).all()
        expected = many / 20
        sigma = (expected * 19 / 20) ** 0.5
        assert (counts[~torch.eye(5, dtype=torch.bool)] - expected).abs().max() < 4 * sigma


def test_ranks_of_neighbouring_rows_and_heads_are_independent():
    """The correlation of m pairs is within 4 / sqrt(m) of 0."""
    seeds = torch.randint(2**32, (100, 2), generator=torch.Generator().manual_seed(0))
    row = torch.arange(200)[None]
    x = random_ranks(seeds, row, torch.full_like(row, 10**6))[0].double()
    x = (x - x.mean()) / x.std()
    for one, other in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[..., 0], x[..., 1])):
        assert (one * other).mean().abs() < 4 / one.numel() ** 0.5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block": 0}, ValueError, "block must be at least 1 token, got 0"),
        ({"block": 4}, ValueError, "q must be whole blocks of 4 tokens, got t=6"),
        ({"blocks": torch.full((1, 2, 2, 2), 3)}, ValueError, "blocks must be between 0 and 2, got 3"),
        ({"blocks": torch.zeros(1, 2, 3, 2, dtype=torch.int64)}, ValueError, "n is 2 elsewhere"),
        ({"blocks": torch.zeros(3, 2, 2, 2, dtype=torch.int64)}, ValueError, "b is 2 elsewhere"),
        ({"listed": torch.ones(1, 1, 2, 3, dtype=torch.bool)}, ValueError, "l is 2 elsewhere"),
        ({"listed": torch.ones(1, 1, 2, 2)}, TypeError, "listed must be boolean"),
        ({"own": torch.tensor([[0, -1]])}, ValueError, "own must be between 0 and 2, got -1"),
    ],
)
def test_refuses(change, error, message):
    q, k, v = draw(2, 3)
    blocks = torch.zeros(1, 2, 2, 2, dtype=torch.int64)
    given = {"blocks": blocks, "listed": blocks == 0, "block": BLOCK} | change
    with pytest.raises(error, match=message):
        block_attention(q, k, v, **given)

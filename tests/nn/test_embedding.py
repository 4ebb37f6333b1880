"""From symbols to vectors."""

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from lintra.nn.embedding import ValueEmbedding


@pytest.mark.parametrize("levels", [256, 4_096, 70_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_levels_are_read_in_16_bits_as_in_32_but_for_the_rounding(levels, dtype):
    """The level itself is not rounded: 16 bits would tell few levels apart."""
    torch.manual_seed(0)
    embedding = ValueEmbedding(levels, 64, start=True)
    tokens = torch.arange(levels + 1)[None]
    embedding.to(dtype)
    rounded = embedding(tokens)
    assert rounded.dtype == dtype
    exact = embedding.float()(tokens)
    assert torch.equal(rounded, exact.to(dtype))
    with torch.autocast("cpu", dtype):
        assert torch.equal(embedding(tokens), rounded)


def test_levels_of_16_bits_go_through_what_replaces_the_map():
    embedding = ValueEmbedding(9, 8, start=True)
    tokens = torch.tensor([[0, 4, 8, 9]])
    expected = embedding(tokens)
    weight_norm(embedding.linear)
    embedding.bfloat16()
    torch.testing.assert_close(embedding(tokens).float(), expected, rtol=2e-2, atol=2e-2)

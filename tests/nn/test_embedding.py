"""From symbols to vectors."""

import pytest
import torch

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

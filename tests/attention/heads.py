"""Shared heads, repeated explicitly."""

from torch import Tensor

from lintra.attention import Attention


def for_each_output(attention: Attention, *heads: Tensor) -> list[Tensor]:
    """Tensors [b t n ...] of query, key or value heads, each repeated for the heads of y that it serves."""
    return [x.repeat_interleave(attention.out_heads // x.shape[2], 2) for x in heads]

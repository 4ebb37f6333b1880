"""Rotary position embedding by tables of cosines and sines: Su et al. 2021, arXiv:2104.09864."""

import torch
from torch import Tensor

from lintra.ops import checks


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Return x [b t h d] with pairs of its first 2 r features turned by the angles of their places.

    cos, sin [places r]. A pair is feature i with feature r + i or, `interleaved`, 2 i with 2 i + 1. The first
    token of sequence n is at `seqlen_offsets`, one number or [n]; `cu_seqlens` [n+1] are the bounds of packed
    sequences. Tokens before place 0, which are padding, stay as they are. `inplace` changes x.
    `chunk_indices` changes nothing here. In x's dtype, computed in the dtype of sums. Raises ValueError for
    places beyond the tables.
    """
    checks.shape("x", x, "b t h d", {})
    places = _places(x, seqlen_offsets, cu_seqlens)
    if checks.readable(places) and places.numel() and int(places.max()) >= len(cos):
        raise ValueError(f"cos and sin must have {int(places.max()) + 1} places, got {len(cos)}")
    dtype, r = checks.sum_dtype(x.dtype), cos.shape[1]
    padded = isinstance(seqlen_offsets, Tensor) or seqlen_offsets < 0
    found = places.clamp(min=0) if padded else places
    c, s = (table.to(dtype)[found][:, :, None] for table in (cos, sin))  # [b t 1 r]
    if padded:
        before = (places < 0)[:, :, None, None]
        c, s = c.masked_fill(before, 1), s.masked_fill(before, 0)
    turned = x[..., : 2 * r].to(dtype)
    first, second = turned.unflatten(-1, (r, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pair = first * c - second * s, first * s + second * c
    turned = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
    if inplace:
        x[..., : 2 * r] = turned
        return x
    return torch.cat((turned, x[..., 2 * r :]), -1)


def _places(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the places [b t] of tokens, or [1 t] where all sequences have the same."""
    steps = torch.arange(x.shape[1], device=x.device)[None]
    if cu_seqlens is None:
        return steps + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    starts = cu_seqlens[:-1] - offsets
    return steps - starts.repeat_interleave(cu_seqlens.diff(), output_size=x.shape[1])

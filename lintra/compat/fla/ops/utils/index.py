"""Lengths [n] and bounds [n+1] of sequences."""

import torch
from torch import Tensor
from torch.nn import functional


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """Return the lengths between bounds."""
    return cu_seqlens.diff()


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """Return how many tokens of a mask [n t] are real, int32."""
    return mask.sum(-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Return the bounds of sequences of these lengths."""
    return functional.pad(lens.cumsum(0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Return the bounds of the real tokens of a mask [n t], taken out of their rows one after the other."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)

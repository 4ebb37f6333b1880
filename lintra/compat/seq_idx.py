"""Packed sequences by `seq_idx` [b t], the number of each token's sequence, as in Mamba's packages."""

from typing import NamedTuple

import torch
from torch import Tensor

from lintra.compat.arguments import integers
from lintra.ops import Layout
from lintra.ops.layout import sequence_bounds


class Packing(NamedTuple):
    """Rows of packed sequences as one packed row, [1 b*t ...]."""

    layout: Layout
    first: Tensor  # [b], the number of each row's first sequence
    last: Tensor  # [b], the number of its last sequence

    @classmethod
    def of(cls, seq_idx: Tensor, name: str, x: Tensor) -> "Packing":
        """Return the packing of rows x [b t ...]: a sequence ends where its number changes, and with its row.

        Raises ValueError or TypeError unless seq_idx is [b t], of integers, on the device of x, and t >= 1.
        """
        b, t = x.shape[:2]
        integers("seq_idx", seq_idx, "b t", {"b": b, "t": t}, x, name)
        if t < 1:
            raise ValueError(f"{name} must have at least 1 token with seq_idx, got shape {list(x.shape)}")
        cu_seqlens = sequence_bounds(seq_idx)
        ends = torch.searchsorted(cu_seqlens, torch.arange(b + 1, device=x.device) * t)  # of rows, among them
        return cls(Layout(1, b * t, x.device, cu_seqlens=cu_seqlens), ends[:-1], ends[1:] - 1)


def flat(x: Tensor) -> Tensor:
    """Return rows [b t ...] as one, [1 b*t ...]."""
    return x if x.shape[0] == 1 else x.flatten(0, 1)[None]

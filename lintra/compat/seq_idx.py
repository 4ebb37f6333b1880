"""Packed sequences as Mamba's packages write them: the number of its sequence for every token, `seq_idx` [b
t]."""

from typing import NamedTuple

import torch
from torch import Tensor

from lintra.compat.arguments import integers
from lintra.ops import Layout


class Packing(NamedTuple):
    """Rows of packed sequences as one packed row, [1 b*t ...]."""

    layout: Layout
    first: Tensor  # [b], the number of each row's first sequence
    last: Tensor  # [b], that of its last

    @classmethod
    def of(cls, seq_idx: Tensor, name: str, x: Tensor) -> "Packing":
        """Return the packing of rows x [b t ...]: a sequence ends where its number changes, and with its row.

        Raises ValueError or TypeError unless seq_idx is [b t], of integers, on the device of x, and t >= 1.
        """
        b, t = x.shape[:2]
        integers("seq_idx", seq_idx, "b t", {"b": b, "t": t}, x, name)
        if t < 1:
            raise ValueError(f"{name} must have at least 1 token with seq_idx, got shape {list(x.shape)}")
        starts = torch.cat((seq_idx.new_ones(b, 1, dtype=torch.bool), seq_idx[:, 1:] != seq_idx[:, :-1]), 1)
        begins = starts.flatten().nonzero()[:, 0]
        cu_seqlens = torch.cat((begins, begins.new_full((1,), b * t)))
        counts = starts.sum(1).cumsum(0)  # sequences up to the end of each row
        first = torch.cat((counts.new_zeros(1), counts[:-1]))
        return cls(Layout(1, b * t, x.device, cu_seqlens=cu_seqlens), first, counts - 1)


def flat(x: Tensor) -> Tensor:
    """Return rows [b t ...] as one, [1 b*t ...]."""
    return x if x.shape[0] == 1 else x.flatten(0, 1)[None]

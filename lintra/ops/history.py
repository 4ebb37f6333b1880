"""The tokens or values some places before each one, across padding, packed batches and calls."""

import torch
from jaxtyping import Num
from torch import Tensor

from lintra.ops.layout import Layout
from lintra.ops.padding import take


def look_back(
    tokens: Num[Tensor, "b t"], recent: Num[Tensor, "n r"], places: tuple[int, ...], layout: Layout
) -> tuple[Num[Tensor, "b t o"], Num[Tensor, "n r"]]:
    """Return for each token those 1 <= places <= r real ones earlier in its sequence, and the last r of all.

    recent: the last r tokens before these, the latest one last. Results at padded tokens mean nothing.
    """
    if layout.packed:
        padded = layout.pad_all()
        before, recent = look_back(padded.unpack(tokens)[0], recent, places, padded.layouts[0])
        return padded.pack([before]), recent
    real = layout.left_align()
    line = torch.cat((recent, tokens if real is None else real.gather(layout.zero(tokens))), 1)
    r, t = recent.shape[1], tokens.shape[1]
    before = torch.stack([line[:, r - place : r - place + t] for place in places], -1)
    if real is None:
        return before, line[:, t:].clone()  # a view would keep the whole line
    kept = real.mask.sum(1, keepdim=True) + torch.arange(r, device=line.device)
    return real.restore(before), take(line, kept)

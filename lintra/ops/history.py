"""The tokens that stood some places before each token, across padding, packed rows and calls."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lintra.ops.packed import PackedRow
from lintra.ops.padding import LeftAlign, take


def look_back(
    tokens: Int[Tensor, "b t"],
    recent: Int[Tensor, "n r"],
    places: tuple[int, ...],
    mask: Bool[Tensor, "b t"] | None = None,
    row: PackedRow | None = None,
) -> tuple[Int[Tensor, "b t o"], Int[Tensor, "n r"]]:
    """For each token, those 1 <= places <= r real ones earlier in its sequence; and the last r of them all.

    recent: the last r tokens before these, the latest one last. What padded tokens get means nothing.
    """
    if row is not None:
        packed = row.together()
        before, recent = look_back(packed.unpack(tokens)[0], recent, places, packed.groups[0].mask)
        return packed.pack([before]), recent
    real = None if mask is None else LeftAlign.of(mask)
    line = torch.cat((recent, tokens if real is None else real.gather(tokens)), 1)
    r, t = recent.shape[1], tokens.shape[1]
    before = torch.stack([line[:, r - place : r - place + t] for place in places], -1)
    if mask is None or real is None:
        return before, line[:, t:].clone()  # a view would keep the whole line
    kept = mask.sum(1, keepdim=True) + torch.arange(r, device=line.device)
    return real.restore(before), take(line, kept)

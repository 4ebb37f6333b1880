"""Exact attention within segments of a sequence and to places on both sides.

Zhu et al. 2021, arXiv:2107.02192, "segment-wise sliding window". All queries of a segment see the same keys,
so that a block has no corners to hide. Letters: b batch, t queries and keys, h heads, g key-value heads,
r = h / g, d width of q and k, e width of v, n segments, c tokens to a segment, j keys it sees.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from lintra.ops import checks
from lintra.ops.autocast import without_autocast
from lintra.ops.banded import windows
from lintra.ops.softmax_attention import PartialAttention, softmax_attention
from lintra.ops.softmax_native import by_all_scores, runs_natively, softmax_native


@without_autocast
def segment_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    *,
    segment: int,
    side: int,
    visible: Bool[Tensor, "b t"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> PartialAttention:
    """Attention of every query to the `visible` keys of its segment and of `side` places before and after it.

    Segments are of `segment` tokens from the start of the sequence, the last one perhaps shorter. -> o
    [b t h e], logsumexp [b t h], 0 and -inf where a query sees nothing. `scale` multiplies q . k and has no
    unit (default d**-0.5); dropout drops weights. Hidden places of k and v must be finite. Memory O(t
    (segment + 2 side)), in C++ O(t). Raises ValueError for a segment below 1 or a negative side.
    """
    _validate(q, k, v, visible, segment, side)
    if runs_natively(q, k, v, dropout):
        reach = {"visible": visible, "before": side, "after": side}
        return softmax_native(q, k, v, "segments", unit=segment, scale=scale, **reach)
    return _in_pytorch(q, k, v, unit=segment, before=side, visible=visible, scale=scale, dropout=dropout)


def segment_attention_reference(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    *,
    segment: int,
    side: int,
    visible: Bool[Tensor, "b t"] | None = None,
    scale: float | None = None,
) -> PartialAttention:
    """The definition, O(t^2): every score, then those too far from the segment masked."""
    places, r = torch.arange(q.shape[1], device=q.device), q.shape[2] // k.shape[2]
    start = (places // segment * segment)[:, None]
    seen = (places >= start - side) & (places < start + segment + side)
    seen = seen[None] if visible is None else seen & visible[:, None]
    k, v = (x.repeat_interleave(r, 2).movedim(1, 2) for x in (k, v))
    o, logsumexp = softmax_attention(q.movedim(1, 2), k, v, visible=seen[:, None], scale=scale)
    return PartialAttention(o.movedim(1, 2), logsumexp.movedim(1, 2))


@by_all_scores("segments")
def _in_pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    unit: int,
    before: int,
    visible: Tensor | None,
    scale: float | None,
    dropout: float = 0.0,
    **_: Any,
) -> PartialAttention:
    """Attention by segments on every device, differentiable any number of times."""
    t, h, g = *q.shape[1:3], k.shape[2]
    # A sequence of one segment is a block as it stands.
    c, side = (unit, min(before, t)) if unit < t else (max(1, t), 0)
    more, width = max(1, -(-t // c)) * c - t, c + 2 * side
    q = functional.pad(q, (0, 0, 0, 0, 0, more)).unflatten(2, (g, h // g)).unflatten(1, (-1, c))
    q = q.permute(0, 3, 1, 2, 4, 5).flatten(3, 4)  # b g n cr d
    k, v = (windows(functional.pad(x.movedim(1, 2), (0, 0, side, side + more)), 2, width, c) for x in (k, v))
    real = q.new_ones(1, t, dtype=torch.bool) if visible is None else visible
    real = windows(functional.pad(real, (side, side + more)), 1, width, c)  # b n j
    partial = softmax_attention(q, k, v, visible=real[:, None, :, None], scale=scale, dropout=dropout)
    o, logsumexp = (x.unflatten(3, (c, h // g)) for x in partial)
    o, logsumexp = o.permute(0, 2, 3, 1, 4, 5), logsumexp.permute(0, 2, 3, 1, 4)
    return PartialAttention(*(x.flatten(3, 4).flatten(1, 2)[:, :t] for x in (o, logsumexp)))


def _validate(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, segment: int, side: int) -> None:
    sizes: dict[str, int] = {}
    checks.qkv(q, k, v, visible, sizes, same_length=True, mask_name="visible")
    checks.heads(sizes["h"], sizes["g"])
    for name, value, least in (("segment", segment, 1), ("side", side, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")

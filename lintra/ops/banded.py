"""Exact attention to the keys near each query's own place: the band of a t x t matrix, never the matrix.

Beltagy et al. 2020, arXiv:2004.05150, section 3.1. Queries go in blocks of c; a block of them sees
before + c + after keys in a row, of which a pattern the blocks share hides the corners. Dilation splits the
sequence into as many classes, each with a band of its own. Letters: b batch, t queries, s keys, h heads,
g key-value heads, r = h / g, d width of q and k, e width of v, n blocks, c queries and j keys to a block.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from lintra.ops import _check
from lintra.ops.softmax_attention import Piece, softmax_attention

# More queries to a block waste scores at the corners, fewer waste copies of keys and make small products.
SMALLEST, LARGEST = 16, 64


def banded_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    *,
    before: int,
    after: int,
    visible: Bool[Tensor, "b s"] | None = None,
    dilation: int = 1,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Piece:
    """Attention of the query at place i to the `visible` keys at places j in a band around i.

    That is -after dilation <= i - j <= before dilation with i - j a multiple of dilation: `before` and
    `after` count keys. The queries are the last t of s places. -> o [b t h e], logsumexp [b t h], 0 and -inf
    where a query sees nothing. `scale` multiplies q . k and has no unit (default d**-0.5); dropout drops
    weights. Memory O(t (before + after)). Raises ValueError for negative sizes and more queries than keys.
    """
    _validate(q, k, v, visible, before, after, dilation)
    b, t, s = *q.shape[:2], k.shape[1]
    if not b * t:
        o = q.new_zeros(*q.shape[:3], v.shape[3], dtype=_check.sum_dtype(q.dtype))
        return Piece(o, o.sum(-1))
    if dilation > 1:
        if s % dilation and visible is None:
            visible = q.new_ones(b, s, dtype=torch.bool)
        q, k, v = (_classes(x, dilation) for x in (q, k, v))
        visible = None if visible is None else _classes(visible, dilation)
    place = q.shape[1:3]
    q, k, v, band = _blocks(q, k, v, visible, before, after)
    o, logsumexp = softmax_attention(q, k, v, visible=band, scale=scale, dropout=dropout)
    piece = Piece(_join(o, *place), _join(logsumexp[..., None], *place)[..., 0])
    return piece if dilation == 1 else Piece(*(_interleave(x, dilation, t) for x in piece))


def banded_attention_reference(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    *,
    before: int,
    after: int,
    visible: Bool[Tensor, "b s"] | None = None,
    dilation: int = 1,
    scale: float | None = None,
) -> Piece:
    """The definition, O(t s): every score, then what lies outside of the band struck out."""
    t, s, r = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    places = torch.arange(s, device=q.device)
    distance = places[s - t :, None] - places
    band = (distance >= -after * dilation) & (distance <= before * dilation) & (distance % dilation == 0)
    band = band[None] if visible is None else band & visible[:, None]
    k, v = (x.repeat_interleave(r, 2).movedim(1, 2) for x in (k, v))
    o, logsumexp = softmax_attention(q.movedim(1, 2), k, v, visible=band[:, None], scale=scale)
    return Piece(o.movedim(1, 2), logsumexp.movedim(1, 2))


def _blocks(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    visible: Bool[Tensor, "b s"] | None,
    before: int,
    after: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [b g n cr d], k [b g n j d], v [b g n j e] and which of them go together, [b or 1, 1 n cr j].

    The rows of a block are its queries, each with the heads of a group.
    """
    t, s, g = q.shape[1], *k.shape[1:3]
    r, lead = q.shape[2] // g, s - t
    before, after = min(before, max(0, s - 1)), min(after, max(0, t - 1))
    c = min(LARGEST, max(SMALLEST, before + after))
    if before + c + after >= s:
        # One block of all queries and keys.
        c, front, back, width = t, 0, 0, s
    else:
        front, back, width, lead = before - lead, -t % c + after, before + c + after, before
    q = functional.pad(q, (0, 0, 0, 0, 0, -t % c)).unflatten(2, (g, r)).unflatten(1, (-1, c))
    q = q.permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
    k, v = (
        functional.pad(x.movedim(1, 2), (0, 0, front, back)).unfold(2, width, c).movedim(-1, -2)
        for x in (k, v)
    )
    real = q.new_ones(1, s, dtype=torch.bool) if visible is None else visible
    real = functional.pad(real, (front, back)).unfold(1, width, c)  # [b n j]
    places = torch.arange(width, device=q.device)
    distance = lead + places[:c, None] - places
    band = ((distance >= -after) & (distance <= before)).repeat_interleave(r, 0)
    return q, k, v, (band & real[:, :, None])[:, None]


def _join(x: Float[Tensor, "b g n cr w"], t: int, h: int) -> Float[Tensor, "b t h w"]:
    """Blocks back in a sequence."""
    x = x.unflatten(3, (-1, h // x.shape[1])).permute(0, 2, 3, 1, 4, 5)
    return x.flatten(3, 4).flatten(1, 2)[:, :t]


def _classes(x: Tensor, dilation: int) -> Tensor:
    """The places of [b t ...] that are `dilation` apart, counted from the end, as sequences of their own."""
    x = functional.pad(x, (0, 0) * (x.dim() - 2) + (-x.shape[1] % dilation, 0))
    return x.unflatten(1, (-1, dilation)).movedim(2, 1).flatten(0, 1)


def _interleave(x: Tensor, dilation: int, time: int) -> Tensor:
    """The classes back in one sequence."""
    x = x.unflatten(0, (-1, dilation)).movedim(1, 2).flatten(1, 2)
    return x[:, x.shape[1] - time :]


def _validate(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, before: int, after: int, dilation: int
) -> None:
    sizes: dict[str, int] = {}
    _check.qkv(q, k, v, visible, sizes, same_length=False)
    _check.heads(sizes["h"], sizes["g"])
    for name, value, least in (("before", before, 0), ("after", after, 0), ("dilation", dilation, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if sizes["t"] > sizes["s"]:
        raise ValueError(f"the queries are the last of the keys' places, got t={sizes['t']}, s={sizes['s']}")

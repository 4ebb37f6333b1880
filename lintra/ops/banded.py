"""Exact attention to the keys near each query's own place: the band of a t x t matrix, never the matrix.

Beltagy et al. 2020, arXiv:2004.05150, section 3.1. Queries go in blocks of c; a block sees before + c + after
keys in a row, and a pattern shared by all blocks hides the corners. Dilation splits the sequence into
as many classes, each with a band of its own. Scores are computed a few blocks at a time, again in the
backward pass: they stay in the processor's cache and never exist all at once. On the CPU that is done in C++.

Letters: b batch, t queries, s keys, h heads, g key-value heads, r = h / g, d width of q and k, e width of v,
m = b g, n blocks, c queries, i = c r rows and j keys to a block.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from lintra.ops import checks
from lintra.ops.autocast import no_autocast, without_autocast
from lintra.ops.checks import sum_dtype
from lintra.ops.operator import differentiable
from lintra.ops.padding import connected_zeros, real_tokens
from lintra.ops.softmax_attention import PartialAttention, softmax_attention
from lintra.ops.softmax_native import by_all_scores, runs_natively, softmax_native

# Queries to a block: more of them waste scores at the corners, fewer of them waste copies of keys.
SMALLEST, LARGEST = 16, 64
# Scores at a time: what a core's cache holds, or what keeps a GPU busy.
CACHED, BUSY = 2**18, 2**26


@without_autocast
def banded_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    *,
    before: int,
    after: int,
    visible: Bool[Tensor, "b s"] | None = None,
    dilation: int | tuple[int, ...] = 1,
    scale: float | None = None,
    dropout: float = 0.0,
) -> PartialAttention:
    """Attention of the query at place i to the `visible` keys at places j in a band around i.

    That is -after dilation <= i - j <= before dilation with i - j a multiple of dilation: `before` and
    `after` count keys; `dilation` is one number or one for each head. The queries are the last t of s places.
    -> o [b t h e], logsumexp [b t h], 0 and -inf where a query sees nothing. `scale` multiplies q . k and has
    no unit (default d**-0.5). Hidden places of k and v must be finite. dropout drops weights, and then, as
    inside torch.func and for second derivatives, all scores are kept for the backward pass, O(t (before +
    after)). Raises ValueError for negative sizes and more queries than keys.
    """
    dilations = dilation if isinstance(dilation, tuple) else (dilation,)
    _validate(q, k, v, visible, before, after, dilations)
    b, t, h = q.shape[:3]
    if len(set(dilations)) > 1:
        options = {"visible": visible, "scale": scale, "dropout": dropout}
        return _each(dilations, q, k, v, before=before, after=after, **options)
    dilation = min(dilations[0], k.shape[1])
    if not b * t:
        o = connected_zeros((b, t, h, v.shape[3]), q, k, v).to(sum_dtype(v.dtype))
        return PartialAttention(o, o.sum(-1))
    where: dict[str, Any] = {"before": before, "after": after, "visible": visible}
    where |= {"dilation": dilation, "scale": scale}
    if runs_natively(q, k, v, dropout):
        return softmax_native(q, k, v, "band", **where)
    return _in_pytorch(q, k, v, **where, dropout=dropout)


def banded_attention_reference(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    *,
    before: int,
    after: int,
    visible: Bool[Tensor, "b s"] | None = None,
    dilation: int | tuple[int, ...] = 1,
    scale: float | None = None,
) -> PartialAttention:
    """The definition, O(t s): every score, then those outside of the band masked."""
    t, s, r = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    places = torch.arange(s, device=q.device)
    distance = places[s - t :, None] - places
    step = torch.tensor(dilation, device=q.device).reshape(-1, 1, 1)  # of one head, or of each
    band = (distance >= -after * step) & (distance <= before * step) & (distance % step == 0)
    band = band[None] if visible is None else band & visible[:, None, None]
    k, v = (x.repeat_interleave(r, 2).movedim(1, 2) for x in (k, v))
    o, logsumexp = softmax_attention(q.movedim(1, 2), k, v, visible=band, scale=scale)
    return PartialAttention(o.movedim(1, 2), logsumexp.movedim(1, 2))


def windows(x: Tensor, dim: int, width: int, step: int) -> Tensor:
    """x [.. s ..] -> [.. n j ..]: the `width` places from 0, step, 2 step .. on along `dim`, as many as there
    are. Copies, of which a gradient takes no longer than of `Tensor.unfold`, and which vmap knows."""
    count = (x.shape[dim] - width) // step + 1
    places = step * torch.arange(count, device=x.device)[:, None] + torch.arange(width, device=x.device)
    return x.index_select(dim, places.flatten()).unflatten(dim, (count, width))


@by_all_scores("band")
def _in_pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    before: int,
    after: int,
    visible: Tensor | None,
    dilation: int,
    scale: float | None,
    dropout: float = 0.0,
    **_: Any,
) -> PartialAttention:
    """Banded attention on every device, differentiable any number of times."""
    t, h = q.shape[1:3]
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if dilation > 1:
        if k.shape[1] % dilation and visible is None:
            visible = real_tokens(None, k)
        q, k, v = (_classes(x, dilation) for x in (q, k, v))
        visible = None if visible is None else _classes(visible, dilation)
    rows, time = q.shape[:2]
    q, k, v, real, band, step = _blocks(q, k, v, visible, before, after)
    if dropout or checks.transforming(q, k, v):
        found = _at_once(q, k, v, real, band, step, scale=factor, dropout=dropout)
    else:
        found = PartialAttention(*_Banded.apply(q.to(sum_dtype(q.dtype)) * factor, k, v, real, band, step))
    o, logsumexp = (_join(x, rows, time, h) for x in (found.o, found.logsumexp[..., None]))
    if dilation > 1:
        o, logsumexp = (_interleave(x, dilation, t) for x in (o, logsumexp))
    return PartialAttention(o, logsumexp[..., 0])


class _Banded(torch.autograd.Function):
    """q [m n i d], already scaled, k [m s d], v [m s e], real [m s], band [i j] -> o [m n i e], logsumexp.

    q is in the dtype of sums, so that no score is rounded to 16 bits, nor is what comes back to it.
    With p the weights and L the logsumexp, dv = p^T do and, for the scores, p (do v^T - do . o + dL).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor, band: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        dtype = sum_dtype(v.dtype)
        keys, values, seen = (_unfolded(x, band, step) for x in (k, v, real))
        o = q.new_empty(*q.shape[:3], v.shape[2], dtype=dtype)
        logsumexp = q.new_empty(q.shape[:3], dtype=dtype)
        for part in _parts(q, band):
            scores = _scores(q[part], keys[part], seen[part], band)
            highest = scores.amax(-1, keepdim=True)
            highest.masked_fill_(highest == -math.inf, 0.0)
            weights = scores.sub_(highest).exp_()
            total = weights.sum(-1, keepdim=True)
            logsumexp[part] = (total.log() + highest)[..., 0]
            weights.div_(total.masked_fill_(total == 0, 1.0))  # before the product, which may overflow
            o[part] = (weights.to(v.dtype) @ values[part].mT).to(dtype)
        ctx.save_for_backward(q, k, v, real, band, o, logsumexp)
        ctx.step = step
        return o, logsumexp

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlogsumexp: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, real, band, o, logsumexp = ctx.saved_tensors
        dtype, step = o.dtype, ctx.step
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            again = partial(_at_once, real=real, band=band, step=step, scale=1.0)
            return *differentiable(again, (q, k, v), (do, dlogsumexp)), None, None, None
        keys, values, seen = (_unfolded(x, band, step) for x in (k, v, real))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        less = ((do * o).sum(-1) - dlogsumexp)[..., None]
        logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)[..., None]
        do = do.to(v.dtype)
        for rows, blocks in _parts(q, band):
            part = rows, blocks
            near = keys[part].to(dtype).contiguous()
            scores = _scores(q[part], near, seen[part], band)
            weights = scores.sub_(logsumexp[part]).exp_()
            to_values = weights.to(v.dtype).mT @ do[part]
            dscores = (do[part] @ values[part]).to(dtype).sub_(less[part]).mul_(weights)
            dq[part] = dscores @ near.mT
            to_keys = dscores.mT @ q[part]
            for i in range(to_keys.shape[1]):
                first = (blocks.start + i) * step
                window = rows, slice(first, first + band.shape[1])
                dk[window] += to_keys[:, i]
                dv[window] += to_values[:, i]
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _at_once(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor, band: Tensor, step: int, **options: Any
) -> PartialAttention:
    """Compute banded attention by way of all scores, which PyTorch transforms and differentiates any number
    of times."""
    keys, values, seen = (windows(x, 1, band.shape[1], step) for x in (k, v, real))
    return softmax_attention(q, keys, values, visible=band & seen[:, :, None], **options)


def _blocks(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    visible: Bool[Tensor, "b s"] | None,
    before: int,
    after: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """q [m n i d], padded k [m s d], v [m s e], which keys are real [m s], which pairs in the band [i j], c.

    The first block sees the first j keys, each further one those c places later. The rows of a block are its
    queries, each with the heads of a group.
    """
    t, s, g = q.shape[1], *k.shape[1:3]
    r, lead = q.shape[2] // g, s - t
    before, after = min(before, s - 1), min(after, t - 1)
    c = min(LARGEST, max(SMALLEST, (before + after) // 2))
    j = before + c + after
    if j >= s and (t <= c or t * s * r <= BUSY):  # one block of all queries and keys
        c, front, back, j = t, 0, 0, s
    else:
        front, back, lead = before - lead, -t % c + after, before
    q = functional.pad(q, (0, 0, 0, 0, 0, -t % c)).unflatten(2, (g, r)).unflatten(1, (-1, c))
    q = q.permute(0, 3, 1, 2, 4, 5).flatten(3, 4).flatten(0, 1)
    k, v = (functional.pad(x.movedim(1, 2).flatten(0, 1), (0, 0, front, back)) for x in (k, v))
    real = q.new_ones(1, s, dtype=torch.bool) if visible is None else visible
    real = functional.pad(real, (front, back))[:, None].expand(-1, len(k) // len(real), -1).flatten(0, 1)
    places = torch.arange(j, device=q.device)
    distance = lead + places[:c, None] - places
    band = (distance >= -after) & (distance <= before)
    return q, k, v, real, band.repeat_interleave(r, 0), c


def _scores(q: Tensor, keys: Tensor, seen: Tensor, band: Tensor) -> Tensor:
    """[m n i j] of some blocks, -inf where a query does not see a key."""
    with no_autocast(q):
        scores = q @ keys.to(q.dtype)
    return scores.masked_fill_(~(band & seen[:, :, None]), -math.inf)


def _unfolded(x: Tensor, band: Tensor, step: int) -> Tensor:
    """The places [m n ... j] of x [m s ...] that each block sees: a view."""
    return x.unfold(1, band.shape[1], step)


def _parts(q: Float[Tensor, "m n i d"], band: Bool[Tensor, "i j"]) -> Iterator[tuple[slice, slice]]:
    """All rows and blocks in parts of few enough scores."""
    m, n = q.shape[:2]
    scores = CACHED if q.device.type == "cpu" else BUSY
    rows = min(m, max(1, scores // band.numel()))
    blocks = min(n, max(1, scores // (band.numel() * rows)))
    for row in range(0, m, rows):
        for block in range(0, n, blocks):
            yield slice(row, row + rows), slice(block, block + blocks)


def _join(x: Float[Tensor, "m n i w"], b: int, t: int, h: int) -> Float[Tensor, "b t h w"]:
    """Blocks back in a sequence."""
    g = x.shape[0] // b
    x = x.unflatten(0, (b, g)).unflatten(3, (-1, h // g)).permute(0, 2, 3, 1, 4, 5)
    return x.flatten(3, 4).flatten(1, 2)[:, :t]


def _each(dilations: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> PartialAttention:
    """The heads of each dilation, one after the other."""
    group, partials, order = q.shape[2] // k.shape[2], [], []
    for dilation in sorted(set(dilations)):
        heads = [i for i, x in enumerate(dilations) if x == dilation]
        near = (x[:, :, [i // group for i in heads]] for x in (k, v))
        partials.append(banded_attention(q[:, :, heads], *near, dilation=dilation, **options))
        order += heads
    back = [order.index(i) for i in range(len(order))]
    return PartialAttention(*(torch.cat(x, 2)[:, :, back] for x in zip(*partials, strict=True)))


def _classes(x: Tensor, dilation: int) -> Tensor:
    """The places of [b t ...] that are `dilation` apart, counted from the end, as sequences of their own."""
    x = functional.pad(x, (0, 0) * (x.dim() - 2) + (-x.shape[1] % dilation, 0))
    return x.unflatten(1, (-1, dilation)).movedim(2, 1).flatten(0, 1)


def _interleave(x: Tensor, dilation: int, time: int) -> Tensor:
    """The classes back in one sequence."""
    x = x.unflatten(0, (-1, dilation)).movedim(1, 2).flatten(1, 2)
    return x[:, x.shape[1] - time :]


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    before: int,
    after: int,
    dilations: tuple[int, ...],
) -> None:
    sizes: dict[str, int] = {}
    checks.qkv(q, k, v, visible, sizes, same_length=False, mask_name="visible")
    checks.heads(sizes["h"], sizes["g"])
    if len(dilations) not in (1, sizes["h"]):
        raise ValueError(
            f"dilation must be one number or one for each of h={sizes['h']} heads, got {dilations}"
        )
    for name, value, least in (("before", before, 0), ("after", after, 0), ("dilation", min(dilations), 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if sizes["t"] > sizes["s"]:
        raise ValueError(f"the queries are the last of the keys' places, got t={sizes['t']}, s={sizes['s']}")

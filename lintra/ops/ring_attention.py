"""Exact causal softmax attention over sequences in shards on several ranks: keys and values travel in a ring.

Every rank has the queries of its shard. The keys and values of the earlier shards come to it one block after
the other, from the rank before, and are passed on; results over blocks are joined by their log-sum-exp
(`lintra.ops.softmax_attention`). Blocks of later shards are never seen, and never sent. The backward passes
the blocks again, and sends its part of their gradients to the ranks that own them. Scores are computed
a few rows at a time, with p the weights, L the log-sum-exp of a query over all blocks,

    p = exp(s - L)      dv += p^T do      ds = p (do v^T - do . o)

A rank keeps its own keys and values and one block that passes through. Rank r reads r + 1 blocks, the last
one R: of shards of one length the last rank computes almost twice the mean. Liu et al. 2023,
arXiv:2310.01889.

Letters: b rows, t queries, s keys, h heads, g key-value heads, r = h / g, n = t r rows of a key-value head.
"""

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lintra.ops.autocast import no_autocast
from lintra.ops.checks import sum_dtype
from lintra.ops.ranks import anchor
from lintra.ops.sequence_shard import SequenceShard
from lintra.ops.softmax_attention import PartialAttention, merge_lse

CACHED, BUSY = 2**20, 2**26  # scores at a time: on a CPU, and what keeps a GPU busy


def ring_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    shard: SequenceShard,
    *,
    scale: float,
) -> Float[Tensor, "b t h e"]:
    """Attention of the tokens of a shard, real ones in front, to all before them on this and earlier ranks.

    `scale` multiplies q . k and has no unit. First derivatives alone."""
    sent = [k, v] if shard.sends else shard.unstash()
    if not shard.receives:
        shard.stash([k, v])
    with no_autocast(q):
        return cast("Tensor", _Ring.apply(shard, scale, anchor(q.device), q, k, v, *sent))


class _Ring(torch.autograd.Function):
    """q, k, v and the k, v that this rank sends -> y."""

    @staticmethod
    def forward(ctx: Any, shard: SequenceShard, scale: float, anchor: Tensor, *tensors: Tensor) -> Tensor:
        q, k, v, *sent = tensors
        rows, r = _rows(q, k.shape[2]), q.shape[2] // k.shape[2]
        found = _attend(rows, k, v, scale, r, None)
        for _, counts, block in _passing(shard, sent):
            found = merge_lse(found, _attend(rows, block[0], block[1], scale, r, counts))
        o = _heads(found.o, q.shape[2]).to(v.dtype)
        ctx.shard, ctx.scale = shard, scale
        ctx.save_for_backward(*tensors, o, found.logsumexp)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        q, k, v, *sent, o, logsumexp = ctx.saved_tensors
        shard, g, r = ctx.shard, k.shape[2], q.shape[2] // k.shape[2]
        rows, dtype = _rows(q, g), sum_dtype(v.dtype)
        do = _rows(dy, g).to(dtype)
        less = (do * _rows(o, g).to(dtype)).sum(-1)
        options: dict[str, Any] = {"scale": ctx.scale, "r": r}
        given = rows, do, less, logsumexp
        dq, dk, dv = _differentiate(given, [k, v], None, **options)
        found = []
        for source, counts, block in _passing(shard, sent):
            more, *dblock = _differentiate(given, block, counts, **options)
            dq += more
            found += [(x, source) for x in dblock]
        # Only now: of what two ranks send each other, NCCL takes nothing before the other one wants it.
        for x, source in found:
            shard.ranks.send(x, source)
        dsent = [torch.zeros_like(x, dtype=dtype) for x in sent]
        for reader in shard.readers if shard.receives else ():
            for x in dsent:
                x += shard.ranks.receive(x, reader)
        dq = _heads(dq, q.shape[2]).to(q.dtype)
        return None, None, None, dq, dk.to(k.dtype), dv.to(v.dtype), *(x.to(v.dtype) for x in dsent)


def _passing(shard: SequenceShard, block: list[Tensor]) -> Iterator[tuple[int, list[int], list[Tensor]]]:
    """The keys and values of earlier ranks as they pass: the rank they are of, how many of them there are in
    each row, and they. Each is sent on before it is read."""
    if not shard.receives:
        return
    ranks = shard.ranks
    rank = source = ranks.rank
    since = ranks.under_way()
    while True:
        if rank + 1 < ranks.size and source in shard.chain_of(rank + 1):
            ranks.finish_sent(since)  # the block before this one: all of them would be the whole sequence
            for x in block:
                ranks.send(x, rank + 1)
        source -= 1
        if source not in shard.chain:
            return
        span = shard.spans[source]
        time = span.time if span.single else span.counts[0]
        like = [x.new_empty(x.shape[0], time, *x.shape[2:]) for x in block]
        block = [ranks.receive(x, rank - 1) for x in like]
        yield source, span.counts, block


def _attend(
    rows: Float[Tensor, "b g n d"], k: Tensor, v: Tensor, scale: float, r: int, counts: list[int] | None
) -> PartialAttention:
    """Attention to a block of which all queries see the first `counts` keys; None: to their own, each to
    those up to itself."""
    dtype = sum_dtype(v.dtype)
    o = rows.new_empty(*rows.shape[:3], v.shape[3], dtype=dtype)
    logsumexp = rows.new_empty(rows.shape[:3], dtype=dtype)
    k, v = k.movedim(1, 2), v.movedim(1, 2)
    for part, seen, scores in _scores(rows, k, scale, r, counts):
        highest = scores.amax(-1, keepdim=True)
        highest = highest.masked_fill(highest == -math.inf, 0.0)
        weights = scores.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        logsumexp[:, :, part] = (total.log() + highest)[..., 0]
        weights.div_(total.masked_fill(total == 0, 1.0))
        o[:, :, part] = (weights.to(v.dtype) @ v[:, :, :seen]).to(dtype)
    return PartialAttention(o, logsumexp)


def _differentiate(
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    block: list[Tensor],
    counts: list[int] | None,
    *,
    scale: float,
    r: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [b g n d], dk [b s g d] and dv [b s g e] of a block. given: rows, do, do . o and L."""
    rows, do, less, logsumexp = given
    dtype = do.dtype
    k, v = (x.movedim(1, 2) for x in block)
    v = v.to(dtype)
    dq = torch.zeros_like(rows, dtype=dtype)
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v)
    for part, seen, scores in _scores(rows, k, scale, r, counts):
        weights = scores.sub_(logsumexp[:, :, part, None]).exp_()
        dv[:, :, :seen] += weights.mT @ do[:, :, part]
        dscores = (do[:, :, part] @ v[:, :, :seen].mT).sub_(less[:, :, part, None]).mul_(weights).mul_(scale)
        dq[:, :, part] = dscores @ k[:, :, :seen].to(dtype)
        dk[:, :, :seen] += dscores.mT @ rows[:, :, part].to(dtype)
    return dq, dk.movedim(1, 2), dv.movedim(1, 2)


def _scores(
    rows: Tensor, k: Tensor, scale: float, r: int, counts: list[int] | None
) -> Iterator[tuple[slice, int, Tensor]]:
    """Some rows at a time: which, how many keys they may see, and the scores, -inf for those they do not."""
    b, g, n, _ = rows.shape
    s, dtype = k.shape[2], sum_dtype(k.dtype)
    limit = CACHED if rows.device.type == "cpu" else BUSY
    step = max(1, limit // max(1, b * g * s))
    places = torch.arange(s, device=rows.device)
    hidden = None
    if counts is not None and min(counts) < s:
        hidden = places >= torch.tensor(counts, device=rows.device)[:, None, None, None]
    for first in range(0, n, step):
        part = slice(first, min(n, first + step))
        seen = (part.stop - 1) // r + 1 if counts is None else s
        scores = (rows[:, :, part].to(dtype) * scale) @ k[:, :, :seen].to(dtype).mT
        if counts is None:
            query = torch.arange(part.start, part.stop, device=rows.device) // r
            scores.masked_fill_(places[:seen] > query[:, None], -math.inf)
        elif hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        yield part, seen, scores


def _rows(x: Float[Tensor, "b t h d"], g: int) -> Float[Tensor, "b g n d"]:
    """The queries of each key-value head in one line, in the order of time."""
    return x.unflatten(2, (g, -1)).movedim(1, 2).flatten(2, 3)


def _heads(x: Float[Tensor, "b g n d"], h: int) -> Float[Tensor, "b t h d"]:
    """Rows back at their places."""
    return x.unflatten(2, (-1, h // x.shape[1])).movedim(1, 2).flatten(2, 3)

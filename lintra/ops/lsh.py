"""Attention among tokens that hash alike: Kitaev et al. 2020, "Reformer", arXiv:2001.04451, section 2.

Each round hashes every token by the direction of its vector, sorts the tokens by (bucket, place) and cuts the
sorted row into chunks; a query sees the keys in its own chunk and in those beside it. The results of the
rounds are joined by their log-sum-exps. Queries and keys are one vector u: a key is u at length 1, and a
token sees itself only where it sees nothing else, unless `see_self`.

Padded tokens sort behind all others, so that every real one has the rank it would have alone. On the CPU the
tokens are sorted in PyTorch, and chunks attend to each other in C++, no score kept.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from lintra.native.softmax import KERNEL_ROUNDS, RULES
from lintra.ops import checks
from lintra.ops.autocast import no_autocast, without_autocast
from lintra.ops.checks import sum_dtype
from lintra.ops.norms import unit
from lintra.ops.padding import connected_zeros, real_tokens, take, take_by_head
from lintra.ops.softmax_attention import PartialAttention, merge_lse, softmax_attention
from lintra.ops.softmax_native import register_sorted, runs_natively

_PADDED = 2**31 - 1  # the bucket of padding, the last of int32
SINGLE = 6  # up to 2^6 buckets come from one hash, more from a pair of hashes


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Rule by which sorted places see each other."""

    causal: bool
    chunk: int = 64  # tokens
    look_back: int = 1  # chunks before a query's own
    look_ahead: int = 0  # chunks after it
    wrap: bool = True  # the chunk before the first is the last of the same round and sample
    across_buckets: bool = True  # False: a query sees only keys of its own bucket
    see_self: bool = False  # a token's own key is one like any other; else only where it sees nothing else

    def rule(self, exact_union: bool) -> int:
        """Return how tokens see each other as the kernel reads it."""
        holds = {
            "causal": self.causal,
            "see_self": self.see_self,
            "across_buckets": self.across_buckets,
            "wrap": self.wrap,
            "exact_union": exact_union,
        }
        return sum(RULES[name] for name, value in holds.items() if value)

    @classmethod
    def of_rule(cls, rule: int, chunk: int, look_back: int, look_ahead: int) -> tuple["Pattern", bool]:
        """Return the pattern that has this rule, and whether it is of an exact union."""
        holds = {name: bool(rule & flag) for name, flag in RULES.items()}
        exact_union = holds.pop("exact_union")
        return cls(chunk=chunk, look_back=look_back, look_ahead=look_ahead, **holds), exact_union

    @property
    def width(self) -> int:
        """Chunks a query may see."""
        return self.look_back + 1 + self.look_ahead


def columns(level: int) -> tuple[int, ...]:
    """Return how many columns each hash of 2^level buckets has: one hash, or a pair for many buckets."""
    if level <= SINGLE:
        return (2 ** (level - 1),)
    return 2 ** ((level + 1) // 2 - 1), 2 ** (level // 2 - 1)


def buckets(
    u: Float[Tensor, "b t h d"], rotations: Float[Tensor, "h r n d c"], levels: list[int]
) -> Int[Tensor, "b t h r l"]:
    """The bucket of every token in every round, with 2^level buckets for each of the `levels`.

    A hash of 2 c buckets is the place of the largest of x and -x, x = u R with c random columns: buckets are
    cones, and -u lies c buckets further. A smaller hash uses the first columns. Above 2^6 buckets two hashes,
    of about the root of that number each, make one: t d b multiplications would be quadratic in t where b
    grows with t. Ids in int16, without gradient; computed in float32 or wider.
    """
    dtype = sum_dtype(u.dtype)
    sizes = [columns(level) for level in levels]
    used = rotations[:, :, : max(map(len, sizes)), :, : max(map(max, sizes))]
    with torch.no_grad(), no_autocast(u):
        x = torch.einsum("bthd,hrndc->nbthrc", u.to(dtype), used.to(dtype))
        needed = {(i, size) for each in sizes for i, size in enumerate(each)}
        hashes = {(i, size): _largest(x[i, ..., :size]) for i, size in needed}
        ids = []
        for first, *second in sizes:
            ids.append(hashes[0, first])
            for size in second:
                ids[-1] = ids[-1] + 2 * first * hashes[1, size]
        return torch.stack(ids, -1).to(torch.int16)


def _largest(x: Tensor) -> Tensor:
    """Return which of [x, -x] is the largest."""
    place = x.abs().max(-1, keepdim=True).indices
    return (place + x.shape[-1] * (x.gather(-1, place) < 0))[..., 0]


class Order(NamedTuple):
    """The tokens of each round as they are sorted, filled up to whole chunks with padding."""

    token: Int[Tensor, "b h r t"]  # by rank
    rank: Int[Tensor, "b h r t"]  # by token
    place: Int[Tensor, "b h r t"]  # the chunk it is in
    bucket: Int[Tensor, "b h r t"]
    real: Bool[Tensor, "b t"]
    chunks: Int[Tensor, "b"]  # that hold a real token; 1 for a sample without any

    @classmethod
    def of(cls, bucket: Int[Tensor, "b t h r"], mask: Bool[Tensor, "b t"] | None, chunk: int) -> "Order":
        time = bucket.shape[1]
        spare = -time % chunk
        real = functional.pad(real_tokens(mask, bucket), (0, spare))
        bucket = functional.pad(bucket.permute(0, 2, 3, 1), (0, spare)).to(torch.int32)
        token = bucket.masked_fill(~real[:, None, None], _PADDED).argsort(dim=-1, stable=True)
        return cls.sorted(token, bucket, real, chunk)

    @classmethod
    def sorted(
        cls,
        token: Int[Tensor, "b h r t"],
        bucket: Int[Tensor, "b h r t"],
        real: Bool[Tensor, "b t"],
        chunk: int,
    ) -> "Order":
        """The order in which tokens are sorted already."""
        places = torch.arange(token.shape[3], device=token.device).expand_as(token)
        rank = torch.empty_like(token).scatter(-1, token, places)
        chunks = ((real.sum(1) + chunk - 1) // chunk).clamp(min=1)
        return cls(token, rank, (rank // chunk).to(torch.int32), bucket, real, chunks)


class Sight(NamedTuple):
    """Keys that c chunks of i queries see in one round: j each, those of the w chunks beside them."""

    source: Int[Tensor, "b h c w"]  # those chunks
    key: Int[Tensor, "b h c j"]  # the tokens in them
    visible: Bool[Tensor, "b h c i j"]  # a query's own key with `see_self` only
    count: Int[Tensor, "b h c i j"] | None  # how many rounds see it, where each key is to count once

    @classmethod
    def of(
        cls,
        order: Order,
        round: int,
        query: Int[Tensor, "b h c i"],
        place: Int[Tensor, "b h c"],
        pattern: Pattern,
        exact_union: bool,
        allowed: Bool[Tensor, "t t"] | None = None,
    ) -> "Sight":
        """`query`: the tokens that look; `place`: the chunk they are in; `allowed`: who may see whom."""
        chunk, total, rounds = pattern.chunk, order.real.shape[1], order.token.shape[2]
        source, valid = _window(place[..., None], order.chunks[:, None, None, None], pattern)
        rows = order.token[:, :, round].unflatten(2, (-1, chunk))
        key = rows.gather(2, source.flatten(2)[..., None].expand(-1, -1, -1, chunk)).reshape(*place.shape, -1)
        real = order.real[:, None].expand(order.token.shape[:2] + order.real.shape[1:])
        usable = valid.repeat_interleave(chunk, 3) & _of_tokens(real, key)
        seen = key.masked_fill(~usable, total).to(torch.int32)[..., None, :]
        looks = query.to(torch.int32)[..., None]
        visible = seen < looks if pattern.causal else (seen != looks) & (seen < total)
        if pattern.see_self:
            visible |= seen == looks
        if allowed is not None:
            visible &= allowed[query[..., None], key[..., None, :]]
        if not pattern.across_buckets:
            visible &= _same_bucket(order, round, query, key)
        if not exact_union or rounds == 1:
            return cls(source, key, visible, None)
        count = torch.ones_like(visible, dtype=torch.uint8 if rounds < 256 else torch.int32)
        for other in range(rounds):
            if other != round:
                also = _sees(order, other, query, key, pattern)
                if not pattern.across_buckets:
                    also &= _same_bucket(order, other, query, key)
                count += also
        return cls(source, key, visible, count)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to a score so that the rounds together count each key once."""
        return None if self.count is None else self.count.to(dtype).log_().neg_()


def lsh_attention_reference(
    u: Float[Tensor, "b t h d"],
    v: Float[Tensor, "b t h e"],
    bucket: Int[Tensor, "b t h r"],
    pattern: Pattern,
    *,
    mask: Bool[Tensor, "b t"] | None = None,
    allowed: Bool[Tensor, "t t"] | None = None,
    exact_union: bool = True,
    scale: float = 1.0,
) -> Float[Tensor, "b t h e"]:
    """The definition, O(t^2): every score, weighted by the number of rounds that see it."""
    time = u.shape[1]
    token = torch.arange(time, device=u.device)
    real = real_tokens(mask, u)
    before = token[:, None] >= token
    pairs = (real[:, :, None] & real[:, None])[:, None]
    may = pairs & before if pattern.causal else pairs
    may = may if allowed is None else may & allowed
    own = torch.eye(time, dtype=torch.bool, device=u.device)
    seen = torch.zeros(u.shape[0], u.shape[2], time, time, dtype=torch.int64, device=u.device)
    for hashed in bucket.transpose(1, 2).unbind(3):
        one, other = hashed[..., :, None], hashed[..., None, :]
        sorted_before = (other < one) | ((other == one) & before)
        place = ((sorted_before & pairs).sum(-1) - 1).div(pattern.chunk, rounding_mode="floor")
        distance = place[..., None, :] - place[..., None]
        if pattern.wrap:
            chunks = place.amax(-1).clamp(min=0)[..., None, None] + 1
            near = (distance + pattern.look_back).remainder(chunks) < pattern.width
        else:
            near = (distance >= -pattern.look_back) & (distance <= pattern.look_ahead)
        seen += near if pattern.across_buckets else near & (one == other)
    seen = seen * (may if pattern.see_self else may & ~own)
    seen = seen + (may & own) * (seen == 0).all(-1, keepdim=True)
    scores = (scale * torch.einsum("bthd,bshd->bhts", u, unit(u))).masked_fill(seen == 0, -math.inf)
    if not exact_union:
        scores = scores + seen.to(scores.dtype).log()
    blind = (seen == 0).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return torch.einsum("bhts,bshe->bthe", weights, v)


@without_autocast
def lsh_attention(
    u: Float[Tensor, "b t h d"],
    v: Float[Tensor, "b t h e"],
    bucket: Int[Tensor, "b t h r"],
    pattern: Pattern,
    *,
    mask: Bool[Tensor, "b t"] | None = None,
    allowed: Bool[Tensor, "t t"] | None = None,
    exact_union: bool = True,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Float[Tensor, "b t h e"]:
    """Every token attends to the keys that its chunk sees in each round; 0 in padded places.

    `bucket` decides what is seen and has no gradient; of that, `allowed` says which keys (columns) each query
    (row) may see, and one that sees nothing then gets 0. exact_union: the softmax over all keys that some
    round sees; otherwise a key seen in n rounds has n times the weight. `scale` multiplies the scores and has
    no unit. Padded places of u and v must be finite.
    """
    sizes: dict[str, int] = {}
    for name, x, letters in (("u", u, "b t h d"), ("v", v, "b t h e"), ("bucket", bucket, "b t h r")):
        checks.shape(name, x, letters, sizes)
    checks.floating("u", u)
    checks.same_device_and_dtype("v", v, "u", u)
    if mask is not None:
        checks.mask(mask, "b t", sizes, u.device)
    if bucket.is_floating_point() or bucket.is_complex():
        raise TypeError(f"bucket must be integers, got {bucket.dtype}")
    if bucket.numel() and checks.readable(bucket):
        least, most = (int(x) for x in bucket.aminmax())
        if least < -(2**31) or most >= _PADDED:
            raise ValueError(f"bucket must be from -2^31 to 2^31 - 2, got {least} to {most}")
    if allowed is not None:
        checks.shape("allowed", allowed, "t t", sizes)
    time, chunk = u.shape[1], pattern.chunk
    if u.numel() == 0 or v.numel() == 0:
        return connected_zeros(v.shape, u, v)
    order = Order.of(bucket, mask, chunk)
    keys = unit(u)
    few = allowed is None and bucket.shape[3] <= KERNEL_ROUNDS
    if few and runs_natively(u, keys, v, dropout):
        real = None if mask is None else order.real[:, :time]
        rule = (pattern.rule(exact_union), chunk, pattern.look_back, pattern.look_ahead, scale)
        partial = PartialAttention(
            *_operator(u, keys, v, real, order.token, order.place, order.bucket, *rule)
        )
    else:
        partial = _rounds(u, keys, v, order, pattern, exact_union, allowed, scale=scale, dropout=dropout)
    own = v
    if allowed is not None:
        own = v * allowed.diagonal()[:, None, None]
    return _join(partial, own, order.real[:, :time], dropout)


def _rounds(
    u: Float[Tensor, "b t h d"],
    keys: Float[Tensor, "b t h d"],
    v: Float[Tensor, "b t h e"],
    order: Order,
    pattern: Pattern,
    exact_union: bool,
    allowed: Bool[Tensor, "t t"] | None,
    **options: Any,
) -> PartialAttention:
    """All rounds together, o [b t h e] and logsumexp [b t h], on every device."""
    time, chunk = u.shape[1], pattern.chunk
    spare = order.real.shape[1] - time
    u, keys, v = (functional.pad(x, (0, 0, 0, 0, 0, spare)) for x in (u, keys, v))
    if allowed is not None:
        allowed = functional.pad(allowed, (0, spare, 0, spare))
    place = torch.arange(order.real.shape[1] // chunk, device=u.device).expand(u.shape[0], u.shape[2], -1)
    partials = []
    for i in range(order.token.shape[2]):
        token, rank = order.token[:, :, i], order.rank[:, :, i]
        query = token.unflatten(2, (-1, chunk))
        sight = Sight.of(order, i, query, place, pattern, exact_union, allowed)
        partial = softmax_attention(
            _take(u, query),
            _beside(_take(keys, query), sight.source),
            _beside(_take(v, query), sight.source),
            visible=sight.visible,
            bias=sight.bias(sum_dtype(v.dtype)),
            **options,
        )
        o = take(partial.o.flatten(2, 3).flatten(0, 1), rank.flatten(0, 1)).unflatten(0, rank.shape[:2])
        partials.append(PartialAttention(o, partial.logsumexp.flatten(2).gather(2, rank)))
    o, logsumexp = merge_lse(*partials)
    return PartialAttention(o.transpose(1, 2)[:, :time], logsumexp.transpose(1, 2)[:, :time])


def _again(
    u: Tensor,
    keys: Tensor,
    v: Tensor,
    real: Tensor | None,
    token: Tensor,
    place: Tensor,
    bucket: Tensor,
    rule: int,
    chunk: int,
    before: int,
    after: int,
    scale: float,
) -> PartialAttention:
    """All rounds by way of all scores, for the gradient of a gradient."""
    pattern, exact_union = Pattern.of_rule(rule, chunk, before, after)
    real = functional.pad(real_tokens(real, u), (0, token.shape[3] - u.shape[1]))
    order = Order.sorted(token, bucket, real, chunk)
    return _rounds(u, keys, v, order, pattern, exact_union, None, scale=scale)


_operator = register_sorted(_again)


def lsh_attention_newest(
    u: Float[Tensor, "b t h d"],
    v: Float[Tensor, "b t h e"],
    bucket: Int[Tensor, "b t h r"],
    pattern: Pattern,
    *,
    mask: Bool[Tensor, "b t"] | None = None,
    exact_union: bool = True,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Float[Tensor, "b 1 h e"]:
    """Return what `lsh_attention` gives the last token, from the chunks it sees alone; there must be a
    token."""
    last = slice(u.shape[1] - 1, u.shape[1])
    if u.numel() == 0 or v.numel() == 0:
        return connected_zeros(v[:, last].shape, u, v)
    order = Order.of(bucket, mask, pattern.chunk)
    partials = []
    for i in range(bucket.shape[3]):
        place = order.place[:, :, i, last].to(torch.int64)
        query = torch.full_like(place, last.start)[..., None]
        sight = Sight.of(order, i, query, place, pattern, exact_union)
        key = sight.key.clamp(max=last.start)
        partial = softmax_attention(
            u[:, last].transpose(1, 2)[:, :, None],
            unit(_take(u, key)),
            _take(v, key),
            visible=sight.visible,
            bias=sight.bias(sum_dtype(v.dtype)),
            scale=scale,
            dropout=dropout,
        )
        partials.append(PartialAttention(partial.o.flatten(2, 3), partial.logsumexp.flatten(2)))
    partial = PartialAttention(*(x.transpose(1, 2) for x in merge_lse(*partials)))
    return _join(partial, v[:, last], order.real[:, last], dropout)


def _window(place: Tensor, chunks: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """The chunks [... w] seen from the chunk `place` [... 1], of `chunks`, and which of them there are."""
    slot = torch.arange(pattern.width, device=place.device)
    source = place + slot - pattern.look_back
    if pattern.wrap:
        # As many chunks in a row as there are, whichever comes first, are all of them, each once.
        return source.remainder(chunks), (slot < chunks).expand(source.shape)
    return source.clamp(min=0).minimum(chunks - 1), (source >= 0) & (source < chunks)


def _sees(order: Order, round: int, query: Tensor, key: Tensor, pattern: Pattern) -> Tensor:
    """Return whether the chunk of a query [b h c i] sees that of a key [b h c j] in this round -> [b h c i
    j]."""
    place = order.place[:, :, round]
    here, there = _of_tokens(place, query)[..., None], _of_tokens(place, key)[..., None, :]
    source, valid = _window(here, order.chunks[:, None, None, None, None], pattern)
    first, *others = source.masked_fill(~valid, -1).to(torch.int32).split(1, -1)
    found = first == there
    for chunk in others:
        found |= chunk == there
    return found


def _same_bucket(order: Order, round: int, query: Tensor, key: Tensor) -> Tensor:
    bucket = order.bucket[:, :, round]
    return _of_tokens(bucket, query)[..., None] == _of_tokens(bucket, key)[..., None, :]


def _of_tokens(x: Tensor, token: Tensor) -> Tensor:
    """x [b h t] of those tokens [b h ...]."""
    return x.gather(2, token.flatten(2)).reshape(token.shape)


def _take(x: Tensor, token: Tensor) -> Tensor:
    """x [b t h d] of those tokens [b h ...] -> [b h ... d]."""
    return take_by_head(x, token.flatten(2)).unflatten(2, token.shape[2:])


def _beside(x: Tensor, source: Tensor) -> Tensor:
    """x [b h c m d], the chunks that each one sees in a row -> [b h c j d]."""
    batch, heads, count, chunk, width = x.shape
    first = torch.arange(batch * heads, device=x.device).reshape(batch, heads, 1, 1) * count
    rows = x.reshape(-1, chunk * width).index_select(0, (first + source).flatten())
    return rows.reshape(batch, heads, count, -1, width)


def _join(partial: PartialAttention, own: Tensor, real: Tensor, dropout: float) -> Tensor:
    """Return the result of the rounds [b t h e], or a token's `own` value where none of them sees a key."""
    alone = partial.logsumexp[..., None] == -math.inf
    if dropout:
        own = own * functional.dropout(torch.ones_like(own[..., :1]), dropout)
    y = torch.where(alone, own.to(partial.o.dtype), partial.o)
    return y.masked_fill(~real[:, :, None, None], 0.0).to(own.dtype)

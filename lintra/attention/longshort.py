"""Long-Short Transformer: Zhu et al. 2021, arXiv:2107.02192. Tokens nearby, and a few summaries of those far away.

A summary is a mean of keys, and the same mean of values, with learned weights (dynamic projection):

    P = softmax over the tokens of K W, W [d r]        K' = P^T K      V' = P^T V

and a query attends to the tokens of a window and to the summaries in one softmax:

    y_i = softmax(scale [q_i . LN(K)_window, q_i . LN'(K')]) [LN(V)_window; LN'(V')]

A mean is shorter than what it is a mean of and would be ignored, hence the two normalisations (DualLN), over the
features of all heads together. Bidirectional, the sequence goes in segments of w tokens: all of a segment see the
segment and w / 2 tokens on each side of it, and `rank` summaries of everything. Causal, a token sees the last w,
its own included, and `segment_rank` summaries of every segment of `segment` tokens before its own.

Rotary positions turn the queries and keys of the window; summaries are of keys as they came, whose queries are
not turned either.

Cost of t tokens: t (2 w + r) (d + e) multiplications and additions a head; causal t (w + r t / (2 l)) (d + e)
with r summaries of segments of l tokens: quadratic, with that small factor. The state holds the last w to w + l
tokens, r (d + e) numbers for every finished segment, and the running mean of the open one.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra import fields
from lintra.attention._base import Attention, Capabilities, zero_padding
from lintra.ops import _check
from lintra.ops._check import sum_dtype
from lintra.ops.banded import banded_attention
from lintra.ops.padding import RealFirst
from lintra.ops.positions import Rotation
from lintra.ops.softmax_attention import Piece, merge, softmax_attention

# Summaries of the future are not computed for a block of this many queries that none of them sees them.
_QUERIES = 512


@dataclass(frozen=True, kw_only=True)
class Config:
    """Long-Short Transformer."""

    window: int = 128  # causal: tokens a query sees; else of a segment, seen with half as many on each side
    rank: int = 32  # summaries of the sequence, bidirectional; 0: none
    segment: int = 16  # tokens that are summed up together, causal
    segment_rank: int = 1  # summaries of each segment, causal; 0: none
    dual_norm: bool = True  # normalise tokens and summaries, each with weights of their own
    scale: float | None = None  # multiplies the scores; no unit; None: (size of a head) ** -0.5
    dropout: float = 0.0  # probability of dropping a weight in training

    def __post_init__(self):
        fields.check(self)
        for name, least in (("window", 0), ("rank", 0), ("segment", 1), ("segment_rank", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.window == self.rank == 0:
            raise ValueError("window and rank must not both be 0: nothing would be seen, got 0 and 0")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite, got {self.scale}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    def build(self, **shape) -> "LongShortAttention":
        return LongShortAttention(self, **shape)


class LongShortState(NamedTuple):
    """Of the `seen` [b] real tokens so far, as attention takes them:

    k [b s g d], v [b s g e], the last ones, the newest at the end; long_k [b c r g d], long_v [b c r g e], the
    summaries of each finished segment; both in the activations' dtype, 0 where there is none. o [b g r d+e] and
    logsumexp [b g r] are the open segment's mean of keys and values and the weight it has so far, in float32
    (float64 for float64).
    """

    k: Tensor
    v: Tensor
    long_k: Tensor
    long_v: Tensor
    o: Tensor
    logsumexp: Tensor
    seen: Tensor


class LongShortMemory(NamedTuple):
    """The summaries of a sequence, k [b r g d], v [b r g e]; real [b]: it had a token."""

    k: Tensor
    v: Tensor
    real: Tensor


class Norm(nn.Module):
    """Layer normalisation over the features of all heads together, x [... g f]."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.bias = nn.Parameter(torch.zeros(heads, width))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.layer_norm(x, weight.shape, weight, bias).to(x.dtype)


class LongShortAttention(Attention):
    """Long-Short Transformer. State: the last tokens, summaries of finished segments, the open segment's."""

    paper = "Zhu et al. 2021, arXiv:2107.02192"
    can = Capabilities(
        causal=True,
        bidirectional=True,
        cross=True,
        recurrent=True,
        state="grows",
        cost="O(t w d + t^2 d r / l)",
    )

    def __init__(self, config: Config, *, causal: bool, **shape):
        if causal:
            _check_causal_window(config)
        if not causal:
            self.can = replace(self.can, cost="O(t (w + r) d)", cross=config.window == 0)
        elif not config.segment_rank:
            self.can = replace(self.can, cost="O(t w d)", state="window")
        super().__init__(config, causal=causal, **shape)
        self.turned = self.dim if config.window else 0
        self.rank = config.segment_rank if causal else config.rank
        bound = math.sqrt(6 / (self.dim + self.rank))  # Glorot and Bengio 2010
        self.project = nn.Parameter(torch.empty(self.kv_heads, self.dim, self.rank).uniform_(-bound, bound))
        self.window_key, self.window_value = self._norms(config.window > 0)
        self.long_key, self.long_value = self._norms(self.rank > 0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, rotate: Rotation | None = None
    ) -> Tensor:
        if self.causal:
            return super().forward(q, k, v, mask=mask, rotate=rotate)
        self.check(q, k, v, mask)
        self.check_rotate(rotate)
        if not q.shape[1]:
            return v.new_zeros(*q.shape[:3], self.value_dim)
        real = None if mask is None else RealFirst.of(mask)
        q, k, v, rotate = _to_the_front(real, q, k, v, rotate)
        present = q.new_ones(q.shape[:2], dtype=torch.bool) if real is None else real.mask
        piece = self._read(q, self._summarise(k, v, present))
        if self.config.window:
            piece = merge(piece, self._around(q, k, v, present, rotate))
        y = piece.o.to(v.dtype)
        return y if real is None else real.restore(y)

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LongShortState:
        sums = {"device": device, "dtype": sum_dtype(dtype or torch.get_default_dtype())}
        own = {"device": device, "dtype": dtype}
        return LongShortState(
            torch.empty(batch, 0, self.kv_heads, self.dim, **own),
            torch.empty(batch, 0, self.kv_heads, self.value_dim, **own),
            torch.empty(batch, 0, self.rank, self.kv_heads, self.dim, **own),
            torch.empty(batch, 0, self.rank, self.kv_heads, self.value_dim, **own),
            torch.zeros(batch, self.kv_heads, self.rank, self.dim + self.value_dim, **sums),
            torch.full((batch, self.kv_heads, self.rank), -math.inf, **sums),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LongShortState,
        *,
        mask: Tensor | None = None,
        rotate: Rotation | None = None,
    ) -> tuple[Tensor, LongShortState]:
        self.check(q, k, v, mask)
        self.check_causal()
        self._check_state(state, k, v)
        if not q.shape[1]:
            return v.new_zeros(*q.shape[:3], self.value_dim), state
        real = None if mask is None else RealFirst.of(mask)
        q, k, v, rotate = _to_the_front(real, q, k, v, rotate)
        count = torch.full_like(state.seen, q.shape[1]) if real is None else real.mask.sum(1)
        near, last_k, last_v = self._slide(q, k, v, state, count, rotate)
        long_k, long_v, running = self._finish(k, v, state, count)
        piece = merge(near, self._look_back(q, long_k, long_v, state))
        after = LongShortState(last_k, last_v, long_k, long_v, *running, state.seen + count)
        y = piece.o.to(v.dtype)
        return y if real is None else real.restore(y), after

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: LongShortState, *, rotate: Rotation | None = None
    ) -> tuple[Tensor, LongShortState]:
        """One token against the window and the summaries, weight by weight: the reference of `extend`."""
        self.check_step(q, k, v)
        self._check_state(state, k, v)
        size, seen = self.config.segment, state.seen[:, None]
        near_k, near_v = self.window_key(k), self.window_value(v)
        turned, near_k = (q, near_k) if rotate is None else (rotate(q), rotate(near_k))
        near_k, near_v = _append(state.k, near_k), _append(state.v, near_v)
        ago = torch.arange(state.k.shape[1], -1, -1, device=seen.device)
        near = (ago < self.config.window) & (ago <= seen)
        far = torch.arange(state.long_k.shape[1], device=seen.device) < seen // size
        visible = torch.cat((near, far.repeat_interleave(self.rank, 1)), 1)[:, None, None]

        group = self.heads // self.kv_heads
        far_k, far_v = state.long_k.flatten(1, 2).to(k.dtype), state.long_v.flatten(1, 2).to(v.dtype)
        scores = torch.cat([
            torch.einsum("bthd,bshd->bhts", asked, keys.repeat_interleave(group, 2))
            for asked, keys in ((turned, near_k), (q, far_k))
        ], -1)  # fmt: skip
        scale = self.dim**-0.5 if self.config.scale is None else self.config.scale
        weights = (scale * scores).masked_fill(~visible, -torch.inf).softmax(-1)
        values = torch.cat((near_v, far_v), 1).repeat_interleave(group, 2)
        y = torch.einsum("bhts,bshe->bthe", weights, values)

        both = torch.cat((k, v), -1)[:, 0, :, None].expand(-1, -1, self.rank, -1).to(state.o.dtype)
        weight = torch.einsum("bgd,gdr->bgr", k[:, 0], self.project.to(k.dtype)).to(state.o.dtype)
        piece = merge(Piece(state.o, state.logsumexp), Piece(both, weight))
        full = (seen + 1) % size == 0
        slots = torch.arange((self._passed(state) + 1) // size, device=seen.device)
        written = full & (slots == seen // size)
        long_k, long_v = (
            _write(old, new[:, None].expand(-1, len(slots), -1, -1, -1), written)
            for old, new in zip((state.long_k, state.long_v), self._normal(piece, k.dtype), strict=True)
        )
        keep = self._kept(near_k.shape[1])
        after = LongShortState(
            near_k[:, near_k.shape[1] - keep :],
            near_v[:, near_v.shape[1] - keep :],
            long_k,
            long_v,
            piece.o.masked_fill(full[:, :, None, None], 0.0),
            piece.logsumexp.masked_fill(full[:, :, None], -math.inf),
            state.seen + 1,
        )
        return y, after

    def remember(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> LongShortMemory:
        """The summaries. ValueError with a window, which another sequence has no places for."""
        self.check_cross()
        if self.config.window:
            raise ValueError(f"cross-attention has summaries only: window must be 0, got {self.config.window}")
        self.check(None, k, v, mask)
        k, v = zero_padding(mask, k, v)
        return self._summarise(k, v, k.new_ones(k.shape[:2], dtype=torch.bool) if mask is None else mask)

    def read(self, q: Tensor, memory: LongShortMemory, mask: Tensor | None = None) -> Tensor:
        self.check_cross()
        if not isinstance(memory, LongShortMemory):
            raise TypeError(f"memory must be a LongShortMemory, from remember, got {type(memory).__name__}")
        self.check_query(q, memory.k.shape[0], mask)
        _check.alike("q", q, "the memory", memory.k)
        (q,) = zero_padding(mask, q)
        return zero_padding(mask, self._read(q, memory).o.to(memory.v.dtype))[0]

    def _norms(self, used: bool) -> tuple[nn.Module, nn.Module]:
        if not (used and self.config.dual_norm):
            return nn.Identity(), nn.Identity()
        return Norm(self.kv_heads, self.dim), Norm(self.kv_heads, self.value_dim)

    def _options(self) -> dict[str, float | None]:
        return {"scale": self.config.scale, "dropout": self.config.dropout if self.training else 0.0}

    def _means(self, k: Tensor, v: Tensor, real: Tensor) -> Piece:
        """Dynamic projection of tokens k [... s g d], v [... s g e], real [... s] -> o [... g r d+e], the mean
        keys beside the mean values. That is attention of the columns of W to the keys, so that means over
        parts of a segment merge."""
        k, both = k.movedim(-2, -3), torch.cat((k, v), -1).movedim(-2, -3)
        return softmax_attention(
            self.project.mT.to(k.dtype), k, both, visible=real[..., None, None, :], scale=1.0
        )

    def _normal(self, piece: Piece, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The summaries k [... r g d], v [... r g e] that means o [... g r d+e] are."""
        k, v = piece.o.transpose(-2, -3).split((self.dim, self.value_dim), -1)
        return self.long_key(k).to(dtype), self.long_value(v).to(dtype)

    def _summarise(self, k: Tensor, v: Tensor, real: Tensor) -> LongShortMemory:
        return LongShortMemory(*self._normal(self._means(k, v, real), k.dtype), real.any(1))

    def _read(self, q: Tensor, memory: LongShortMemory) -> Piece:
        return self._attend(q, memory.k, memory.v, memory.real[:, None, None])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Piece:
        """All queries [b t h d] to all keys [b s g d] that are visible [b t s] -> o [b t h e]."""
        q = q.unflatten(2, (self.kv_heads, -1)).movedim(1, 3)
        k, v = k.movedim(1, 2)[:, :, None], v.movedim(1, 2)[:, :, None]
        piece = softmax_attention(q, k, v, visible=visible[:, None, None], **self._options())
        return Piece(*(x.movedim(3, 1).flatten(2, 3) for x in piece))

    def _around(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, rotate: Rotation | None) -> Piece:
        """Every query to its segment and half a window, rounded up, on both sides of it -> o [b t h e]."""
        time, size = q.shape[1], min(self.config.window, q.shape[1])
        k, v = self.window_key(k), self.window_value(v)
        q, k = (q, k) if rotate is None else (rotate(q), rotate(k))
        side = 0 if size == time else (size + 1) // 2
        more = -time % size
        # Padded after the normalisation: what stands there is 0 whatever the norm's bias, and hidden.
        q = functional.pad(q, (0, 0, 0, 0, 0, more)).unflatten(1, (-1, size))
        k, v = (
            functional.pad(x, (0, 0, 0, 0, side, side + more)).unfold(1, size + 2 * side, size).mT
            for x in (k, v)
        )
        real = functional.pad(real, (side, side + more)).unfold(1, size + 2 * side, size)
        piece = softmax_attention(
            q.unflatten(3, (self.kv_heads, -1)).movedim(2, 4),  # b n g r w d
            k[:, :, :, None],
            v[:, :, :, None],
            visible=real[:, :, None, None, None],
            **self._options(),
        )
        return Piece(*(x.movedim(4, 2).flatten(3, 4).flatten(1, 2)[:, :time] for x in piece))

    def _slide(
        self, q: Tensor, k: Tensor, v: Tensor, state: LongShortState, count: Tensor, rotate: Rotation | None
    ) -> tuple[Piece, Tensor, Tensor]:
        """Every query to the last `window` tokens -> o [b t h e], and the k, v the next state keeps."""
        k, v = self.window_key(k), self.window_value(v)
        q, k = (q, k) if rotate is None else (rotate(q), rotate(k))
        held = state.k.shape[1]
        k, v = _append(state.k, k), _append(state.v, v)
        place = torch.arange(k.shape[1], device=k.device) - held
        real = (place >= -state.seen[:, None]) & (place < count[:, None])
        near = {"before": self.config.window - 1, "after": 0}
        piece = banded_attention(q, k, v, **near, visible=real, **self._options())
        keep = self._kept(k.shape[1])
        last = held + count[:, None] + torch.arange(-keep, 0, device=k.device)
        return piece, _take(k, last, last >= 0), _take(v, last, last >= 0)

    def _finish(
        self, k: Tensor, v: Tensor, state: LongShortState, count: Tensor
    ) -> tuple[Tensor, Tensor, Piece]:
        """The summaries after these tokens, [b c r g d] and [b c r g e], and the open segment's means."""
        size, passed, time = self.config.segment, self._passed(state), k.shape[1]
        offset = state.seen[:, None] % size
        number = (size - 1 + time) // size + 1  # whatever the offset, the last of them is not finished
        place = torch.arange(number * size, device=k.device) - offset
        real = (place >= 0) & (place < count[:, None])
        if passed:
            k, v = _take(k, place, real), _take(v, place, real)
        else:
            more = (0, 0, 0, 0, 0, number * size - time)
            k, v = functional.pad(k, more), functional.pad(v, more)
        means = self._means(*(x.unflatten(1, (number, size)) for x in (k, v, real)))
        begun = merge(Piece(state.o, state.logsumexp), Piece(means.o[:, 0], means.logsumexp[:, 0]))
        means = Piece(*(torch.cat((a[:, None], b[:, 1:]), 1) for a, b in zip(begun, means, strict=True)))

        finished = (offset + count[:, None]) // size
        slot = torch.arange((passed + time) // size, device=k.device) - state.seen[:, None] // size
        written = (slot >= 0) & (slot < finished)
        long_k, long_v = (
            _write(old, _take(new, slot.clamp(max=number - 1), written), written)
            for old, new in zip((state.long_k, state.long_v), self._normal(means, k.dtype), strict=True)
        )
        return long_k, long_v, Piece(*(_take(x, finished, finished >= 0)[:, 0] for x in means))

    def _look_back(self, q: Tensor, k: Tensor, v: Tensor, state: LongShortState) -> Piece:
        """Every query to the summaries k [b c r g d], v of the segments before its own -> o [b t h e]."""
        size, passed, time = self.config.segment, self._passed(state), q.shape[1]
        own = (state.seen[:, None] + torch.arange(time, device=q.device)) // size
        pieces = []
        for first in range(0, time, _QUERIES):
            some = slice(first, min(first + _QUERIES, time))
            few = (passed + some.stop - 1) // size  # no query of these is in a later segment
            visible = torch.arange(few, device=q.device) < own[:, some, None]
            pieces.append(
                self._attend(
                    q[:, some],
                    k[:, :few].flatten(1, 2),
                    v[:, :few].flatten(1, 2),
                    visible.repeat_interleave(self.rank, 2),
                )
            )
        return Piece(*(torch.cat(x, 1) for x in zip(*pieces, strict=True)))

    def _passed(self, state: LongShortState) -> int:
        """How many tokens went through, padding included, read off the sizes of the state: a value on another
        device would have to be waited for."""
        size = self.config.segment
        return state.long_k.shape[1] * size + state.k.shape[1] % size

    def _kept(self, held: int) -> int:
        """How many of `held` tokens a state keeps: the window's, less by whole segments, for `_passed`."""
        size = self.config.segment
        return held - max(0, held - self.config.window + 1) // size * size

    def _check_state(self, state: LongShortState, k: Tensor, v: Tensor) -> None:
        if not isinstance(state, LongShortState):
            raise TypeError(f"state must be a LongShortState, got {type(state).__name__}")
        sizes = {"b": k.shape[0], "g": self.kv_heads, "d": self.dim, "e": self.value_dim, "r": self.rank}
        sizes["f"] = self.dim + self.value_dim
        for name, letters in (
            ("k", "b s g d"),
            ("v", "b s g e"),
            ("long_k", "b c r g d"),
            ("long_v", "b c r g e"),
            ("o", "b g r f"),
            ("logsumexp", "b g r"),
            ("seen", "b"),
        ):
            _check.shape(f"state.{name}", getattr(state, name), letters, sizes)
        if state.k.shape[1]:
            _check.alike("state.k", state.k, "k", k)
            _check.alike("state.v", state.v, "v", v)


def _check_causal_window(config: Config) -> None:
    least = config.segment if config.segment_rank else 1
    if config.window < least:
        raise ValueError(
            f"window must be at least {least} when causal, or a token between the window and the finished "
            f"segments (segment={config.segment}) would be seen by nothing, got {config.window}"
        )


def _to_the_front(
    real: RealFirst | None, q: Tensor, k: Tensor, v: Tensor, rotate: Rotation | None
) -> tuple[Tensor, Tensor, Tensor, Rotation | None]:
    if real is None:
        return q, k, v, rotate
    if rotate is not None:
        rotate = rotate._replace(position=real.gather(rotate.position))
    return real.gather(q), real.gather(k), real.gather(v), rotate


def _append(old: Tensor, new: Tensor) -> Tensor:
    """Tokens after tokens. An empty state takes the dtype of its first ones, which autocast decides."""
    return torch.cat((old, new), 1) if old.shape[1] else new


def _take(x: Tensor, index: Tensor, wanted: Tensor) -> Tensor:
    """x [b s ...] at index [b i] where wanted [b i], 0 elsewhere."""
    axes = [1] * (x.dim() - 2)
    index = index.clamp(0, x.shape[1] - 1).reshape(*index.shape, *axes).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index).masked_fill(~wanted.reshape(*wanted.shape, *axes), 0.0)


def _write(old: Tensor, new: Tensor, where: Tensor) -> Tensor:
    """new [b c ...] where `where` [b c]; elsewhere what `old`, perhaps shorter, has there, or 0."""
    new = new.masked_fill(~where.reshape(*where.shape, *[1] * (new.dim() - 2)), 0.0)
    if not old.shape[1]:
        return new
    return new + functional.pad(old, (0, 0) * (old.dim() - 2) + (0, new.shape[1] - old.shape[1]))

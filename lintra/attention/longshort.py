"""Long-Short Transformer: Zhu et al. 2021, arXiv:2107.02192. Tokens nearby, summaries of those far away.

A summary is a mean of keys, and the same mean of values, with weights the keys decide (dynamic projection):

    P = softmax over the tokens of K W, W [d r]        K' = P^T K        V' = P^T V

and a query attends to the tokens of a window and to the summaries in one softmax:

    y_i = softmax(scale [q_i . LN(K)_window, q_i . LN'(K')]) [LN(V)_window; LN'(V')]

A mean is shorter than the vectors it averages and would be ignored, hence the two normalisations (DualLN),
over the features of all heads together. In the bidirectional form, every token of a segment of w sees the
segment, w / 2 tokens on each side of it, and `rank` summaries of everything. In the causal form, a token sees
the last w, its own included, and `segment_rank` summaries of every segment of `segment` tokens before its
own.

Rotary positions turn the queries and keys of the window. Summaries are made of keys, and read by queries,
that are not rotated.

Cost of t tokens: t (2 w + r) (d + e) multiplications and additions a head; causal t (w + r t / (2 l)) (d + e)
with r summaries of a segment of l tokens: quadratic, by that small factor. Making the summaries takes
t r (2 d + e) more. The state holds the last w - 1 to w + l - 2 tokens, r (d + e) numbers for every finished
segment, and the running means of the open one.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention._dynamic_projection import DynamicProjection, Norm
from lintra.attention._scores import ScoredAttention
from lintra.attention._state import append
from lintra.attention.base import Capabilities
from lintra.config import fields
from lintra.ops.banded import banded_attention
from lintra.ops.checks import sum_dtype
from lintra.ops.layout import Layout
from lintra.ops.padding import LeftAlign, connected_zeros, take, zero_padding
from lintra.ops.rope import RotaryEmbedding
from lintra.ops.segments import segment_attention
from lintra.ops.softmax_attention import PartialAttention, merge_lse
from lintra.ops.softmax_native import all_keys, runs_natively, softmax_native
from lintra.ops.state import map_state

# Queries look back in blocks of this many; a block skips the summaries that all of its queries precede.
_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class Config:
    """Long-Short Transformer."""

    window: int = 128  # causal: tokens a query sees; else of a segment, which sees half as many on each side
    rank: int = 32  # bidirectional: summaries of the sequence; 0: none
    segment: int = 16  # causal: tokens summarised together
    segment_rank: int = 1  # causal: summaries of a segment; 0: none
    dual_norm: bool = True  # normalise tokens and summaries, each with weights of their own
    scale: float | None = None  # multiplies the scores; no unit; None: (size of a head) ** -0.5
    dropout: float = 0.0  # probability of dropping a weight in training

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, window=0, rank=0, segment=1, segment_rank=0)
        if self.window == self.rank == 0:
            raise ValueError(
                "window and rank must not both be 0, nothing would be seen, got window=0, rank=0"
            )
        fields.finite(self, "scale")
        fields.probability(self, "dropout")

    def build(self, **shape) -> "LongShortAttention":
        return LongShortAttention(self, **shape)


class LongShortState(NamedTuple):
    """Summary of the `seen` [b] real tokens so far, zeros where there is none:

    k [b s g d], v [b s g e]: the last of them as the window takes them, the newest at the end; summary_k
    [b c r g d], summary_v [b c r g e]: of each finished segment. Both in the dtype of the activations.
    o [b g r d+e], logsumexp [b g r]: the means of the open segment, in float32 (float64 for float64).
    """

    k: Tensor
    v: Tensor
    summary_k: Tensor
    summary_v: Tensor
    o: Tensor
    logsumexp: Tensor
    seen: Tensor


class LongShortMemory(NamedTuple):
    """The summaries of a sequence, k [b r g d], v [b r g e]; real [b]: it has a token."""

    k: Tensor
    v: Tensor
    real: Tensor


class LongShortAttention(ScoredAttention):
    """Long-Short Transformer. State: the last tokens, the summaries so far."""

    paper = "Zhu et al. 2021, arXiv:2107.02192"
    memory = LongShortMemory
    grows_apart = ("summary_k",)
    rotates = True
    can = Capabilities(
        causal=True,
        bidirectional=True,
        cross=True,
        recurrent=True,
        state="grows",
        cost="O(t w d + t^2 d r / l)",
    )

    def __init__(self, config: Config, *, causal: bool, **shape):
        least = config.segment if config.segment_rank else 1
        if causal and config.window < least:
            raise ValueError(
                f"window must be at least {least} when causal, or tokens between it and the last finished "
                f"segment would be lost, got {config.window}"
            )
        if not causal:
            self.can = replace(self.can, cross=config.window == 0, cost="O(t (w + r) d)")
        elif not config.segment_rank:
            self.can = replace(self.can, state="window", cost="O(t w d)")
        super().__init__(config, causal=causal, **shape)
        self.rope_dim = self.dim if config.window else 0
        norm = config.dual_norm and config.window > 0
        self.key_norm = Norm(self.kv_heads, self.dim) if norm else nn.Identity()
        self.value_norm = Norm(self.kv_heads, self.value_dim) if norm else nn.Identity()
        self.rank = config.segment_rank if causal else config.rank
        self.project = DynamicProjection(
            self.kv_heads, self.dim, self.value_dim, rank=self.rank, norm=config.dual_norm
        )

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, rope: RotaryEmbedding | None = None
    ) -> Tensor:
        if self.causal:
            return super()._forward(q, k, v, layout, rope=rope)
        left, q, k, v, rope = _left(layout, q, k, v, rope)
        real = layout.real(q) if left is None else left.mask
        partial = self._read(q, self._summaries(k, v, real))
        if self.config.window:
            size = {"segment": self.config.window, "side": (self.config.window + 1) // 2}
            q, k, v = self._nearby(q, k, v, rope)
            partial = merge_lse(partial, segment_attention(q, k, v, **size, visible=real, **self.weighing()))
        y = partial.o.to(v.dtype)
        return y if left is None else left.restore(y)

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LongShortState:
        g, r, d, e = self.kv_heads, self.rank, self.dim, self.value_dim
        own = {"device": device, "dtype": dtype}
        sums = {"device": device, "dtype": sum_dtype(dtype or torch.get_default_dtype())}
        return LongShortState(
            torch.empty(batch, 0, g, d, **own),
            torch.empty(batch, 0, g, e, **own),
            torch.empty(batch, 0, r, g, d, **own),
            torch.empty(batch, 0, r, g, e, **own),
            torch.zeros(batch, g, r, d + e, **sums),
            torch.full((batch, g, r), -math.inf, **sums),
            torch.zeros(batch, device=device, dtype=torch.int64),
        )

    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LongShortState,
        layout: Layout,
        *,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, LongShortState]:
        if not q.shape[1]:
            y = connected_zeros((*q.shape[:3], self.value_dim), *self.parameters(), q, k, v)
            return y, map_state(torch.clone, state)
        left, q, k, v, rope = _left(layout, q, k, v, rope)
        count = torch.full_like(state.seen, q.shape[1]) if left is None else left.mask.sum(1)
        near, last_k, last_v = self._slide(q, k, v, state, count, rope)
        summary_k, summary_v, means = self._sum_up(k, v, state, count)
        y = merge_lse(near, self._look_back(q, summary_k, summary_v, state)).o.to(v.dtype)
        after = LongShortState(last_k, last_v, summary_k, summary_v, *means, state.seen + count)
        return y if left is None else left.restore(y), after

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: LongShortState, *, rope: RotaryEmbedding | None = None
    ) -> tuple[Tensor, LongShortState]:
        """One token against the window and the summaries, weight by weight: the reference of `extend`."""
        size, seen, device = self.config.segment, state.seen[:, None], q.device
        rotated, near_k, near_v = self._nearby(q, k, v, rope)
        near_k, near_v = append(state.k, near_k), append(state.v, near_v)
        far_k, far_v = state.summary_k.flatten(1, 2).to(k.dtype), state.summary_v.flatten(1, 2).to(v.dtype)
        ago = torch.arange(near_k.shape[1] - 1, -1, -1, device=device)
        finished = torch.arange(state.summary_k.shape[1], device=device) < seen // size
        near, far = (ago < self.config.window) & (ago <= seen), finished.repeat_interleave(self.rank, 1)

        scores = torch.cat((self.scores(rotated, near_k), self.scores(q, far_k)), -1)
        visible = torch.cat((near, far), 1)[:, None, None]
        y = self.weigh(scores, visible, torch.cat((near_v, far_v), 1)).to(v.dtype)

        means = merge_lse(PartialAttention(state.o, state.logsumexp), self.project.of_one(k[:, 0], v[:, 0]))
        full = (seen + 1) % size == 0
        slots = torch.arange((self._passed(state) + 1) // size, device=device)
        summary_k, summary_v = (
            _write(old, new[:, None].expand(-1, len(slots), -1, -1, -1), full & (slots == seen // size))
            for old, new in zip(state[2:4], self.project.vectors(means, k.dtype), strict=True)
        )
        o = means.o.masked_fill(full[..., None, None], 0.0)
        logsumexp = means.logsumexp.masked_fill(full[..., None], -math.inf)
        first = near_k.shape[1] - self._kept(near_k.shape[1])
        last_k, last_v = near_k[:, first:], near_v[:, first:]
        return y, LongShortState(last_k, last_v, summary_k, summary_v, o, logsumexp, state.seen + 1)

    def _encode_memory(self, k: Tensor, v: Tensor, layout: Layout) -> LongShortMemory:
        return self._summaries(k, v, layout.real(k))

    def _cross_attend(self, q: Tensor, memory: LongShortMemory, layout: Layout) -> Tensor:
        return self._read(q, memory).o.to(q.dtype)

    def _nearby(
        self, q: Tensor, k: Tensor, v: Tensor, rope: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v as the window takes them: normalised, rotated."""
        k, v = self.key_norm(k), self.value_norm(v)
        return (q, k, v) if rope is None else (rope(q), rope(k), v)

    def _summaries(self, k: Tensor, v: Tensor, real: Tensor) -> LongShortMemory:
        k, v = self.project(k, v, real)
        return LongShortMemory(k, v, real.any(1))

    def _read(self, q: Tensor, memory: LongShortMemory) -> PartialAttention:
        visible = memory.real[:, None].expand(-1, memory.k.shape[1])
        return all_keys(q, memory.k, memory.v, visible=visible, **self.weighing())

    def _slide(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LongShortState,
        count: Tensor,
        rope: RotaryEmbedding | None,
    ) -> tuple[PartialAttention, Tensor, Tensor]:
        """Queries to the last `window` tokens -> o [b t h e]; the k and v of the next state."""
        q, k, v = self._nearby(q, k, v, rope)
        k, v, held = append(state.k, k), append(state.v, v), state.k.shape[1]
        place = torch.arange(-held, q.shape[1], device=q.device)
        real = (place >= -state.seen[:, None]) & (place < count[:, None])
        if q.shape[1] == 1:
            partial = self.partial_attention(q, k, v, (real & (place > -self.config.window))[:, None])
        else:
            band = {"before": self.config.window - 1, "after": 0, "visible": real}
            partial = banded_attention(q, k, v, **band, **self.weighing())
        last = held + count[:, None] + torch.arange(-self._kept(k.shape[1]), 0, device=q.device)
        return partial, _take(k, last, last >= 0), _take(v, last, last >= 0)

    def _sum_up(
        self, k: Tensor, v: Tensor, state: LongShortState, count: Tensor
    ) -> tuple[Tensor, Tensor, PartialAttention]:
        """The summaries so far, [b c r g d] and [b c r g e], and the means of the open segment."""
        size, passed, time = self.config.segment, self._passed(state), k.shape[1]
        offset, earlier = state.seen[:, None] % size, state.seen[:, None] // size
        segments = (size - 1 + time) // size + 1  # wherever the first begins, the last is not finished
        place = torch.arange(segments * size, device=k.device) - offset
        real = (place >= 0) & (place < count[:, None])
        if passed:
            k, v = _take(k, place, real), _take(v, place, real)
        else:
            k, v = (functional.pad(x, (0, 0, 0, 0, 0, segments * size - time)) for x in (k, v))
        means = self.project.means(*(x.unflatten(1, (segments, size)) for x in (k, v, real)))
        begun = merge_lse(
            PartialAttention(state.o, state.logsumexp), PartialAttention(*(x[:, 0] for x in means))
        )
        means = PartialAttention(
            *(torch.cat((x[:, None], y[:, 1:]), 1) for x, y in zip(begun, means, strict=True))
        )

        finished = (offset + count[:, None]) // size
        slot = torch.arange((passed + time) // size, device=k.device) - earlier
        here = (slot >= 0) & (slot < finished)
        summary_k, summary_v = (
            _write(old, _take(new, slot, here), here)
            for old, new in zip(state[2:4], self.project.vectors(means, k.dtype), strict=True)
        )
        return (
            summary_k,
            summary_v,
            PartialAttention(*(_take(x, finished, finished >= 0)[:, 0] for x in means)),
        )

    def _look_back(self, q: Tensor, k: Tensor, v: Tensor, state: LongShortState) -> PartialAttention:
        """Queries to the summaries [b c r g d] of the segments before their own -> o [b t h e]."""
        size, passed, time = self.config.segment, self._passed(state), q.shape[1]
        if self.rank and not passed and runs_natively(q, k, v, self.weighing()["dropout"]):
            return self._look_back_by_segments(q, k, v)
        own = (state.seen[:, None] + torch.arange(time, device=q.device)) // size
        partials = []
        for first in range(0, time, _BLOCK):
            last = min(first + _BLOCK, time)
            few = (passed + last - 1) // size
            finished = torch.arange(few, device=q.device) < own[:, first:last, None]
            keys, values = k[:, :few].flatten(1, 2), v[:, :few].flatten(1, 2)
            visible = finished.repeat_interleave(self.rank, 2)
            partials.append(self.partial_attention(q[:, first:last], keys, values, visible))
        return PartialAttention(*(torch.cat(x, 1) for x in zip(*partials, strict=True)))

    def _look_back_by_segments(self, q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        """`_look_back` of the first tokens of all sequences: those of a segment see the same summaries, so
        that they are query heads of one place, and the summaries before it a causal band."""
        size, (b, t, h, _) = self.config.segment, q.shape
        n = -(-t // size)
        q = functional.pad(q, (0, 0, 0, 0, 0, n * size - t)).unflatten(1, (n, size)).transpose(2, 3)
        # One place later, summaries are those before their place; at the first there is none.
        k, v = (functional.pad(x[:, : n - 1], (0,) * 6 + (1, 0)) for x in (k, v))
        visible = (torch.arange(n, device=q.device) > 0).expand(b, -1)
        band = {"before": n, "visible": visible, "scale": self.scale}
        first, *others = (
            softmax_native(q.flatten(2, 3), k[:, :, i], v[:, :, i], "band", **band) for i in range(self.rank)
        )
        partial = merge_lse(first, *others)
        return PartialAttention(
            *(x.unflatten(2, (h, size)).transpose(2, 3).flatten(1, 2)[:, :t] for x in partial)
        )

    def _kept(self, held: int) -> int:
        """Return how many of `held` tokens the next state keeps: those of the window, less by whole
        segments."""
        size = self.config.segment
        return held - max(0, held - self.config.window + 1) // size * size

    def _passed(self, state: LongShortState) -> int:
        """Return how many tokens there were, padded ones too, from the sizes of the state, which grow and
        shrink by whole segments: reading a value would mean waiting for the device."""
        size = self.config.segment
        return state.summary_k.shape[1] * size + state.k.shape[1] % size


def _left(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, rope: RotaryEmbedding | None
) -> tuple[LeftAlign | None, Tensor, Tensor, Tensor, RotaryEmbedding | None]:
    """Return the tokens with the real ones in front, and how they were moved there."""
    left = layout.left_align()
    if left is None:
        return None, q, k, v, rope
    rope = None if rope is None else rope.moved(left.gather(rope.position))
    return left, left.gather(q), left.gather(k), left.gather(v), rope


def _take(x: Tensor, index: Tensor, real: Tensor) -> Tensor:
    """x [b s ...] at index [b i] where real [b i], zeros elsewhere."""
    return zero_padding(real, take(x, index.clamp(0, x.shape[1] - 1)))[0]


def _write(old: Tensor, new: Tensor, here: Tensor) -> Tensor:
    """old [b a ...] with zeros up to the length of new [b c ...], and with what is new where `here` [b c]."""
    (new,) = zero_padding(here, new)
    if not old.shape[1]:
        return new
    return new + functional.pad(old, (0, 0) * (old.dim() - 2) + (0, new.shape[1] - old.shape[1]))

"""Softmax attention: Vaswani et al. 2017, arXiv:1706.03762, equation 1. The baseline.

    y_i = sum_j exp(scale q_i . k_j) v_j / sum_j exp(scale q_i . k_j)

over the keys a query may see: several tokens with a window through `lintra.ops.banded_attention`,
bidirectional ones on the CPU in C++, all else through PyTorch's scaled_dot_product_attention. Generation
keeps every key and value: a state that grows by d + e numbers a token and key-value head. With `window`, a
query sees the last `window` real tokens up to its own and the state stops growing.

Cost of t tokens: t^2 (d + e) multiplications and additions a head, with a window t (window + 64) (d + e) at
most. Padding is passed as s booleans a sample, or t s for several causal tokens after a state without
a window.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lintra.attention._scores import ScoredAttention, TokenMemory
from lintra.attention._state import append
from lintra.attention.base import Capabilities, Exchange
from lintra.config import fields
from lintra.ops import checks
from lintra.ops.banded import banded_attention
from lintra.ops.layout import Layout
from lintra.ops.padding import put_last, take
from lintra.ops.ring_attention import ring_attention


@dataclass(frozen=True, kw_only=True)
class Config:
    """Softmax attention."""

    window: int | None = None  # tokens a query sees, its own included; None: all
    scale: float | None = None  # multiplies the scores; no unit; None: (size of a head) ** -0.5
    dropout: float = 0.0  # probability of dropping a weight in training

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, window=1)
        fields.finite(self, "scale")
        fields.probability(self, "dropout")

    def build(self, **shape) -> "SoftmaxAttention":
        return SoftmaxAttention(self, **shape)


class SoftmaxState(NamedTuple):
    """The cache: k [b s g d], v [b s g e] in the dtype they came in, position [b s], -1 where padded.

    Copies are kept, no sums: the activations' own dtype loses nothing.
    """

    k: Tensor
    v: Tensor
    position: Tensor


class SoftmaxAttention(ScoredAttention):
    """Softmax attention. State: the keys and values so far."""

    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    can = Capabilities(
        causal=True, bidirectional=True, cross=True, recurrent=True, state="grows", cost="O(t^2 d)"
    )

    def __init__(self, config: Config, **shape):
        if config.window is not None:
            self.can = replace(self.can, bidirectional=False, cross=False, state="window", cost="O(t w d)")
        super().__init__(config, **shape)

    def exchange(self) -> Exchange | None:
        if self.config.window is not None:
            return "window"
        return None if self.config.dropout else "ring"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **_: Any) -> Tensor:
        if layout.shard is not None:
            return self._forward_shard(q, k, v, layout)
        if not self.causal:
            return self.attend_all(q, k, v, layout.mask)
        return self._attend_from_start(q, k, v, layout)

    def _forward_shard(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """y [b t h e] of a rank's shard of longer sequences: after the window before it, or in a ring."""
        assert layout.shard is not None
        if self.config.window is None:
            left = layout.left_align()
            q, k, v = (q, k, v) if left is None else (left.gather(x) for x in (q, k, v))
            y = ring_attention(q, k, v, layout.shard, scale=self.scale)
            return y if left is None else left.restore(y)
        (k_before, v_before), real = layout.shard.window([k, v], self.config.window - 1, layout)
        before = SoftmaxState(k_before, v_before, layout.shard.positions(real))
        return self._extend(q, k, v, before, layout)[0]

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SoftmaxState:
        return SoftmaxState(
            *self.no_tokens(batch, device, dtype),
            torch.empty(batch, 0, device=device, dtype=torch.int64),
        )

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, layout: Layout, **_: Any
    ) -> tuple[Tensor, SoftmaxState]:
        here = layout.after(_seen(state)).positions()
        after = append(state, SoftmaxState(k, v, here))
        window = self.config.window
        if state.k.shape[1] == 0:
            y = self._attend_from_start(q, k, v, layout)
        elif window is not None and q.shape[1] > 1:
            y = self._band(q, k, v, state, layout)
        else:
            y = self.attend(q, after.k, after.v, self._visible(here, after.position))
        return y, after if window is None else _latest(after, window - 1)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, **_: Any
    ) -> tuple[Tensor, SoftmaxState]:
        """One token against the cache, weight by weight: the reference of `extend`."""
        here = _seen(state)[:, None]
        after = append(state, SoftmaxState(k, v, here))
        y = self.weigh(self.scores(q, after.k), self._visible(here, after.position)[:, :, None], after.v)
        y = y.to(v.dtype)
        return y, after if self.config.window is None else _latest(after, self.config.window - 1)

    def _cross_attend(self, q: Tensor, memory: TokenMemory, layout: Layout) -> Tensor:
        real = None if checks.readable(memory.real) and bool(memory.real.all()) else memory.real
        if q.shape[1] > 1:
            return self.attend_all(q, memory.k, memory.v, real)
        return self.attend(q, memory.k, memory.v, None if real is None else real[:, None])

    def _visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Return which keys [b s] a query [b t] may see, by their positions -> [b t s]."""
        distance = query[:, :, None] - key[:, None]
        visible = (distance >= 0) & (key >= 0)[:, None]
        return visible if self.config.window is None else visible & (distance < self.config.window)

    def _attend_from_start(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """y [b t h e] of tokens that nothing precedes."""
        window, left = self.config.window, layout.left_align()
        if left is not None:  # padding after the real tokens is later than all of them
            q, k, v = (left.gather(x) for x in (q, k, v))
        # `torch.jit.trace` would apply what it records for a short input to long ones.
        if window is None or (window >= layout.time and not torch.jit.is_tracing()):  # pyright: ignore (not exported)
            y = self.attend(q, k, v, None, causal=True)
        else:
            y = banded_attention(q, k, v, before=window - 1, after=0, **self.weighing()).o.to(v.dtype)
        return y if left is None else left.restore(y)

    def _band(self, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, layout: Layout) -> Tensor:
        """y [b t h e] of tokens after `state`, each from the window before it."""
        left = layout.left_align()
        if left is not None:
            q, k, v = (left.gather(x) for x in (q, k, v))
        # A cache has its padding in front, aligned tokens have theirs at the end, where no real one looks.
        new = SoftmaxState(k, v, state.position.new_zeros(k.shape[:2]))
        k, v, position = append(state, new)
        band = {"before": self.config.window - 1, "after": 0, "visible": position >= 0}
        o = banded_attention(q, k, v, **band, **self.weighing()).o.to(v.dtype)
        return o if left is None else left.restore(o)


def _seen(state: SoftmaxState) -> Tensor:
    """Return how many real tokens came before [b]."""
    if state.position.shape[1] == 0:
        return state.position.new_zeros(state.position.shape[0])
    return state.position.amax(1) + 1


def _latest(state: SoftmaxState, count: int) -> SoftmaxState:
    """The last `count` real tokens of each sample; padding goes first."""
    order = put_last(state.position >= 0)[:, max(0, state.position.shape[1] - count) :]
    return SoftmaxState(*(take(x, order) for x in state))

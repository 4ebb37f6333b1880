"""Softmax attention: Vaswani et al. 2017, arXiv:1706.03762, equation 1. The baseline.

    y_i = sum_j exp(scale q_i . k_j) v_j / sum_j exp(scale q_i . k_j)

over the keys a query may see, through PyTorch's scaled_dot_product_attention. Generation keeps every key and
value: a state that grows by d + e numbers a token and key-value head. With `window`, a query sees the last
`window` real tokens up to its own and the state stops growing.

Cost of t tokens: t^2 (d + e) multiplications and additions a head, with a window t (window + 64) (d + e) at
most. Without a window, padding is passed as t s booleans a sample.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lintra import fields
from lintra.attention._base import Attention, Capabilities, zero_padding
from lintra.ops import _check
from lintra.ops.banded import banded_attention
from lintra.ops.padding import RealFirst, take
from lintra.ops.positions import Rotation, token_positions


@dataclass(frozen=True, kw_only=True)
class Config:
    """Softmax attention."""

    window: int | None = None  # tokens a query sees, its own included; None: all
    scale: float | None = None  # multiplies the scores; no unit; None: (size of a head) ** -0.5
    dropout: float = 0.0  # probability of dropping a weight in training

    def __post_init__(self):
        fields.check(self)
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite, got {self.scale}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    def build(self, **shape) -> "SoftmaxAttention":
        return SoftmaxAttention(self, **shape)


class SoftmaxState(NamedTuple):
    """The cache: k [b s g d], v [b s g e] in the dtype they came in, position [b s], -1 where padded.

    Copies are kept, no sums: the activations' own dtype loses nothing.
    """

    k: Tensor
    v: Tensor
    position: Tensor


class SoftmaxMemory(NamedTuple):
    """What cross-attention keeps: k [b s g d], v [b s g e], real [b s]."""

    k: Tensor
    v: Tensor
    real: Tensor


class SoftmaxAttention(Attention):
    """Softmax attention. State: the keys and values so far."""

    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    can = Capabilities(
        causal=True, bidirectional=True, cross=True, recurrent=True, state="grows", cost="O(t^2 d)"
    )

    def __init__(self, config: Config, **shape):
        if config.window is not None:
            self.can = replace(self.can, bidirectional=False, cross=False, state="window", cost="O(t w d)")
        super().__init__(config, **shape)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, rotate: Rotation | None = None
    ) -> Tensor:
        if self.causal:
            return super().forward(q, k, v, mask=mask, rotate=rotate)
        q, k, v = self._enter(q, k, v, mask, rotate)
        y = self._attend(q, k, v, None if mask is None else mask[:, None])
        return zero_padding(mask, y)[0]

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SoftmaxState:
        return SoftmaxState(
            torch.empty(batch, 0, self.kv_heads, self.dim, device=device, dtype=dtype),
            torch.empty(batch, 0, self.kv_heads, self.value_dim, device=device, dtype=dtype),
            torch.empty(batch, 0, device=device, dtype=torch.int64),
        )

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SoftmaxState,
        *,
        mask: Tensor | None = None,
        rotate: Rotation | None = None,
    ) -> tuple[Tensor, SoftmaxState]:
        self.check_causal()
        q, k, v = self._enter(q, k, v, mask, rotate)
        self._check_state(state, k, v)
        here = token_positions(_seen(state), q.shape[1], mask)
        after = _append(state, SoftmaxState(k, v, here))
        window = self.config.window
        fresh = state.k.shape[1] == 0
        if fresh and mask is None and (window is None or window >= q.shape[1]):
            y = self._attend(q, k, v, None, causal=True)
        elif window is not None and q.shape[1] > 1:
            y = self._band(q, k, v, state, mask)
        else:
            y = zero_padding(mask, self._attend(q, after.k, after.v, self._visible(here, after.position)))[0]
        return y, after if window is None else _latest(after, window - 1)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, *, rotate: Rotation | None = None
    ) -> tuple[Tensor, SoftmaxState]:
        """One token against the cache, weight by weight: the reference of `extend`."""
        self.check_step(q, k, v)
        q, k, v = self._enter(q, k, v, None, rotate)
        here = token_positions(_seen(state), 1, None)
        after = _append(state, SoftmaxState(k, v, here))
        group = self.heads // self.kv_heads
        scale = self.dim**-0.5 if self.config.scale is None else self.config.scale
        scores = scale * torch.einsum("bthd,bshd->bths", q, after.k.repeat_interleave(group, 2))
        scores = scores.masked_fill(~self._visible(here, after.position)[:, :, None], -torch.inf)
        y = torch.einsum("bths,bshe->bthe", scores.softmax(-1), after.v.repeat_interleave(group, 2))
        return y, after if self.config.window is None else _latest(after, self.config.window - 1)

    def remember(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> SoftmaxMemory:
        self.check_cross()
        self.check(None, k, v, mask)
        k, v = zero_padding(mask, k, v)
        return SoftmaxMemory(k, v, k.new_ones(k.shape[:2], dtype=torch.bool) if mask is None else mask)

    def read(self, q: Tensor, memory: SoftmaxMemory, mask: Tensor | None = None) -> Tensor:
        self.check_cross()
        if not isinstance(memory, SoftmaxMemory):
            raise TypeError(f"memory must be a SoftmaxMemory, from remember, got {type(memory).__name__}")
        self.check_query(q, memory.k.shape[0], mask)
        _check.alike("q", q, "the memory", memory.k)
        (q,) = zero_padding(mask, q)
        return zero_padding(mask, self._attend(q, memory.k, memory.v, memory.real[:, None]))[0]

    def _enter(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rotate: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Checked, padding zeroed, turned."""
        self.check(q, k, v, mask)
        q, k, v = zero_padding(mask, q, k, v)
        return (q, k, v) if rotate is None else (rotate(q), rotate(k), v)

    def _check_state(self, state: SoftmaxState, k: Tensor, v: Tensor) -> None:
        if not isinstance(state, SoftmaxState):
            raise TypeError(f"state must be a SoftmaxState, got {type(state).__name__}")
        sizes = {"b": k.shape[0], "g": self.kv_heads, "d": self.dim, "e": self.value_dim}
        _check.shape("state.k", state.k, "b s g d", sizes)
        _check.shape("state.v", state.v, "b s g e", sizes)
        _check.shape("state.position", state.position, "b s", sizes)
        if state.k.shape[1]:
            _check.alike("state.k", state.k, "k", k)
            _check.alike("state.v", state.v, "v", v)

    def _visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Which keys [b s] a query [b t] may see, by their positions -> [b t s]."""
        distance = query[:, :, None] - key[:, None]
        visible = (distance >= 0) & (key >= 0)[:, None]
        return visible if self.config.window is None else visible & (distance < self.config.window)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool = False
    ) -> Tensor:
        """y [b t h e]; 0 in a row of `visible` [b t s] or [b 1 s] that is all False."""
        if q.numel() == 0 or k.numel() == 0:
            return v.new_zeros(*q.shape[:3], v.shape[3])
        blind = None
        if visible is not None:
            visible = visible[:, None]
            blind = ~visible.any(-1, keepdim=True)
            # A softmax over nothing is NaN: a blind row sees everything and its result is dropped.
            visible = visible | blind
        y = functional.scaled_dot_product_attention(
            q.movedim(1, 2),
            k.movedim(1, 2),
            v.movedim(1, 2),
            attn_mask=visible,
            is_causal=causal,
            dropout_p=self.config.dropout if self.training else 0.0,
            scale=self.config.scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        return (y if blind is None else y.masked_fill(blind, 0.0)).movedim(1, 2)

    def _band(self, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, mask: Tensor | None) -> Tensor:
        """y [b t h e] of tokens after `state`, each from the window before it."""
        packed = None if mask is None else RealFirst.of(mask)
        if packed is not None:
            q, k, v = (packed.gather(x) for x in (q, k, v))
        # A cache has its padding in front, packed tokens have theirs behind, where no real one looks.
        new = SoftmaxState(k, v, state.position.new_zeros(k.shape[:2]))
        k, v, position = _append(state, new)
        o = banded_attention(
            q,
            k,
            v,
            before=self.config.window - 1,
            after=0,
            visible=position >= 0,
            scale=self.config.scale,
            dropout=self.config.dropout if self.training else 0.0,
        ).o.to(v.dtype)
        return o if packed is None else packed.restore(o)


def _seen(state: SoftmaxState) -> Tensor:
    """How many real tokens came before [b]."""
    if state.position.shape[1] == 0:
        return state.position.new_zeros(state.position.shape[0])
    return state.position.amax(1) + 1


def _append(state: SoftmaxState, new: SoftmaxState) -> SoftmaxState:
    """The cache with new tokens. An empty one takes the dtype of its first tokens, which autocast decides."""
    if state.k.shape[1] == 0:
        return SoftmaxState(new.k.contiguous(), new.v.contiguous(), new.position)
    return SoftmaxState(*(torch.cat(pair, 1) for pair in zip(state, new, strict=True)))


def _latest(state: SoftmaxState, count: int) -> SoftmaxState:
    """The last `count` real tokens of each sample; padding goes first."""
    order = state.position.argsort(dim=1, stable=True)[:, max(0, state.position.shape[1] - count) :]
    return SoftmaxState(*(take(x, order) for x in state))

"""Softmax attention: Vaswani et al. 2017, arXiv:1706.03762, equation 1. The baseline.

    y_i = sum_j exp(scale q_i . k_j) v_j / sum_j exp(scale q_i . k_j)

over the keys a query may see, through PyTorch's scaled_dot_product_attention. Generation keeps every key and
value: a state that grows by d + e numbers a token and key-value head. With `window`, a query sees the last
`window` real tokens up to its own and the state stops growing.

Cost of t tokens: t^2 (d + e) multiplications and additions a head, with a window t (window + 64) (d + e) at
most. Without a window, padding is passed as t s booleans a sample.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lintra import fields
from lintra.attention._scores import ScoredAttention, TokenMemory
from lintra.attention._state import append
from lintra.attention.base import Capabilities
from lintra.ops import checks
from lintra.ops.banded import banded_attention
from lintra.ops.packed import Bounds
from lintra.ops.padding import LeftAlign, put_last, take, zero_padding
from lintra.ops.rope import RotaryEmbedding, token_positions
from lintra.ops.softmax_attention import fused_attention


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

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> Tensor:
        if self.causal:
            return super().forward(q, k, v, mask=mask, rope=rope)
        q, k, v = self.prepare(q, k, v, mask, rope)
        y = self._attend(q, k, v, None if mask is None else mask[:, None])
        return zero_padding(mask, y)[0]

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SoftmaxState:
        return SoftmaxState(
            *self.no_tokens(batch, device, dtype),
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
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, SoftmaxState]:
        self.check_causal()
        q, k, v = self.prepare(q, k, v, mask, rope)
        letters = ("b s g d", "b s g e", "b s")
        checks.cache("state", state, SoftmaxState, letters, self.sizes(k.shape[0]), k=k, v=v)
        here = token_positions(_seen(state), q.shape[1], mask)
        after = append(state, SoftmaxState(k, v, here))
        window = self.config.window
        fresh = state.k.shape[1] == 0
        if fresh and mask is None and (window is None or window >= q.shape[1]):
            y = self._attend(q, k, v, None, causal=True)
        elif window is not None and q.shape[1] > 1:
            y = self._band(q, k, v, state, mask)
        else:
            y = zero_padding(mask, self._attend(q, after.k, after.v, self._visible(here, after.position)))[0]
        return y, after if window is None else _latest(after, window - 1)

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Bounds, *, rope: RotaryEmbedding | None = None
    ) -> Tensor:
        """Padded in groups of similar length, at most four times the scores there are; with a mask of blocks
        on the row they would be t t, and a NaN would pass from one sequence to another. Causal, no token sees
        the padding behind it: no mask is made of it and a window needs no reordering."""
        row = self.check_packed(q, k, v, cu_seqlens)
        q, k, v = self.prepare(q, k, v, None, rope)

        def padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            window = self.config.window
            if window is not None and window < q.shape[1]:
                return self._band(q, k, v, self.start(q.shape[0], device=q.device, dtype=q.dtype), None)
            visible = None if mask is None or self.causal else mask[:, None]
            return self._attend(q, k, v, visible, causal=self.causal)

        return row.alike().each(padded, q=q, k=k, v=v)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, *, rope: RotaryEmbedding | None = None
    ) -> tuple[Tensor, SoftmaxState]:
        """One token against the cache, weight by weight: the reference of `extend`."""
        self.check_step(q, k, v, state)
        q, k, v = self.prepare(q, k, v, None, rope)
        here = token_positions(_seen(state), 1, None)
        after = append(state, SoftmaxState(k, v, here))
        scores = self.scale * torch.einsum("bthd,bshd->bths", q, after.k.repeat_interleave(self.group, 2))
        scores = scores.masked_fill(~self._visible(here, after.position)[:, :, None], -torch.inf)
        y = torch.einsum("bths,bshe->bthe", scores.softmax(-1), after.v.repeat_interleave(self.group, 2))
        return y, after if self.config.window is None else _latest(after, self.config.window - 1)

    def encode_memory(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> TokenMemory:
        return self.store_tokens(k, v, mask)

    def cross_attend(self, q: Tensor, memory: TokenMemory, mask: Tensor | None = None) -> Tensor:
        self.check_cross_attend(q, memory, TokenMemory, mask)
        (q,) = zero_padding(mask, q)
        return zero_padding(mask, self._attend(q, memory.k, memory.v, memory.real[:, None]))[0]

    def _visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Which keys [b s] a query [b t] may see, by their positions -> [b t s]."""
        distance = query[:, :, None] - key[:, None]
        visible = (distance >= 0) & (key >= 0)[:, None]
        return visible if self.config.window is None else visible & (distance < self.config.window)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool = False
    ) -> Tensor:
        """y [b t h e]; 0 in a row of `visible` [b t s] or [b 1 s] that is all False."""
        y = fused_attention(
            *(x.movedim(1, 2) for x in (q, k, v)),
            visible=None if visible is None else visible[:, None],
            causal=causal,
            **self.weighing(),
        )
        return y.movedim(1, 2)

    def _band(self, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, mask: Tensor | None) -> Tensor:
        """y [b t h e] of tokens after `state`, each from the window before it."""
        packed = None if mask is None else LeftAlign.of(mask)
        if packed is not None:
            q, k, v = (packed.gather(x) for x in (q, k, v))
        # A cache has its padding in front, packed tokens have theirs behind, where no real one looks.
        new = SoftmaxState(k, v, state.position.new_zeros(k.shape[:2]))
        k, v, position = append(state, new)
        o = banded_attention(
            q,
            k,
            v,
            before=self.config.window - 1,
            after=0,
            visible=position >= 0,
            **self.weighing(),
        ).o.to(v.dtype)
        return o if packed is None else packed.restore(o)


def _seen(state: SoftmaxState) -> Tensor:
    """How many real tokens came before [b]."""
    if state.position.shape[1] == 0:
        return state.position.new_zeros(state.position.shape[0])
    return state.position.amax(1) + 1


def _latest(state: SoftmaxState, count: int) -> SoftmaxState:
    """The last `count` real tokens of each sample; padding goes first."""
    order = put_last(state.position >= 0)[:, max(0, state.position.shape[1] - count) :]
    return SoftmaxState(*(take(x, order) for x in state))

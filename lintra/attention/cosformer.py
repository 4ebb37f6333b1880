"""cosFormer: Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention", arXiv:2202.08791.

The weight of key j for query i is never negative and falls with the distance of their positions:

    relu(q_i) . relu(k_j) cos(pi (i - j) / 2 L)

The cosine of a difference is a sum of two products, which makes this linear attention over twice as many
features, relu(x) sin(pi i / 2 L) and relu(x) cos(pi i / 2 L). L is `max_length`, a constant: with the length
of the sequence at hand in its place, each further token would change the weights of all others.

Cost of t tokens: 4 t d e multiplications and additions a head, 4 d e a token to generate; the state holds
2 d (e + 1) numbers and a position whatever the length.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lintra import ops
from lintra.attention._kernel import KernelAttention
from lintra.attention._state import read
from lintra.attention.base import Capabilities, Exchange
from lintra.config import fields
from lintra.ops import LinearState, checks
from lintra.ops.checks import sum_dtype
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import Impl, divide


@dataclass(frozen=True, kw_only=True)
class Config:
    """cosFormer."""

    max_length: int = 4096  # L, tokens: at this distance weights are 0; no sequence may be longer
    eps: float = 1e-6  # added to the denominator; no unit
    chunk: int = 64  # tokens per block of the parallel form; changes speed, not the result
    impl: Impl = "auto"  # which implementation of the sum

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, max_length=1, chunk=1)
        fields.not_negative(self, "eps")

    def build(self, **shape) -> "Cosformer":
        return Cosformer(self, **shape)


class CosformerState(NamedTuple):
    """kv [b g f e] and z [b g f] with f = 2 d; seen [b], real tokens so far. Cross-attention
    keeps that too."""

    kv: Tensor
    z: Tensor
    seen: Tensor


class Cosformer(KernelAttention):
    """cosFormer. State: kv [b g f e], z [b g f] and the number of tokens seen [b]."""

    paper = "Qin et al. 2022, arXiv:2202.08791"
    memory = CosformerState
    supports_bf16_state = True
    can = Capabilities(
        causal=True,
        bidirectional=True,
        cross=True,
        recurrent=True,
        state="constant",
        cost="O(t d^2)",
        placed_queries=True,
    )

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        self.features, self.rope_dim = 2 * self.dim, 0

    def exchange(self) -> Exchange:
        return "scan"

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> CosformerState:
        sizes = (batch, self.kv_heads, self.features, self.value_dim)
        sums = LinearState.empty(*sizes, device=device, dtype=dtype)
        return CosformerState(*sums, torch.zeros(batch, device=device, dtype=torch.int64))

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: CosformerState, **_: Any
    ) -> tuple[Tensor, CosformerState]:
        """The recurrence of linear attention over the features, written out: the reference of `extend`."""
        here = self._positions(Layout(q.shape[0], 1, q.device, seen=state.seen))
        q, k = (torch.relu(self._features(x, here)) for x in (q, k))
        v = self._within(v, here)
        kv = state.kv + torch.einsum("btgf,btge->bgfe", k, v.to(k.dtype))
        z = state.z + k[:, 0]
        y = read(q, kv)
        weight = torch.einsum("bthf,bhf->bth", q, z.repeat_interleave(self.group, 1))
        return divide(y, weight + self.config.eps).to(v.dtype), CosformerState(kv, z, state.seen + 1)

    def _cross_attend(self, q: Tensor, memory: CosformerState, layout: Layout) -> Tensor:
        """Queries stand at their own places, 0 first, as the memory's keys do."""
        here = self._positions(layout)
        none = Layout(q.shape[0], 0, q.device)
        return self._within(self._sum(q, *self._no_keys(q), memory, none, queries=here)[0], here)

    def _sum(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: CosformerState,
        layout: Layout,
        *,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, CosformerState]:
        """`queries` [b t]: the positions of q, if they are not those of k."""
        config = self.config
        here = self._positions(layout if layout.shard is not None else layout.after(state.seen))
        queries = here[:, : q.shape[1]] if queries is None else queries
        q, k = self._features(q, queries), self._features(k, here)
        y, (kv, z) = ops.linear_attention(
            q,
            k,
            self._within(v, here).to(q.dtype),
            state=LinearState(state.kv, state.z),
            layout=layout,
            causal=self.causal,
            eps=config.eps,
            feature_map="relu",
            chunk=config.chunk,
            impl=config.impl,
        )
        return y.to(v.dtype), CosformerState(kv, z, state.seen + layout.new)

    def _features(self, x: Tensor, here: Tensor) -> Tensor:
        """x [b t h d] at positions here [b t] -> [b t h 2d] in the dtype of the sums, before the relu: the
        factors of the positions are not negative."""
        dtype = sum_dtype(x.dtype)
        angle = here[..., None, None].to(dtype) * (0.5 * math.pi / self.config.max_length)
        x = x.to(dtype)
        return torch.cat((x * angle.sin(), x * angle.cos()), -1)

    def _within(self, x: Tensor, here: Tensor) -> Tensor:
        """x [b t h e], NaN beyond max_length: there `_positions` could not look at lengths."""
        if checks.readable(here):
            return x
        return x.masked_fill((here >= self.config.max_length)[..., None, None], math.nan)

    def _positions(self, layout: Layout) -> Tensor:
        """Positions [b t]; -1 where padded. ValueError beyond max_length where lengths may be read."""
        longest = layout.time if layout.mask is None and layout.seen is None else 0
        if checks.readable(layout.seen, layout.mask) and layout.n:
            total = layout.new if layout.seen is None else layout.seen + layout.new
            longest = int(total.max()) if isinstance(total, Tensor) else total
        if longest > self.config.max_length:
            raise ValueError(f"a sequence may have max_length={self.config.max_length} tokens, got {longest}")
        return layout.positions()

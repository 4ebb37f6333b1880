"""cosFormer: Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention", arXiv:2202.08791.

The weight of key j for query i is never negative and falls with the distance of their positions:

    relu(q_i) . relu(k_j) cos(pi (i - j) / 2 L)

The cosine of a difference is a sum of two products, which makes this linear attention over twice as many
features, relu(x) sin(pi i / 2 L) and relu(x) cos(pi i / 2 L). L is `max_length`, a constant: with the length
of the sequence at hand in its place, each further token would change the weights of all others.

Cost of t tokens: 4 t d e multiplications and additions a head, 2 d e a token to generate; the state holds
2 d (e + 1) numbers and a position whatever the length.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lintra import fields, ops
from lintra.attention._kernel import KernelAttention
from lintra.attention.base import Capabilities
from lintra.ops import LinearState, checks
from lintra.ops.autocast import no_autocast
from lintra.ops.checks import sum_dtype
from lintra.ops.linear_attention import Impl, divide
from lintra.ops.padding import zero_padding
from lintra.ops.rope import RotaryEmbedding, token_positions


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
    keeps = CosformerState, ("b g f e", "b g f", "b")
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

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> CosformerState:
        sizes = (batch, self.kv_heads, self.features, self.value_dim)
        sums = LinearState.empty(*sizes, device=device, dtype=dtype)
        return CosformerState(*sums, torch.zeros(batch, device=device, dtype=torch.int64))

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: CosformerState, *, rope: RotaryEmbedding | None = None
    ) -> tuple[Tensor, CosformerState]:
        """The recurrence of linear attention over the features, written out: the reference of `extend`."""
        self.check_step(q, k, v, state)
        self.check_rope(rope)
        here = self._positions(state.seen, 1, None)
        q, k = (torch.relu(self._features(x, here)) for x in (q, k))
        with no_autocast(q):
            kv = state.kv + torch.einsum("btgf,btge->bgfe", k, v.to(k.dtype))
            z = state.z + k[:, 0]
            y = torch.einsum("bthf,bhfe->bthe", q, kv.repeat_interleave(self.group, 1))
            weight = torch.einsum("bthf,bhf->bth", q, z.repeat_interleave(self.group, 1))
        return divide(y, weight + self.config.eps).to(v.dtype), CosformerState(kv, z, state.seen + 1)

    def cross_attend(self, q: Tensor, memory: CosformerState, mask: Tensor | None = None) -> Tensor:
        """Queries stand at their own places, 0 first, as the memory's keys do."""
        self.check_cross_attend(q, memory, CosformerState, mask)
        here = self._positions(torch.zeros_like(memory.seen), q.shape[1], mask)
        (q,) = zero_padding(mask, q)
        k, v = self.no_keys(q)
        y, _ = self._sum(q, k, v, memory, None, None, here)
        return zero_padding(mask, self._within(y, here))[0]

    def _sum(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: CosformerState,
        mask: Tensor | None,
        rope: RotaryEmbedding | None,
        queries: Tensor | None = None,
    ) -> tuple[Tensor, CosformerState]:
        """`queries` [b t]: the positions of q, if they are not those of k."""
        config = self.config
        here = self._positions(state.seen, k.shape[1], mask)
        queries = here[:, : q.shape[1]] if queries is None else queries
        (k,) = zero_padding(mask, k)
        (q,) = zero_padding(mask if self.causal else None, q)
        with no_autocast(k):  # positions keep their digits
            q, k = self._features(q, queries), self._features(k, here)
            y, (kv, z) = ops.linear_attention(
                q,
                k,
                self._within(v, here).to(q.dtype),
                state=LinearState(state.kv, state.z),
                mask=mask,
                causal=self.causal,
                eps=config.eps,
                feature_map="relu",
                chunk=config.chunk,
                impl=config.impl,
            )
        seen = state.seen + (k.shape[1] if mask is None else mask.sum(1))
        return y.to(v.dtype), CosformerState(kv, z, seen)

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

    def _positions(self, seen: Tensor, time: int, mask: Tensor | None) -> Tensor:
        """Of `time` tokens after `seen` [b] earlier ones; -1 where padded. ValueError beyond max_length
        where lengths may be read.
        """
        longest = time if mask is None else 0
        if checks.readable(seen, mask) and seen.numel():
            longest = int((seen + (time if mask is None else mask.sum(1))).max())
        if longest > self.config.max_length:
            raise ValueError(f"a sequence may have max_length={self.config.max_length} tokens, got {longest}")
        return token_positions(seen, time, mask)

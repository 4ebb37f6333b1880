"""Attention free transformers: no query meets a key, each channel of it gates a mean of the values."""

import torch
from torch import Tensor, nn

from lintra.attention import aft
from lintra.compat.fast_transformers._inner import EVENTS, InnerAttention, MaskedAttention, Real, pairs
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry, Int, Optional
from lintra.compat.fast_transformers.events import EventDispatcher


class AFTFullAttention(MaskedAttention):
    """A mean for each query, weighted by softmax over s of k_s w_ts with w = u v^T learned; any mask.

    The paper adds w_ts to k_s, the library multiplies, and weights trained with it mean that: lintra's own
    mechanism, `lintra.attention.aft`, is the paper's, in memory linear in the length. Here it is l s h e
    numbers. ValueError for more than `max_sequence_length` queries or keys.
    """

    def __init__(
        self,
        max_sequence_length: int = 1024,
        aft_parameterization: int = 64,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(event_dispatcher)
        self.u = nn.Parameter(0.01 * torch.randn(max_sequence_length, aft_parameterization))
        self.v = nn.Parameter(0.01 * torch.randn(max_sequence_length, aft_parameterization))

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real: Real) -> Tensor:
        time, keys = q.shape[1], k.shape[1]
        if max(time, keys) > len(self.u):
            raise ValueError(
                f"aft-full has weights for max_sequence_length={len(self.u)} tokens, got {time} queries and "
                f"{keys} keys"
            )
        if q.shape != (*q.shape[:3], v.shape[3]):
            raise ValueError(f"aft gates values by queries: got {q.shape[3]} and {v.shape[3]} numbers a head")
        visible = pairs(visible, real.k, q, k).movedim(1, 3)[..., None]  # [n l s h e]
        bias = self.u[:time] @ self.v[:keys].mT
        scores = (k[:, None] * bias[:, :, None, None]).masked_fill(~visible, -torch.inf)
        blind = ~visible.any(2, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(2).masked_fill(blind, 0.0)
        return q.sigmoid() * torch.einsum("nlshe,nshe->nlhe", weights, v)


class AFTSimpleAttention(InnerAttention):
    """A mean weighted by exp(k_s), over all real keys or those up to a query's own place."""

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        return self._read(self._mechanism(aft.Config, q, v, causal=False), q, k, v, real)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        if real.k is not None:  # a padded key has no weight, the query at its place may be real
            k = k.masked_fill(~real.k[..., None, None], torch.finfo(k.dtype).min)
        return self._mechanism(aft.Config, q, v, causal=True)(q, k, v)

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real: Real) -> Tensor:
        raise ValueError(
            "aft-simple has no weights of pairs and cannot honour an arbitrary attn_mask: aft-full"
        )


AttentionRegistry.register(
    "aft-full",
    AFTFullAttention,
    [
        ("max_sequence_length", Optional(Int, 1024)),
        ("aft_parameterization", Optional(Int, 64)),
        *EVENTS,
    ],
)
AttentionRegistry.register("aft-simple", AFTSimpleAttention, EVENTS)

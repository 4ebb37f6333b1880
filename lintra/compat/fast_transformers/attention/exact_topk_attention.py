"""Softmax over the topk keys with the largest scores: an oracle, as costly as softmax."""

import torch
from torch import Tensor
from torch.nn import functional

from lintra.compat.fast_transformers._inner import SOFTMAX, MaskedAttention, Real, ScoredInnerAttention, pairs
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry, Int, Optional
from lintra.compat.fast_transformers.events import EventDispatcher


class ExactTopKAttention(MaskedAttention, ScoredInnerAttention):
    """Every query sees, of the keys it may see, the `topk` with the largest scores; any mask."""

    def __init__(
        self,
        topk: int = 32,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(softmax_temp, attention_dropout, event_dispatcher)
        if topk < 1:
            raise ValueError(f"topk must be at least 1 key, got {topk}")
        self.topk = topk

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real: Real) -> Tensor:
        options = self._weighing()
        visible = pairs(visible, real.k, q, k)
        q, k, v = (x.movedim(1, 2) for x in (q * (options["scale"] or q.shape[3] ** -0.5), k, v))
        scores = (q @ k.mT).masked_fill(~visible, -torch.inf)
        best = scores.topk(min(self.topk, k.shape[2]), -1, sorted=False)
        blind = best.values.amax(-1, keepdim=True) == -torch.inf
        weights = best.values.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        weights = functional.dropout(weights, options["dropout"])
        return (weights.new_zeros(scores.shape).scatter(-1, best.indices, weights) @ v).movedim(1, 2)


AttentionRegistry.register("exact-topk", ExactTopKAttention, [("topk", Optional(Int, 32)), *SOFTMAX])

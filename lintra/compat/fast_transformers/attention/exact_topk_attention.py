"""Softmax over the topk keys with the largest scores: an oracle, as costly as softmax."""

import torch
from torch import Tensor

from lintra.compat.fast_transformers._inner import SOFTMAX, MaskedAttention, Real, ScoredInnerAttention, pairs
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry, Int, Optional
from lintra.compat.fast_transformers.events import EventDispatcher
from lintra.ops.autocast import no_autocast
from lintra.ops.checks import sum_dtype


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
        visible, dtype = pairs(visible, real.k, q, k), sum_dtype(q.dtype)
        scale = self._weighing()["scale"] or q.shape[3] ** -0.5
        q, k, v = (x.movedim(1, 2) for x in (q, k, v))
        with no_autocast(q):
            scores = (q.to(dtype) @ k.to(dtype).mT).masked_fill(~visible, -torch.inf)
        # Chosen before scaling, so that a temperature below 0 does not make the smallest the largest.
        best = scores.topk(min(self.topk, k.shape[2]), -1, sorted=False)
        weights = self._softmax(scale * best.values, best.values > -torch.inf)
        weights = weights.new_zeros(scores.shape).scatter(-1, best.indices, weights)
        return (weights.to(v.dtype) @ v).movedim(1, 2)


AttentionRegistry.register("exact-topk", ExactTopKAttention, [("topk", Optional(Int, 32)), *SOFTMAX])

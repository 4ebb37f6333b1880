"""Softmax over the topk keys with the largest scores: an oracle, as costly as softmax."""

import torch
from torch import Tensor

from lintra.compat.fast_transformers._inner import SOFTMAX, MaskedAttention, Real, ScoredInnerAttention, pairs
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry, Int, Optional
from lintra.compat.fast_transformers.events import EventDispatcher
from lintra.ops.softmax_attention import fused_attention


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
        visible = pairs(visible, real.k, q, k)
        with torch.no_grad():
            scores = torch.einsum("nlhe,nshe->nhls", q, k).masked_fill(~visible, -torch.inf)
            best = scores.topk(min(self.topk, k.shape[1]), -1, sorted=False).indices
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & visible
        by_head = (x.movedim(1, 2) for x in (q, k, v))
        return fused_attention(*by_head, visible=chosen, **self._weighing()).movedim(1, 2)


AttentionRegistry.register("exact-topk", ExactTopKAttention, [("topk", Optional(Int, 32)), *SOFTMAX])

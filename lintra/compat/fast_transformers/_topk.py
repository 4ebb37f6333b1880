"""Softmax over the topk keys with the largest scores: an oracle, as costly as softmax."""

import torch
from torch import Tensor

from lintra.compat.fast_transformers.attention import FullAttention


class ExactTopKAttention(FullAttention):
    """Every query sees, of the keys it may see, the `topk` with the largest scores; any mask."""

    def __init__(
        self,
        topk: int = 32,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str = "",
    ):
        super().__init__(softmax_temp, attention_dropout, event_dispatcher)
        if topk < 1:
            raise ValueError(f"topk must be at least 1 key, got {topk}")
        self.topk = topk

    def bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None
    ) -> Tensor:
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        return self.masked(q, k, v, visible, real_k)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, real_k: Tensor | None) -> Tensor:
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
        return self.masked(q, k, v, visible, real_k)

    def over(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        scores = torch.einsum("blhd,bshd->bhls", q, k).detach().masked_fill(~visible, -torch.inf)
        best = scores.topk(min(self.topk, k.shape[1]), -1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        return super().over(q, k, v, chosen & visible)

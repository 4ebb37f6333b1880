"""Improved clustered attention."""

from typing import Any

from lintra.compat.fast_transformers._inner import CLUSTERED, SOFTMAX
from lintra.compat.fast_transformers.attention.clustered_attention import ClusteredAttention
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry, Int, Optional
from lintra.compat.fast_transformers.events import EventDispatcher

IMPROVED = [*CLUSTERED, ("topk", Optional(Int, 32)), *SOFTMAX]


class ImprovedClusteredAttention(ClusteredAttention):
    """Clustered attention in which each query weighs the `topk` keys that matter most to its cluster."""

    def __init__(
        self,
        clusters: int,
        iterations: int = 10,
        bits: int = 32,
        hash_bias: bool = True,
        topk: int = 32,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(
            clusters, iterations, bits, hash_bias, softmax_temp, attention_dropout, event_dispatcher
        )
        self.topk = topk

    def _options(self) -> dict[str, Any]:
        return super()._options() | {"improved": True, "topk": self.topk}


AttentionRegistry.register("improved-clustered", ImprovedClusteredAttention, IMPROVED)

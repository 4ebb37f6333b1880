"""Clustered attention."""

from typing import Any

from torch import Tensor

from lintra.attention import clustered
from lintra.compat.fast_transformers._inner import CLUSTERED, SOFTMAX, Real, ScoredInnerAttention
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry
from lintra.compat.fast_transformers.events import EventDispatcher


class ClusteredAttention(ScoredInnerAttention):
    """Queries in clusters, a softmax for the mean of each."""

    def __init__(
        self,
        clusters: int,
        iterations: int = 10,
        bits: int = 32,
        hash_bias: bool = True,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(softmax_temp, attention_dropout, event_dispatcher)
        self.clusters, self.iterations, self.bits, self.hash_bias = clusters, iterations, bits, hash_bias

    def _options(self) -> dict[str, Any]:
        """Return the options of the mechanism's configuration."""
        hashes = {"bits": self.bits, "hash_bias": self.hash_bias}
        sizes = {"clusters": self.clusters, "iterations": self.iterations}
        return self._scores() | sizes | hashes | {"improved": False}

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        attention = self._mechanism(clustered.Config, q, v, causal=False, **self._options())
        return self._read(attention, q, k, v, real)


AttentionRegistry.register("clustered", ClusteredAttention, [*CLUSTERED, *SOFTMAX])

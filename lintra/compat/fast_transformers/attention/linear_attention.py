"""Linear attention of every query to every real key."""

from torch import Tensor

from lintra.compat.fast_transformers._features import FEATURES, FeatureAttention
from lintra.compat.fast_transformers._inner import Real
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry


class LinearAttention(FeatureAttention):
    """Linear attention in which every query sees every real key."""

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        return self._sum(q, k, v, real)


AttentionRegistry.register("linear", LinearAttention, FEATURES)

"""Linear attention of every query to the real keys up to its own place."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from lintra import ops
from lintra.compat.fast_transformers._features import FEATURES, FeatureAttention, by_position_only
from lintra.compat.fast_transformers._inner import real
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry
from lintra.compat.fast_transformers.events import EventDispatcher
from lintra.compat.fast_transformers.masking import BaseMask, FullMask
from lintra.ops.padding import real_tokens


def causal_linear(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Sums v_s (k_s . q_t) over s <= t, without a denominator.

    Features Q and K [n l h f], values V [n l h d] -> [n l h d], contiguous.
    """
    return ops.linear_attention(Q, K, V, normalize=False)[0].contiguous()


class CausalLinearAttention(FeatureAttention):
    """Linear attention in which every query sees the real keys up to its own place.

    Of more keys than queries those behind the last query are not seen; of more queries than keys the last
    ones see all keys. Raises ValueError for a feature map that looks at other tokens.
    """

    def __init__(
        self,
        query_dimensions: int,
        feature_map: Callable[[int], nn.Module] | None = None,
        eps: float = 1e-6,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(query_dimensions, feature_map, eps, event_dispatcher)
        by_position_only(self.feature_map)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask | None = None,
        query_lengths: BaseMask | None = None,
        key_lengths: BaseMask | None = None,
    ) -> Tensor:
        more = queries.shape[1] - keys.shape[1]
        if more:
            seen = real_tokens(real(key_lengths, keys), keys)
            key_lengths = FullMask(functional.pad(seen, (0, more)))
            keys, values = (functional.pad(x, (0, 0, 0, 0, 0, more)) for x in (keys, values))
        return super().forward(queries, keys, values, attn_mask, query_lengths, key_lengths)

    def _bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None
    ) -> Tensor:
        if q.shape[1] == 1:  # the only mask that is both
            return self._causal(q, k, v, real_q, real_k)
        return super()._bidirectional(q, k, v, real_q, real_k)

    def _causal(
        self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None
    ) -> Tensor:
        return self._sum(q, k, v, real_q, real_k, causal=True)


AttentionRegistry.register("causal-linear", CausalLinearAttention, FEATURES)

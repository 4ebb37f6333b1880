"""Linear attention of every query to the real keys up to its own place."""

from torch import Tensor
from torch.nn import functional

from lintra import ops
from lintra.compat.fast_transformers._features import FEATURES, FeatureAttention
from lintra.compat.fast_transformers._inner import Real, token_mask
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry
from lintra.compat.fast_transformers.masking import BaseMask, FullMask
from lintra.ops.padding import real_tokens


def causal_linear(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Sums v_s (k_s . q_t) over s <= t, without a denominator.

    Features Q and K [n l h f], values V [n l h d] -> [n l h d], contiguous.
    """
    return ops.linear_attention(Q, K, V, normalize=False)[0].contiguous()


class CausalLinearAttention(FeatureAttention):
    """Linear attention in which every query sees the real keys up to its own place.

    With more keys than queries those after the last query are not seen; with more queries than keys the last
    ones see all keys. Raises ValueError for a feature map that looks at other tokens.
    """

    _past_only = True

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
            seen = real_tokens(token_mask(key_lengths, keys), keys)
            key_lengths = FullMask(functional.pad(seen, (0, more)))
            keys, values = (functional.pad(x, (0, 0, 0, 0, 0, more)) for x in (keys, values))
        return super().forward(queries, keys, values, attn_mask, query_lengths, key_lengths)

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        if q.shape[1] == 1:  # causal and bidirectional masks are then the same
            return self._causal(q, k, v, real)
        return super()._bidirectional(q, k, v, real)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        return self._sum(q, k, v, real)


AttentionRegistry.register("causal-linear", CausalLinearAttention, FEATURES)

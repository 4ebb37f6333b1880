"""Attention to another sequence: (query, keys, values, key_lengths, state) -> (y, state), query [n h e]."""

from lintra.compat.fast_transformers.recurrent.attention.cross_attention.attention_layer import (
    RecurrentCrossAttentionLayer,
)
from lintra.compat.fast_transformers.recurrent.attention.cross_attention.full_attention import (
    RecurrentCrossFullAttention,
)
from lintra.compat.fast_transformers.recurrent.attention.cross_attention.linear_attention import (
    RecurrentCrossLinearAttention,
)

__all__ = ["RecurrentCrossAttentionLayer", "RecurrentCrossFullAttention", "RecurrentCrossLinearAttention"]

"""Attention to what came before: (query, key, value, state) -> (y, state), query [n h e] of one token."""

from lintra.compat.fast_transformers.recurrent.attention.self_attention.attention_layer import (
    RecurrentAttentionLayer,
)
from lintra.compat.fast_transformers.recurrent.attention.self_attention.full_attention import (
    RecurrentFullAttention,
)
from lintra.compat.fast_transformers.recurrent.attention.self_attention.linear_attention import (
    RecurrentLinearAttention,
)

__all__ = ["RecurrentAttentionLayer", "RecurrentFullAttention", "RecurrentLinearAttention"]

"""Attention for one token at a time, to the tokens before it or to another sequence."""

from lintra.compat.fast_transformers.recurrent.attention.cross_attention.attention_layer import (
    RecurrentCrossAttentionLayer,
)
from lintra.compat.fast_transformers.recurrent.attention.cross_attention.full_attention import (
    RecurrentCrossFullAttention,
)
from lintra.compat.fast_transformers.recurrent.attention.cross_attention.linear_attention import (
    RecurrentCrossLinearAttention,
)
from lintra.compat.fast_transformers.recurrent.attention.self_attention.attention_layer import (
    RecurrentAttentionLayer,
)
from lintra.compat.fast_transformers.recurrent.attention.self_attention.full_attention import (
    RecurrentFullAttention,
)
from lintra.compat.fast_transformers.recurrent.attention.self_attention.linear_attention import (
    RecurrentLinearAttention,
)

__all__ = [
    "RecurrentAttentionLayer",
    "RecurrentCrossAttentionLayer",
    "RecurrentCrossFullAttention",
    "RecurrentCrossLinearAttention",
    "RecurrentFullAttention",
    "RecurrentLinearAttention",
]

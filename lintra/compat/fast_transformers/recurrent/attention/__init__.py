"""Attention for one token at a time, to the tokens before it or to another sequence."""

from lintra.compat.fast_transformers.recurrent.attention.cross_attention import (
    RecurrentCrossAttentionLayer,
    RecurrentCrossFullAttention,
    RecurrentCrossLinearAttention,
)
from lintra.compat.fast_transformers.recurrent.attention.self_attention import (
    RecurrentAttentionLayer,
    RecurrentFullAttention,
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

"""Attention by type: the layer that projects to heads, and inner attentions that call lintra's mechanisms."""

from lintra.compat.fast_transformers.attention.aft_attention import AFTFullAttention, AFTSimpleAttention
from lintra.compat.fast_transformers.attention.attention_layer import AttentionLayer
from lintra.compat.fast_transformers.attention.causal_linear_attention import CausalLinearAttention
from lintra.compat.fast_transformers.attention.clustered_attention import ClusteredAttention
from lintra.compat.fast_transformers.attention.conditional_full_attention import ConditionalFullAttention
from lintra.compat.fast_transformers.attention.exact_topk_attention import ExactTopKAttention
from lintra.compat.fast_transformers.attention.full_attention import FullAttention
from lintra.compat.fast_transformers.attention.improved_clustered_attention import ImprovedClusteredAttention
from lintra.compat.fast_transformers.attention.improved_clustered_causal_attention import (
    ImprovedClusteredCausalAttention,
)
from lintra.compat.fast_transformers.attention.linear_attention import LinearAttention
from lintra.compat.fast_transformers.attention.local_attention import LocalAttention
from lintra.compat.fast_transformers.attention.reformer_attention import ReformerAttention

__all__ = [
    "AFTFullAttention",
    "AFTSimpleAttention",
    "AttentionLayer",
    "CausalLinearAttention",
    "ClusteredAttention",
    "ConditionalFullAttention",
    "ExactTopKAttention",
    "FullAttention",
    "ImprovedClusteredAttention",
    "ImprovedClusteredCausalAttention",
    "LinearAttention",
    "LocalAttention",
    "ReformerAttention",
]

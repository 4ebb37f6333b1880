"""Builders: set attributes, then `get()`. What is set is checked against what the registered types take."""

from lintra.compat.fast_transformers import attention, recurrent  # noqa: F401 (their types register)
from lintra.compat.fast_transformers.builders.attention_builders import (
    AttentionBuilder,
    RecurrentAttentionBuilder,
    RecurrentCrossAttentionBuilder,
)
from lintra.compat.fast_transformers.builders.transformer_builders import (
    RecurrentDecoderBuilder,
    RecurrentEncoderBuilder,
    TransformerDecoderBuilder,
    TransformerEncoderBuilder,
)

__all__ = [
    "AttentionBuilder",
    "RecurrentAttentionBuilder",
    "RecurrentCrossAttentionBuilder",
    "RecurrentDecoderBuilder",
    "RecurrentEncoderBuilder",
    "TransformerDecoderBuilder",
    "TransformerEncoderBuilder",
]

"""Registry of attention types, in which the builders find them by name."""

from lintra.compat.fast_transformers.attention_registry.registry import (
    AttentionRegistry,
    RecurrentAttentionRegistry,
    RecurrentCrossAttentionRegistry,
)
from lintra.compat.fast_transformers.attention_registry.spec import (
    Bool,
    Callable,
    Choice,
    EventDispatcherInstance,
    Float,
    Int,
    Optional,
    Spec,
)

__all__ = [
    "AttentionRegistry",
    "Bool",
    "Callable",
    "Choice",
    "EventDispatcherInstance",
    "Float",
    "Int",
    "Optional",
    "RecurrentAttentionRegistry",
    "RecurrentCrossAttentionRegistry",
    "Spec",
]

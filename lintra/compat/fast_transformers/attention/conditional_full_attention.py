"""Softmax attention for short sequences, another attention for long ones."""

from torch import Tensor, nn

from lintra.compat.fast_transformers._inner import SOFTMAX, Dispatching
from lintra.compat.fast_transformers.attention.full_attention import FullAttention
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry, Int, Optional
from lintra.compat.fast_transformers.events import EventDispatcher
from lintra.compat.fast_transformers.masking import BaseMask


class ConditionalFullAttention(Dispatching):
    """Softmax up to `length_limit` queries and keys, another attention beyond."""

    def __init__(
        self,
        other_attention: nn.Module,
        length_limit: int = 512,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(event_dispatcher)
        self.full_attention = FullAttention(softmax_temp, attention_dropout, event_dispatcher)
        self.other_attention = other_attention
        self.length_limit = length_limit

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask | None = None,
        query_lengths: BaseMask | None = None,
        key_lengths: BaseMask | None = None,
    ) -> Tensor:
        long = max(queries.shape[1], values.shape[1]) > self.length_limit
        chosen = self.other_attention if long else self.full_attention
        return chosen(queries, keys, values, attn_mask, query_lengths, key_lengths)


AttentionRegistry.register(
    "conditional-full", ConditionalFullAttention, [("length_limit", Optional(Int, 512)), *SOFTMAX]
)

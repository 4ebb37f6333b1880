"""The layer around an inner attention: projections to heads and back."""

from typing import Any

from torch import Tensor, nn

from lintra.compat.fast_transformers._inner import Dispatching
from lintra.compat.fast_transformers.events import EventDispatcher, QKVEvent
from lintra.compat.fast_transformers.masking import BaseMask


class AttentionLayer(Dispatching):
    """Projects to heads, attends, projects back: queries [n l c], keys and values [n s c'] -> [n l c].

    `attention` is called with heads [n l h e] and the three masks as they were given.
    """

    def __init__(
        self,
        attention: Any,
        d_model: int,
        n_heads: int,
        d_keys: int | None = None,
        d_values: int | None = None,
        d_model_keys: int | None = None,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(event_dispatcher)
        d_keys, d_values = d_keys or d_model // n_heads, d_values or d_model // n_heads
        self.inner_attention = attention
        self.query_projection = nn.Linear(d_model, d_keys * n_heads)
        self.key_projection = nn.Linear(d_model_keys or d_model, d_keys * n_heads)
        self.value_projection = nn.Linear(d_model_keys or d_model, d_values * n_heads)
        self.out_projection = nn.Linear(d_values * n_heads, d_model)
        self.n_heads = n_heads

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask | None = None,
        query_lengths: BaseMask | None = None,
        key_lengths: BaseMask | None = None,
    ) -> Tensor:
        q, k, v = self._project(queries, keys, values)
        self.event_dispatcher.dispatch(QKVEvent(self, q, k, v))
        y = self.inner_attention(q, k, v, attn_mask, query_lengths, key_lengths)
        return self.out_projection(y.flatten(2))

    def _project(self, *given: Tensor) -> list[Tensor]:
        """Queries, keys and values [... c], or the first of them, by heads [... h d]."""
        projections = (self.query_projection, self.key_projection, self.value_projection)
        pairs = zip(projections, given, strict=False)
        return [project(x).unflatten(-1, (self.n_heads, -1)) for project, x in pairs]

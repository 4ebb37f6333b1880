"""What the two types of softmax attention share: how one token reads keys and values."""

from typing import ClassVar

from torch import Tensor, nn

from lintra.compat.fast_transformers.events import AttentionEvent, EventDispatcher
from lintra.ops.softmax_attention import fused_attention


class RecurrentSoftmax(nn.Module):
    """Base. `softmax_temp` multiplies the scores (default e^-0.5)."""

    _shown: ClassVar[tuple[int, int, int]] = (
        0,
        1,
        2,
    )  # the axes [n h s] of the weights, as an event has them

    def __init__(
        self,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__()
        self.softmax_temp = softmax_temp
        self.dropout = nn.Dropout(attention_dropout)
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None = None) -> Tensor:
        """query [n h e], keys [n h s e], values [n h s d] -> [n h d], from the keys `visible` [n s]."""
        query = query[:, :, None]
        visible = None if visible is None else visible[:, None, None]
        if self.event_dispatcher.listening:
            return self._weigh(query, keys, values, visible)[:, :, 0]
        scale, dropout = self.softmax_temp or None, self.dropout.p if self.dropout.training else 0.0
        y = fused_attention(query, keys, values, visible=visible, scale=scale, dropout=dropout)
        return y[:, :, 0].contiguous()

    def _weigh(self, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
        """The definition, whose weights are there to be shown."""
        scores = query @ keys.mT * (self.softmax_temp or query.shape[3] ** -0.5)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        weights = self.dropout(scores.softmax(-1))
        if visible is not None:
            weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)
        self.event_dispatcher.dispatch(AttentionEvent(self, weights[:, :, 0].permute(self._shown)))
        return weights @ values

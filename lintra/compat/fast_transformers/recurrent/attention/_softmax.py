"""Base of the two recurrent types of softmax attention: one token reads keys and values."""

from typing import ClassVar

from torch import Tensor

from lintra.compat.fast_transformers._inner import Scored
from lintra.compat.fast_transformers.events import AttentionEvent
from lintra.ops.softmax_attention import fused_attention


class RecurrentSoftmax(Scored):
    """Base of the two types."""

    # The axes [n h s] of the weights, as an event has them.
    _shown: ClassVar[tuple[int, int, int]] = (0, 1, 2)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None = None) -> Tensor:
        """query [n h e], keys [n h s e], values [n h s d] -> [n h d], from the keys `visible` [n s]."""
        query = query[:, :, None]
        visible = None if visible is None else visible[:, None, None]
        if self.event_dispatcher.listening:
            weights = self._weights(query, keys, visible)
            y = weights @ values
            self.event_dispatcher.dispatch(AttentionEvent(self, weights[:, :, 0].permute(self._shown)))
        else:
            y = fused_attention(query, keys, values, visible=visible, **self._weighing())
        return y[:, :, 0].contiguous()

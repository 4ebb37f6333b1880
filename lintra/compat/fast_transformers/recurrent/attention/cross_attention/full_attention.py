"""Softmax over another sequence, which is the state."""

from torch import Tensor

from lintra.compat.fast_transformers._inner import SOFTMAX, token_mask
from lintra.compat.fast_transformers.attention_registry import RecurrentCrossAttentionRegistry
from lintra.compat.fast_transformers.masking import BaseMask
from lintra.compat.fast_transformers.recurrent._utils import State, open_state
from lintra.compat.fast_transformers.recurrent.attention._softmax import RecurrentSoftmax
from lintra.ops.padding import zero_padding


class RecurrentCrossFullAttention(RecurrentSoftmax):
    """Softmax attention of one token, query [n h e], to another sequence.

    State: keys [n s h e] and values [n s h d] of all tokens; each call sees those that its `key_lengths`
    names (None: all)."""

    _shown = (0, 2, 1)

    def forward(
        self,
        query: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        key_lengths: BaseMask | None = None,
        state: State = None,
    ) -> tuple[Tensor, list[Tensor]]:
        if state is not None:
            keys, values = open_state(state, query)
        assert keys is not None
        assert values is not None
        mask = token_mask(key_lengths, keys)
        if state is None:
            keys, values = zero_padding(mask, keys, values)
        y = self._attend(query, keys.transpose(1, 2), values.transpose(1, 2), mask)
        return y, [keys, values]


RecurrentCrossAttentionRegistry.register("full", RecurrentCrossFullAttention, SOFTMAX)

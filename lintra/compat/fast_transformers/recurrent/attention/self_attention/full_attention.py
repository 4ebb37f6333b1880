"""Softmax over all tokens so far, which are the state."""

import torch
from torch import Tensor

from lintra.compat.fast_transformers._inner import SOFTMAX
from lintra.compat.fast_transformers.attention_registry import RecurrentAttentionRegistry
from lintra.compat.fast_transformers.recurrent._utils import State, check_state, open_state
from lintra.compat.fast_transformers.recurrent.attention._softmax import RecurrentSoftmax


class RecurrentFullAttention(RecurrentSoftmax):
    """Softmax attention of one token, query [n h e]. State: keys [n h s e] and values [n h s d] so far."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, state: State = None, memory: State = None
    ) -> tuple[Tensor, list[Tensor]]:
        state = check_state(state, memory)
        keys, values = key[:, :, None], value[:, :, None]
        if state is None:  # a copy: the caller may keep writing into its tensors
            keys, values = keys.clone(), values.clone()
        else:
            before = open_state(state, query)
            keys, values = torch.cat((before[0], keys), 2), torch.cat((before[1], values), 2)
        return self._attend(query, keys, values), [keys, values]


RecurrentAttentionRegistry.register("full", RecurrentFullAttention, SOFTMAX)

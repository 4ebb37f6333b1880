"""Encoders and decoders as RNNs: x [n c] of one token and a state in, the same out.

A layer of a causal encoder and its recurrent twin have the same parameters under the same names.
"""

from collections.abc import Sequence

from torch import Tensor

from lintra.compat.fast_transformers.masking import BaseMask
from lintra.compat.fast_transformers.recurrent._utils import State, check_state, layer_states
from lintra.compat.fast_transformers.transformers import DecoderLayer, EncoderLayer, Layers, Unpadded


class RecurrentTransformerEncoderLayer(EncoderLayer):
    """One token [n c] after a state (None: before any)."""

    def forward(self, x: Tensor, state: State = None, memory: State = None) -> tuple[Tensor, State]:
        mixed, state = self.attention(x, x, x, check_state(state, memory))
        return self._feed(self.norm1(x + self.dropout(mixed)), self.norm2), state


class RecurrentTransformerEncoder(Layers):
    """One token [n c] after a state, a list with that of each layer. A list that is passed is filled with the
    states after the token and given back; its tensors stay as they were."""

    def forward(
        self, x: Tensor, state: Sequence[State] | None = None, memory: Sequence[State] | None = None
    ) -> tuple[Tensor, list[State]]:
        after = layer_states(check_state(state, memory), len(self.layers))
        for i, layer in enumerate(self.layers):
            x, after[i] = layer(x, after[i])
            self._show(x)
        return self._end(x), after


class RecurrentTransformerDecoderLayer(DecoderLayer):
    """One token [n c] that also reads `memory` [n s c]: that itself at the first token, its mask at each.

    State: that of self-attention and that of cross-attention."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_length_mask: BaseMask | None = None,
        state: Sequence[State] | None = None,
    ) -> tuple[Tensor, list[State]]:
        if memory_length_mask is None:
            memory_length_mask = Unpadded(memory)
        own, read = (None, None) if state is None else state
        mixed, own = self.self_attention(x, x, x, state=own)
        x = self.norm1(x + self.dropout(mixed))
        mixed, read = self.cross_attention(x, memory, memory, memory_length_mask, state=read)
        return self._feed(self.norm2(x + self.dropout(mixed)), self.norm3), [own, read]


class RecurrentTransformerDecoder(Layers):
    """One token [n c] after a state, a list with that of each layer, which is filled as an encoder's is."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_length_mask: BaseMask | None = None,
        state: Sequence[State] | None = None,
    ) -> tuple[Tensor, list[State]]:
        after = layer_states(state, len(self.layers))
        if memory_length_mask is None:
            memory_length_mask = Unpadded(memory)
        for i, layer in enumerate(self.layers):
            x, after[i] = layer(x, memory, memory_length_mask=memory_length_mask, state=after[i])
            self._show(x)
        return self._end(x), after


__all__ = [
    "RecurrentTransformerDecoder",
    "RecurrentTransformerDecoderLayer",
    "RecurrentTransformerEncoder",
    "RecurrentTransformerEncoderLayer",
]

"""Encoders and decoders as RNNs: x [n c] of one token and a state in, the same out.

A layer of a causal encoder and its recurrent twin have the same parameters under the same names.
"""

from torch import Tensor

from lintra.attention import State
from lintra.compat.fast_transformers.masking import BaseMask
from lintra.compat.fast_transformers.recurrent.attention import given_state
from lintra.compat.fast_transformers.transformers import DecoderLayer, EncoderLayer, Layers


class RecurrentTransformerEncoderLayer(EncoderLayer):
    """One token [n c] after a state (None: before any)."""

    def forward(self, x: Tensor, state: State = None, memory: State = None) -> tuple[Tensor, State]:
        mixed, state = self.attention(x, x, x, given_state(state, memory))
        return self.feed(self.norm1(x + self.dropout(mixed)), self.norm2), state


class RecurrentTransformerEncoder(Layers):
    """One token [n c] after a state, a list with that of each layer."""

    def forward(
        self, x: Tensor, state: list[State] | None = None, memory: list[State] | None = None
    ) -> tuple[Tensor, list[State]]:
        before = given_state(state, memory) or [None] * len(self.layers)
        after = []
        for layer, one in zip(self.layers, before, strict=True):
            x, one = layer(x, one)
            after.append(one)
        return self.end(x), after


class RecurrentTransformerDecoderLayer(DecoderLayer):
    """One token [n c] that also reads `memory` [n s c]."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_length_mask: BaseMask | None = None,
        state: list[State] | None = None,
    ) -> tuple[Tensor, list[State]]:
        own, read = state or [None, None]
        mixed, own = self.self_attention(x, x, x, own)
        x = self.norm1(x + self.dropout(mixed))
        mixed, read = self.cross_attention(x, memory, memory, memory_length_mask, state=read)
        return self.feed(self.norm2(x + self.dropout(mixed)), self.norm3), [own, read]


class RecurrentTransformerDecoder(Layers):
    """One token [n c] after a state, a list with that of each layer. `memory` is read at the first token."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_length_mask: BaseMask | None = None,
        state: list[State] | None = None,
    ) -> tuple[Tensor, list[State]]:
        after = []
        for layer, one in zip(self.layers, state or [None] * len(self.layers), strict=True):
            x, one = layer(x, memory, memory_length_mask, one)
            after.append(one)
        return self.end(x), after


__all__ = [
    "RecurrentTransformerDecoder",
    "RecurrentTransformerDecoderLayer",
    "RecurrentTransformerEncoder",
    "RecurrentTransformerEncoderLayer",
]

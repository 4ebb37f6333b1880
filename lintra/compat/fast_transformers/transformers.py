"""Encoders and decoders around an attention layer, post-norm, as in the papers before 2020.

Masks that are not given are made here, all True: attention layers and inner attentions of your own read
them. Parameters are in the order of the library, so that the states of its optimisers fit.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.compat.fast_transformers._inner import Dispatching
from lintra.compat.fast_transformers.events import EventDispatcher, IntermediateOutput
from lintra.compat.fast_transformers.masking import BaseMask, FullMask, LengthMask


class FeedForward(Dispatching):
    """The two linear maps of a layer, under the names its state dict has, after its attention layers."""

    def __init__(
        self,
        d_model: int,
        d_ff: int | None,
        dropout: float,
        activation: str,
        event_dispatcher: str | EventDispatcher,
        **attention: Any,
    ):
        super().__init__(event_dispatcher)
        for name, layer in attention.items():
            setattr(self, name, layer)
        self.linear1 = nn.Linear(d_model, d_ff or 4 * d_model)
        self.linear2 = nn.Linear(d_ff or 4 * d_model, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation_function(activation)

    def _feed(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        y = self.dropout(self.activation(self.linear1(x)))
        return norm(x + self.dropout(self.linear2(y)))


class EncoderLayer(FeedForward):
    """Self-attention and feed-forward; subclasses define how it is called."""

    attention: nn.Module

    def __init__(
        self,
        attention: Any,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(d_model, d_ff, dropout, activation, event_dispatcher, attention=attention)


class DecoderLayer(FeedForward):
    """Self-attention, cross-attention and feed-forward."""

    self_attention: nn.Module
    cross_attention: nn.Module

    def __init__(
        self,
        self_attention: Any,
        cross_attention: Any,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        event_dispatcher: str | EventDispatcher = "",
    ):
        layers = {"self_attention": self_attention, "cross_attention": cross_attention}
        super().__init__(d_model, d_ff, dropout, activation, event_dispatcher, **layers)
        self.norm3 = nn.LayerNorm(d_model)


class Layers(Dispatching):
    """Layers one after the other, and a norm at the end if there is one."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        norm_layer: nn.Module | None = None,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(event_dispatcher)
        self.layers = nn.ModuleList(layers)
        self.norm = norm_layer

    def _show(self, x: Tensor) -> None:
        """Dispatches the output of a layer."""
        self.event_dispatcher.dispatch(IntermediateOutput(self, x))

    def _end(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)


class TransformerEncoderLayer(EncoderLayer):
    """x [n l c] -> [n l c]."""

    def forward(
        self, x: Tensor, attn_mask: BaseMask | None = None, length_mask: BaseMask | None = None
    ) -> Tensor:
        attn_mask, length_mask = attn_mask or everything(x, x), length_mask or Unpadded(x)
        y = self.attention(x, x, x, attn_mask=attn_mask, query_lengths=length_mask, key_lengths=length_mask)
        return self._feed(self.norm1(x + self.dropout(y)), self.norm2)


class TransformerEncoder(Layers):
    """x [n l c] -> [n l c]. `attn_mask`: which keys a query may see; `length_mask`: which tokens are real."""

    def forward(
        self, x: Tensor, attn_mask: BaseMask | None = None, length_mask: BaseMask | None = None
    ) -> Tensor:
        attn_mask, length_mask = attn_mask or everything(x, x), length_mask or Unpadded(x)
        for layer in self.layers:
            x = layer(x, attn_mask=attn_mask, length_mask=length_mask)
            self._show(x)
        return self._end(x)


class TransformerDecoderLayer(DecoderLayer):
    """x [n l c], memory [n s c] -> [n l c]."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        x_mask: BaseMask | None = None,
        x_length_mask: BaseMask | None = None,
        memory_mask: BaseMask | None = None,
        memory_length_mask: BaseMask | None = None,
    ) -> Tensor:
        x_mask, x_length_mask = x_mask or everything(x, x), x_length_mask or Unpadded(x)
        memory_mask = memory_mask or everything(x, memory)
        y = self.self_attention(
            x, x, x, attn_mask=x_mask, query_lengths=x_length_mask, key_lengths=x_length_mask
        )
        x = self.norm1(x + self.dropout(y))
        y = self.cross_attention(
            x,
            memory,
            memory,
            attn_mask=memory_mask,
            query_lengths=x_length_mask,
            key_lengths=memory_length_mask or Unpadded(memory),
        )
        return self._feed(self.norm2(x + self.dropout(y)), self.norm3)


class TransformerDecoder(Layers):
    """x [n l c], memory [n s c] -> [n l c]; `x_mask` and `memory_mask` as `attn_mask` of the encoder."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        x_mask: BaseMask | None = None,
        x_length_mask: BaseMask | None = None,
        memory_mask: BaseMask | None = None,
        memory_length_mask: BaseMask | None = None,
    ) -> Tensor:
        masks = {
            "x_mask": x_mask or everything(x, x),
            "x_length_mask": x_length_mask or Unpadded(x),
            "memory_mask": memory_mask or everything(x, memory),
            "memory_length_mask": memory_length_mask or Unpadded(memory),
        }
        for layer in self.layers:
            x = layer(x, memory, **masks)
            self._show(x)
        return self._end(x)


class Unpadded(LengthMask):
    """Lengths that are all that of x [n l c], which is known without a look at the numbers."""

    def __init__(self, x: Tensor):
        super().__init__(x.new_full((len(x),), x.shape[1], dtype=torch.int64), x.shape[1])

    @property
    def all_ones(self) -> bool:
        return True


def everything(x: Tensor, memory: Tensor) -> FullMask:
    """The mask of queries x [n l c] that see all keys of memory [n s c]."""
    return FullMask(x.shape[1], memory.shape[1], device=x.device)


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The function of torch.nn.functional. Raises ValueError where there is none of that name."""
    found: Callable[[Tensor], Tensor] | None = getattr(functional, name, None)
    if found is None or not callable(found):
        raise ValueError(f"activation must name a function of torch.nn.functional, got {name!r}")
    return found


__all__ = [
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]

"""Encoders and decoders around an attention layer, post-norm, as in the papers before 2020."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional

from lintra.compat.fast_transformers.attention import no_events
from lintra.compat.fast_transformers.masking import BaseMask


class FeedForward(nn.Module):
    """The two linear maps of a layer, under the names its state dict has."""

    def __init__(self, d_model: int, d_ff: int | None, dropout: float, activation: str):
        super().__init__()
        if activation not in ("relu", "gelu"):
            raise ValueError(f"activation must be 'relu' or 'gelu', got {activation!r}")
        self.linear1 = nn.Linear(d_model, d_ff or 4 * d_model)
        self.linear2 = nn.Linear(d_ff or 4 * d_model, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation = functional.relu if activation == "relu" else functional.gelu

    def feed(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        y = self.dropout(self.activation(self.linear1(x)))
        return norm(x + self.dropout(self.linear2(y)))


class EncoderLayer(FeedForward):
    """Self-attention and feed-forward; the two classes below differ in how they are called."""

    def __init__(
        self,
        attention: nn.Module,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        event_dispatcher: str = "",
    ):
        no_events(event_dispatcher)
        super().__init__(d_model, d_ff, dropout, activation)
        self.attention = attention


class DecoderLayer(FeedForward):
    """Self-attention, cross-attention and feed-forward."""

    def __init__(
        self,
        self_attention: nn.Module,
        cross_attention: nn.Module,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
        event_dispatcher: str = "",
    ):
        no_events(event_dispatcher)
        super().__init__(d_model, d_ff, dropout, activation)
        self.norm3 = nn.LayerNorm(d_model)
        self.self_attention, self.cross_attention = self_attention, cross_attention


class Layers(nn.Module):
    """Layers one after the other, and a norm at the end if there is one."""

    def __init__(
        self, layers: Iterable[nn.Module], norm_layer: nn.Module | None = None, event_dispatcher: str = ""
    ):
        super().__init__()
        no_events(event_dispatcher)
        self.layers = nn.ModuleList(layers)
        self.norm = norm_layer

    def end(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)


class TransformerEncoderLayer(EncoderLayer):
    """x [n l c] -> [n l c]."""

    def forward(
        self, x: Tensor, attn_mask: BaseMask | None = None, length_mask: BaseMask | None = None
    ) -> Tensor:
        x = x + self.dropout(self.attention(x, x, x, attn_mask, length_mask, length_mask))
        return self.feed(self.norm1(x), self.norm2)


class TransformerEncoder(Layers):
    """x [n l c] -> [n l c]. `attn_mask`: which keys a query may see; `length_mask`: which tokens are real."""

    def forward(
        self, x: Tensor, attn_mask: BaseMask | None = None, length_mask: BaseMask | None = None
    ) -> Tensor:
        for layer in self.layers:
            x = layer(x, attn_mask=attn_mask, length_mask=length_mask)
        return self.end(x)


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
        x = self.norm1(x + self.dropout(self.self_attention(x, x, x, x_mask, x_length_mask, x_length_mask)))
        read = self.cross_attention(x, memory, memory, memory_mask, x_length_mask, memory_length_mask)
        return self.feed(self.norm2(x + self.dropout(read)), self.norm3)


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
        for layer in self.layers:
            x = layer(x, memory, x_mask, x_length_mask, memory_mask, memory_length_mask)
        return self.end(x)


__all__ = [
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]

"""Builders of whole models.

A builder of one's own derives from one of these and says in the `_get_*` methods what its model is made of.
"""

from typing import Any

from torch import nn

from lintra.compat.fast_transformers.attention import AttentionLayer
from lintra.compat.fast_transformers.builders.attention_builders import (
    AttentionBuilder,
    BaseAttentionBuilder,
    RecurrentAttentionBuilder,
    RecurrentCrossAttentionBuilder,
)
from lintra.compat.fast_transformers.builders.base import BaseBuilder, unknown
from lintra.compat.fast_transformers.events import EventDispatcher
from lintra.compat.fast_transformers.recurrent.attention import (
    RecurrentAttentionLayer,
    RecurrentCrossAttentionLayer,
)
from lintra.compat.fast_transformers.recurrent.transformers import (
    RecurrentTransformerDecoder,
    RecurrentTransformerDecoderLayer,
    RecurrentTransformerEncoder,
    RecurrentTransformerEncoderLayer,
)
from lintra.compat.fast_transformers.transformers import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    activation_function,
)


class BaseTransformerBuilder(BaseBuilder):
    """Options that every transformer has."""

    n_layers: int = 4
    n_heads: int = 4
    query_dimensions: int = 64
    value_dimensions: int = 64
    feed_forward_dimensions: int = 1024
    dropout: float = 0.1
    event_dispatcher: str | EventDispatcher = ""
    _model_dimensions: int | None = None
    _activation: str = "relu"
    _final_normalization: bool = True

    @property
    def model_dimensions(self) -> int:
        """Size of the input and output; n_heads value_dimensions unless set."""
        return self._model_dimensions or self.value_dimensions * self.n_heads

    @model_dimensions.setter
    def model_dimensions(self, value: int | None) -> None:
        self._model_dimensions = value

    @property
    def activation(self) -> str:
        """The name of a function of torch.nn.functional."""
        return self._activation

    @activation.setter
    def activation(self, value: str) -> None:
        activation_function(value)
        self._activation = value

    @property
    def final_normalization(self) -> bool:
        """Return whether a norm follows the last layer."""
        return self._final_normalization

    @final_normalization.setter
    def final_normalization(self, value: object) -> None:
        self._final_normalization = bool(value)

    def get(self) -> nn.Module:
        """The model, with weights drawn anew."""
        raise NotImplementedError

    def _inner(
        self, builder: BaseAttentionBuilder, attention_type: str, dimensions: int | None = None
    ) -> nn.Module:
        """A new inner attention; a feature map is made for heads of that many `dimensions`."""
        builder.event_dispatcher = self.event_dispatcher
        if dimensions or not hasattr(builder, "query_dimensions"):
            builder.query_dimensions = dimensions or self.query_dimensions
        return builder.get(attention_type)

    def _norm(self) -> nn.Module | None:
        return nn.LayerNorm(self.model_dimensions) if self.final_normalization else None


class StrictBuilder(BaseTransformerBuilder):
    """Refuses attributes that are unknown. One that an attention builder knows goes to it too."""

    def _attention_builders(self) -> list[BaseAttentionBuilder]:
        return [x for x in vars(self).values() if isinstance(x, BaseAttentionBuilder)]

    def __setattr__(self, name: str, value: Any) -> None:
        known = name.startswith("_") or hasattr(self, name)
        if known:
            super().__setattr__(name, value)
        if name.startswith("_"):
            return
        takers = [x for x in self._attention_builders() if x.takes(name)]
        if not (known or takers):
            own = {x for x in dir(self) if not (x.startswith("_") or callable(getattr(type(self), x)))}
            others = {x for builder in self._attention_builders() for x in builder.parameters}
            raise AttributeError(unknown("parameter", name, sorted(own | others)))
        for builder in takers:
            try:
                setattr(builder, name, value)
            except ValueError:  # one of ours, under a name that a type wants other values for
                if not known:
                    raise


class BaseTransformerEncoderBuilder(StrictBuilder):
    """An encoder of what the `_get_*` methods name."""

    def __init__(self):
        self._attention_builder = self._get_attention_builder()
        self._attention_type = "full"

    def _get_attention_builder(self) -> BaseAttentionBuilder:
        raise NotImplementedError

    def _get_attention_layer_class(self) -> Any:
        """Called with inner attention, width, heads, d_keys=, d_values=, event_dispatcher=."""
        raise NotImplementedError

    def _get_encoder_class(self) -> Any:
        """Called with layers, norm or None, event_dispatcher=."""
        raise NotImplementedError

    def _get_encoder_layer_class(self) -> Any:
        """Called with attention layer, width, feed-forward size, dropout, activation, event_dispatcher=."""
        raise NotImplementedError

    @property
    def attention(self) -> BaseAttentionBuilder:
        return self._attention_builder

    @property
    def attention_type(self) -> str:
        return self._attention_type

    @attention_type.setter
    def attention_type(self, value: str) -> None:
        self._attention_type = _known_type("attention_type", value, self.attention)

    def get(self) -> nn.Module:
        """The model, with weights drawn anew."""
        events = {"event_dispatcher": self.event_dispatcher}
        attention_layer, encoder_layer = self._get_attention_layer_class(), self._get_encoder_layer_class()
        layers = [
            encoder_layer(
                attention_layer(
                    self._inner(self.attention, self.attention_type),
                    self.model_dimensions,
                    self.n_heads,
                    d_keys=self.query_dimensions,
                    d_values=self.value_dimensions,
                    **events,
                ),
                self.model_dimensions,
                self.feed_forward_dimensions,
                self.dropout,
                self.activation,
                **events,
            )
            for _ in range(self.n_layers)
        ]
        return self._get_encoder_class()(layers, self._norm(), **events)


class TransformerEncoderBuilder(BaseTransformerEncoderBuilder):
    """A model of whole sequences."""

    def _get_attention_builder(self) -> BaseAttentionBuilder:
        return AttentionBuilder()

    def _get_attention_layer_class(self) -> Any:
        return AttentionLayer

    def _get_encoder_class(self) -> Any:
        return TransformerEncoder

    def _get_encoder_layer_class(self) -> Any:
        return TransformerEncoderLayer


class RecurrentEncoderBuilder(BaseTransformerEncoderBuilder):
    """Builder of the model as an RNN; the state dicts are the same."""

    def _get_attention_builder(self) -> BaseAttentionBuilder:
        return RecurrentAttentionBuilder()

    def _get_attention_layer_class(self) -> Any:
        return RecurrentAttentionLayer

    def _get_encoder_class(self) -> Any:
        return RecurrentTransformerEncoder

    def _get_encoder_layer_class(self) -> Any:
        return RecurrentTransformerEncoderLayer


class BaseTransformerDecoderBuilder(StrictBuilder):
    """A decoder of what the `_get_*` methods name. `cross_*` are sizes of the attention to the memory, by
    default those of the decoder; `cross_model_dimensions` is the size of the memory."""

    _cross_n_heads: int | None = None
    _cross_query_dimensions: int | None = None
    _cross_value_dimensions: int | None = None
    _cross_model_dimensions: int | None = None

    def __init__(self):
        self._self_attention_builder = self._get_self_attention_builder()
        self._cross_attention_builder = self._get_cross_attention_builder()
        self._self_attention_type = self._cross_attention_type = "full"

    def _get_self_attention_builder(self) -> BaseAttentionBuilder:
        raise NotImplementedError

    def _get_cross_attention_builder(self) -> BaseAttentionBuilder:
        raise NotImplementedError

    def _get_self_attention_layer_class(self) -> Any:
        """Called as the attention layer of an encoder is."""
        raise NotImplementedError

    def _get_cross_attention_layer_class(self) -> Any:
        """Called with d_model_keys= too."""
        raise NotImplementedError

    def _get_decoder_class(self) -> Any:
        """Called as an encoder is."""
        raise NotImplementedError

    def _get_decoder_layer_class(self) -> Any:
        """Called with two attention layers, then as the layer of an encoder is."""
        raise NotImplementedError

    @property
    def cross_n_heads(self) -> int:
        return self._cross_n_heads or self.n_heads

    @cross_n_heads.setter
    def cross_n_heads(self, value: int | None) -> None:
        self._cross_n_heads = value

    @property
    def cross_query_dimensions(self) -> int:
        return self._cross_query_dimensions or self.query_dimensions

    @cross_query_dimensions.setter
    def cross_query_dimensions(self, value: int | None) -> None:
        self._cross_query_dimensions = value

    @property
    def cross_value_dimensions(self) -> int:
        return self._cross_value_dimensions or self.value_dimensions

    @cross_value_dimensions.setter
    def cross_value_dimensions(self, value: int | None) -> None:
        self._cross_value_dimensions = value

    @property
    def cross_model_dimensions(self) -> int:
        return self._cross_model_dimensions or self.cross_n_heads * self.cross_value_dimensions

    @cross_model_dimensions.setter
    def cross_model_dimensions(self, value: int | None) -> None:
        self._cross_model_dimensions = value

    @property
    def self_attention(self) -> BaseAttentionBuilder:
        return self._self_attention_builder

    @property
    def self_attention_type(self) -> str:
        return self._self_attention_type

    @self_attention_type.setter
    def self_attention_type(self, value: str) -> None:
        self._self_attention_type = _known_type("self_attention_type", value, self.self_attention)

    @property
    def cross_attention(self) -> BaseAttentionBuilder:
        return self._cross_attention_builder

    @property
    def cross_attention_type(self) -> str:
        return self._cross_attention_type

    @cross_attention_type.setter
    def cross_attention_type(self, value: str) -> None:
        self._cross_attention_type = _known_type("cross_attention_type", value, self.cross_attention)

    def get(self) -> nn.Module:
        """The model, with weights drawn anew."""
        events = {"event_dispatcher": self.event_dispatcher}
        layers = [self._layer(**events) for _ in range(self.n_layers)]
        return self._get_decoder_class()(layers, self._norm(), **events)

    def _layer(self, **events: Any) -> nn.Module:
        own, cross = self._get_self_attention_layer_class(), self._get_cross_attention_layer_class()
        return self._get_decoder_layer_class()(
            own(
                self._inner(self.self_attention, self.self_attention_type),
                self.model_dimensions,
                self.n_heads,
                d_keys=self.query_dimensions,
                d_values=self.value_dimensions,
                **events,
            ),
            cross(
                self._inner(self.cross_attention, self.cross_attention_type, self._cross_query_dimensions),
                self.model_dimensions,
                self.cross_n_heads,
                d_keys=self.cross_query_dimensions,
                d_values=self.cross_value_dimensions,
                d_model_keys=self.cross_model_dimensions,
                **events,
            ),
            self.model_dimensions,
            self.feed_forward_dimensions,
            self.dropout,
            self.activation,
            **events,
        )


class TransformerDecoderBuilder(BaseTransformerDecoderBuilder):
    """A decoder of whole sequences that reads another one."""

    def _get_self_attention_builder(self) -> BaseAttentionBuilder:
        return AttentionBuilder()

    def _get_cross_attention_builder(self) -> BaseAttentionBuilder:
        return AttentionBuilder()

    def _get_self_attention_layer_class(self) -> Any:
        return AttentionLayer

    def _get_cross_attention_layer_class(self) -> Any:
        return AttentionLayer

    def _get_decoder_class(self) -> Any:
        return TransformerDecoder

    def _get_decoder_layer_class(self) -> Any:
        return TransformerDecoderLayer


class RecurrentDecoderBuilder(BaseTransformerDecoderBuilder):
    """Builder of the decoder as an RNN; the state dicts are the same."""

    def _get_self_attention_builder(self) -> BaseAttentionBuilder:
        return RecurrentAttentionBuilder()

    def _get_cross_attention_builder(self) -> BaseAttentionBuilder:
        return RecurrentCrossAttentionBuilder()

    def _get_self_attention_layer_class(self) -> Any:
        return RecurrentAttentionLayer

    def _get_cross_attention_layer_class(self) -> Any:
        return RecurrentCrossAttentionLayer

    def _get_decoder_class(self) -> Any:
        return RecurrentTransformerDecoder

    def _get_decoder_layer_class(self) -> Any:
        return RecurrentTransformerDecoderLayer


def _known_type(name: str, value: str, builder: BaseAttentionBuilder) -> str:
    """`value`. Raises ValueError unless `builder` knows every type in it."""
    if not builder.validate_attention_type(value):
        raise ValueError(unknown(name, value, builder.available_attentions))
    return value

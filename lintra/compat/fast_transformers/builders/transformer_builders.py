"""Builders of whole models.

A builder of your own derives from one of these and returns the parts of its model from the `_get_*` methods.
"""

from collections.abc import Callable
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


def _by_default(name: str, default: Callable[[Any], int]) -> Any:
    """A property kept under `name`; while that is None, the result of `default` for the builder."""
    return property(
        lambda self: getattr(self, name) or default(self), lambda self, value: setattr(self, name, value)
    )


def _attention_type(attention: str) -> Any:
    """The property `<attention>_type`. Set, it raises ValueError unless that attention's builder knows every
    type in it."""
    name = f"{attention}_type"

    def set_type(self: Any, value: str) -> None:
        builder = getattr(self, attention)
        if not builder.validate_attention_type(value):
            raise ValueError(unknown(name, value, builder.available_attentions))
        setattr(self, f"_{name}", value)

    return property(lambda self: getattr(self, f"_{name}"), set_type)


def _gives(kind: type[nn.Module]) -> Any:
    """A method that returns that class."""
    return lambda self: kind


def _makes(kind: Callable[[], BaseAttentionBuilder]) -> Any:
    """A method that returns a new builder of that class."""
    return lambda self: kind()


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

    # the size of the input and output
    model_dimensions = _by_default("_model_dimensions", lambda self: self.value_dimensions * self.n_heads)

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
        """The model, with fresh random weights."""
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
    """An encoder of the parts that the `_get_*` methods name."""

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

    attention_type = _attention_type("attention")

    def get(self) -> nn.Module:
        """The model, with fresh random weights."""
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

    _get_attention_builder = _makes(AttentionBuilder)
    _get_attention_layer_class = _gives(AttentionLayer)
    _get_encoder_class = _gives(TransformerEncoder)
    _get_encoder_layer_class = _gives(TransformerEncoderLayer)


class RecurrentEncoderBuilder(BaseTransformerEncoderBuilder):
    """Builder of the model as an RNN; the state dicts are the same."""

    _get_attention_builder = _makes(RecurrentAttentionBuilder)
    _get_attention_layer_class = _gives(RecurrentAttentionLayer)
    _get_encoder_class = _gives(RecurrentTransformerEncoder)
    _get_encoder_layer_class = _gives(RecurrentTransformerEncoderLayer)


class BaseTransformerDecoderBuilder(StrictBuilder):
    """A decoder of the parts that the `_get_*` methods name. `cross_*` are sizes of the attention to the
    memory, by default those of the decoder; `cross_model_dimensions` is the size of the memory."""

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

    cross_n_heads = _by_default("_cross_n_heads", lambda self: self.n_heads)
    cross_query_dimensions = _by_default("_cross_query_dimensions", lambda self: self.query_dimensions)
    cross_value_dimensions = _by_default("_cross_value_dimensions", lambda self: self.value_dimensions)
    cross_model_dimensions = _by_default(
        "_cross_model_dimensions", lambda self: self.cross_n_heads * self.cross_value_dimensions
    )

    @property
    def self_attention(self) -> BaseAttentionBuilder:
        return self._self_attention_builder

    self_attention_type = _attention_type("self_attention")

    @property
    def cross_attention(self) -> BaseAttentionBuilder:
        return self._cross_attention_builder

    cross_attention_type = _attention_type("cross_attention")

    def get(self) -> nn.Module:
        """The model, with fresh random weights."""
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

    _get_self_attention_builder = _makes(AttentionBuilder)
    _get_cross_attention_builder = _makes(AttentionBuilder)
    _get_self_attention_layer_class = _gives(AttentionLayer)
    _get_cross_attention_layer_class = _gives(AttentionLayer)
    _get_decoder_class = _gives(TransformerDecoder)
    _get_decoder_layer_class = _gives(TransformerDecoderLayer)


class RecurrentDecoderBuilder(BaseTransformerDecoderBuilder):
    """Builder of the decoder as an RNN; the state dicts are the same."""

    _get_self_attention_builder = _makes(RecurrentAttentionBuilder)
    _get_cross_attention_builder = _makes(RecurrentCrossAttentionBuilder)
    _get_self_attention_layer_class = _gives(RecurrentAttentionLayer)
    _get_cross_attention_layer_class = _gives(RecurrentCrossAttentionLayer)
    _get_decoder_class = _gives(RecurrentTransformerDecoder)
    _get_decoder_layer_class = _gives(RecurrentTransformerDecoderLayer)

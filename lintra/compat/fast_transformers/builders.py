"""Builders: set attributes, then `get()`. What is set is checked against what the types take."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, ClassVar, TypeVar

from torch import nn

from lintra.compat.fast_transformers import attention, transformers
from lintra.compat.fast_transformers._causal_clustered import ImprovedClusteredCausalAttention
from lintra.compat.fast_transformers._topk import ExactTopKAttention
from lintra.compat.fast_transformers.recurrent import attention as recurrent
from lintra.compat.fast_transformers.recurrent import transformers as recurrent_transformers

Builder = TypeVar("Builder", bound="BaseBuilder")
Types = Mapping[str, type[nn.Module]]

TYPES: Types = {
    "full": attention.FullAttention,
    "linear": attention.LinearAttention,
    "causal-linear": attention.CausalLinearAttention,
    "clustered": attention.ClusteredAttention,
    "improved-clustered": attention.ImprovedClusteredAttention,
    "improved-causal": ImprovedClusteredCausalAttention,
    "causal-improved-clustered": ImprovedClusteredCausalAttention,
    "reformer": attention.ReformerAttention,
    "local": attention.LocalAttention,
    "exact-topk": ExactTopKAttention,
    "conditional-full": attention.ConditionalFullAttention,
}
RECURRENT: Types = {
    "full": recurrent.RecurrentFullAttention,
    "linear": recurrent.RecurrentLinearAttention,
    "causal-linear": recurrent.RecurrentLinearAttention,
}
RECURRENT_CROSS: Types = {
    "full": recurrent.RecurrentCrossFullAttention,
    "linear": recurrent.RecurrentCrossLinearAttention,
}


class BaseBuilder:
    """Attributes in, a module out."""

    def get(self, *arguments: Any) -> nn.Module:
        raise NotImplementedError

    @classmethod
    def from_kwargs(cls: type[Builder], *, strict: bool = True, **kwargs: Any) -> Builder:
        """A builder with these attributes. ValueError for one that there is not, unless strict=False."""
        return cls.from_dictionary(kwargs, strict=strict)

    @classmethod
    def from_namespace(cls: type[Builder], args: Namespace, strict: bool = False) -> Builder:
        """A builder from parsed arguments; what it does not know is left out unless strict=True."""
        return cls.from_dictionary(vars(args), strict=strict)

    @classmethod
    def from_dictionary(cls: type[Builder], dictionary: Mapping[str, Any], strict: bool = True) -> Builder:
        builder = cls()
        for name, value in dictionary.items():
            try:
                setattr(builder, name, value)
            except AttributeError as error:
                if strict:
                    raise ValueError(str(error)) from None
        return builder


class BaseAttentionBuilder(BaseBuilder):
    """Inner attentions by type; "a:b" decorates b with a."""

    types: ClassVar[Types]

    def __init__(self):
        self._given: dict[str, Any] = {}

    @property
    def available_attentions(self) -> list[str]:
        return list(self.types)

    def validate_attention_type(self, attention_type: str) -> bool:
        """Whether `get` knows every name in it."""
        return all(name in self.types for name in attention_type.replace(":", ",").split(","))

    def takes(self, name: str) -> bool:
        """Whether some type has this parameter."""
        return name in self._parameters()

    def _parameters(self) -> list[str]:
        return sorted({option for kind in self.types.values() for option in _options(kind)})

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_given":
            super().__setattr__(name, value)
            return
        if not self.takes(name):
            raise AttributeError(_unknown("attention parameter", name, self._parameters()))
        self._given[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._given:
            raise AttributeError(f"{name!r} has not been set")
        return self._given[name]

    def get(self, attention_type: str) -> nn.Module:
        """The inner attention of that type with what has been set. Raises ValueError for an unknown one."""
        built: list[nn.Module] = []
        for level in reversed(attention_type.split(":")):
            built = [self._build(name, built) for name in level.split(",")]
        if len(built) != 1:
            raise ValueError(f"attention_type must end in one attention, got {attention_type!r}")
        return built[0]

    def _build(self, name: str, decorated: list[nn.Module]) -> nn.Module:
        if name not in self.types:
            raise ValueError(_unknown("attention type", name, list(self.types)))
        options = _options(self.types[name])
        given = {key: value for key, value in self._given.items() if key in options and value is not None}
        wanted = [key for key, option in options.items() if option.default is Parameter.empty]
        missing = [key for key in wanted if key not in given and key != "other_attention"]
        if missing:
            raise ValueError(f"attention type {name!r} needs {', '.join(missing)}")
        if ("other_attention" in options) != bool(decorated):
            raise ValueError(
                f"attention type {name!r} {'decorates another' if not decorated else 'stands alone'}"
            )
        return self.types[name](*decorated, **given)


class AttentionBuilder(BaseAttentionBuilder):
    types = TYPES


class RecurrentAttentionBuilder(BaseAttentionBuilder):
    types = RECURRENT


class RecurrentCrossAttentionBuilder(BaseAttentionBuilder):
    types = RECURRENT_CROSS


class BaseTransformerBuilder(BaseBuilder):
    """What every transformer has; attributes it does not know go to its attention builders."""

    def __init__(self):
        self.n_layers, self.n_heads = 4, 4
        self.query_dimensions, self.value_dimensions, self.feed_forward_dimensions = 64, 64, 1024
        self.dropout = 0.1
        self.activation = "relu"
        self.final_normalization = True
        self.event_dispatcher = ""

    def builders(self) -> list[BaseAttentionBuilder]:
        """Those that are there."""
        return [x for x in vars(self).values() if isinstance(x, BaseAttentionBuilder)]

    def __setattr__(self, name: str, value: Any) -> None:
        builders = self.builders()
        if name.endswith("attention_type"):
            builder = getattr(self, name.removesuffix("_type"), None)
            if builder is not None and not builder.validate_attention_type(value):
                raise ValueError(_unknown(name, value, builder.available_attentions))
        if name == "activation" and value not in ("relu", "gelu"):
            raise ValueError(f"activation must be 'relu' or 'gelu', got {value!r}")
        if not builders or isinstance(value, BaseAttentionBuilder) or name in vars(self):
            super().__setattr__(name, value)
            return
        takers = [builder for builder in builders if builder.takes(name)]
        for builder in takers or builders[:1]:  # one that does not know it says so
            setattr(builder, name, value)

    def layer(self, kind: Callable[..., nn.Module], builder: BaseAttentionBuilder, of: str) -> nn.Module:
        """One attention layer: a new inner attention, projected to."""
        builder.query_dimensions = self.query_dimensions
        return kind(
            builder.get(of),
            self.value_dimensions * self.n_heads,
            self.n_heads,
            d_keys=self.query_dimensions,
            d_values=self.value_dimensions,
            event_dispatcher=self.event_dispatcher,
        )

    def stack(
        self, whole: Callable[..., nn.Module], one: Callable[[], list[nn.Module]], kind: Any
    ) -> nn.Module:
        """Layers of this kind, each around attention layers of its own."""
        width = self.value_dimensions * self.n_heads
        rest = (width, self.feed_forward_dimensions, self.dropout, self.activation, self.event_dispatcher)
        layers = [kind(*one(), *rest) for _ in range(self.n_layers)]
        return whole(layers, nn.LayerNorm(width) if self.final_normalization else None)


class _EncoderBuilder(BaseTransformerBuilder):
    parts: ClassVar[tuple[Any, Any, Any, Any]]  # attention builder, attention layer, layer, encoder

    def __init__(self):
        super().__init__()
        self.attention_type = "full"
        self.attention = self.parts[0]()

    def get(self) -> nn.Module:
        """The model, with weights drawn anew."""
        _, layer, block, whole = self.parts
        return self.stack(whole, lambda: [self.layer(layer, self.attention, self.attention_type)], block)


class TransformerEncoderBuilder(_EncoderBuilder):
    """A model of whole sequences."""

    parts = (
        AttentionBuilder,
        attention.AttentionLayer,
        transformers.TransformerEncoderLayer,
        transformers.TransformerEncoder,
    )


class RecurrentEncoderBuilder(_EncoderBuilder):
    """The same model as an RNN; the state dicts are the same."""

    parts = (
        RecurrentAttentionBuilder,
        recurrent.RecurrentAttentionLayer,
        recurrent_transformers.RecurrentTransformerEncoderLayer,
        recurrent_transformers.RecurrentTransformerEncoder,
    )


class _DecoderBuilder(BaseTransformerBuilder):
    # two attention builders, two attention layers, layer, decoder
    parts: ClassVar[tuple[Any, Any, Any, Any, Any, Any]]

    def __init__(self):
        super().__init__()
        self.self_attention_type = self.cross_attention_type = "full"
        own, cross = self.parts[:2]
        self.self_attention, self.cross_attention = own(), cross()

    def get(self) -> nn.Module:
        """The model, with weights drawn anew."""
        _, _, own, cross, block, whole = self.parts

        def one() -> list[nn.Module]:
            return [
                self.layer(own, self.self_attention, self.self_attention_type),
                self.layer(cross, self.cross_attention, self.cross_attention_type),
            ]

        return self.stack(whole, one, block)


class TransformerDecoderBuilder(_DecoderBuilder):
    """A decoder of whole sequences that reads another one."""

    parts = (
        AttentionBuilder,
        AttentionBuilder,
        attention.AttentionLayer,
        attention.AttentionLayer,
        transformers.TransformerDecoderLayer,
        transformers.TransformerDecoder,
    )


class RecurrentDecoderBuilder(_DecoderBuilder):
    """The same decoder as an RNN; the state dicts are the same."""

    parts = (
        RecurrentAttentionBuilder,
        RecurrentCrossAttentionBuilder,
        recurrent.RecurrentAttentionLayer,
        recurrent.RecurrentCrossAttentionLayer,
        recurrent_transformers.RecurrentTransformerDecoderLayer,
        recurrent_transformers.RecurrentTransformerDecoder,
    )


def _options(kind: type[nn.Module]) -> dict[str, Parameter]:
    """What the constructor of a type takes."""
    return dict(signature(kind).parameters)


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = get_close_matches(name, known)
    hint = f"; perhaps {' or '.join(near)}" if near else f"; there are {', '.join(known)}"
    return f"there is no {what} {name!r}{hint}"

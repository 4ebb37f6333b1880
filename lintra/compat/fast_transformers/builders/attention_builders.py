"""Builders of inner attentions by type, out of the registries."""

from typing import Any

from torch import nn

from lintra.compat.fast_transformers.attention_registry import (
    AttentionRegistry,
    RecurrentAttentionRegistry,
    RecurrentCrossAttentionRegistry,
)
from lintra.compat.fast_transformers.attention_registry.registry import Registry
from lintra.compat.fast_transformers.builders.base import BaseBuilder, unknown


class BaseAttentionBuilder(BaseBuilder):
    """Inner attentions by type; "a:b" decorates b with a. Attributes are the parameters of the types."""

    _registry: Registry
    _parameters: dict[str, Any]

    def __init__(self, registry: Registry):
        self._registry, self._parameters = registry, {}

    @property
    def available_attentions(self) -> list[str]:
        return self._registry.keys

    def validate_attention_type(self, attention_type: str) -> bool:
        """Return whether `get` knows every name in it."""
        return all(name in self._registry for name in attention_type.replace(":", ",").split(","))

    @property
    def parameters(self) -> list[str]:
        """The names that can be set."""
        return sorted({name for key in self._registry.keys for name in self._registry[key][1]})

    def takes(self, name: str) -> bool:
        """Return whether some type has this parameter."""
        return self._registry.contains_parameter(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif self.takes(name):
            self._parameters[name] = self._registry.validate_parameter(name, value)
        else:
            raise AttributeError(unknown("attention parameter", name, self.parameters))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._parameters:
            raise AttributeError(f"{name!r} has not been set")
        return self._parameters[name]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._parameters.items())
        return f"{type(self).__name__}.from_kwargs({given})"

    def get(self, attention_type: str) -> nn.Module:
        """The inner attention of that type with what has been set. Raises ValueError for an unknown one, or
        where a parameter that it needs has not been set; TypeError where it has nothing to decorate."""
        built: list[nn.Module] = []
        for level in reversed(attention_type.split(":")):
            built = [self._build(name, built) for name in level.split(",")]
        if len(built) != 1:
            raise ValueError(f"attention_type must end in one attention, got {attention_type!r}")
        return built[0]

    def _build(self, name: str, decorated: list[nn.Module]) -> nn.Module:
        if name not in self._registry:
            raise ValueError(unknown("attention type", name, self._registry.keys))
        kind, parameters = self._registry[name]
        try:
            given = {p: self._registry.validate_parameter(p, self._parameters.get(p)) for p in parameters}
        except ValueError as error:
            raise ValueError(f"attention type {name!r} cannot be built: {error}") from error
        try:
            return kind(*decorated, **given)
        except TypeError as error:
            raise TypeError(
                f"attention type {name!r} cannot be built around {len(decorated)} others: {error}"
            ) from error


class AttentionBuilder(BaseAttentionBuilder):
    """Builder of attention of whole sequences."""

    def __init__(self):
        super().__init__(AttentionRegistry)


class RecurrentAttentionBuilder(BaseAttentionBuilder):
    """Builder of attention of one token after the others."""

    def __init__(self):
        super().__init__(RecurrentAttentionRegistry)


class RecurrentCrossAttentionBuilder(BaseAttentionBuilder):
    """Builder of attention of one token that reads another sequence."""

    def __init__(self):
        super().__init__(RecurrentCrossAttentionRegistry)

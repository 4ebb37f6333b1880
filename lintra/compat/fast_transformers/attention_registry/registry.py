"""Attention types by name, and the parameters that they are built with."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from lintra.compat.fast_transformers.attention_registry.spec import Spec


class Registry:
    """Types by name. A parameter that several of them take has one spec, because a builder sets it once."""

    def __init__(self):
        self._types: dict[str, tuple[type[nn.Module], list[str]]] = {}
        self._specs: dict[str, Spec] = {}

    def register(
        self, key: str, class_object: type[nn.Module], parameter_tuples: Iterable[tuple[str, Spec]]
    ) -> None:
        """Add a type and the parameters of its constructor that a builder sets, each with its spec.

        Raises ValueError if the key is taken, or a parameter is registered with another spec.
        """
        specs = dict(parameter_tuples)
        if key in self._types:
            raise ValueError(f"{key!r} is already registered, as {self._types[key][0].__name__}")
        for name, spec in specs.items():
            if self._specs.get(name, spec) != spec:
                raise ValueError(f"{name} is already registered with {self._specs[name]!r}, not {spec!r}")
        self._specs |= specs
        self._types[key] = class_object, list(specs)

    def __contains__(self, key: object) -> bool:
        return key in self._types

    def __getitem__(self, key: str) -> tuple[type[nn.Module], list[str]]:
        """The class and the names of its parameters."""
        return self._types[key]

    @property
    def keys(self) -> list[str]:
        return list(self._types)

    def contains_parameter(self, key: str) -> bool:
        """Return whether any type takes a parameter of this name."""
        return key in self._specs

    def validate_parameter(self, key: str, value: Any) -> Any:
        """Return the value in the canonical form of its spec. Raises ValueError if the spec refuses it."""
        if key not in self._specs:
            raise ValueError(f"no registered type takes a parameter {key!r}")
        try:
            return self._specs[key].get(value)
        except Exception as error:  # of any kind: a spec may be any function
            raise ValueError(f"{key} must be {self._specs[key]!r}, got {value!r}") from error


AttentionRegistry = Registry()
RecurrentAttentionRegistry = Registry()
RecurrentCrossAttentionRegistry = Registry()

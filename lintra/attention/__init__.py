"""The mechanisms. One file, one paper, one mechanism: the folder is the registry."""

import sys
from dataclasses import asdict, fields
from types import ModuleType
from typing import Any

from lintra.attention._kernel import KernelAttention
from lintra.attention._scores import ScoredAttention
from lintra.attention._state import State, leaves, map_state
from lintra.attention._training import no_weight_decay, redraw
from lintra.attention.base import Attention, AttentionConfig, Capabilities, in_layer
from lintra.config import registry

__all__ = [
    "Attention",
    "AttentionConfig",
    "Capabilities",
    "KernelAttention",
    "ScoredAttention",
    "State",
    "describe",
    "for_length",
    "in_layer",
    "leaves",
    "load",
    "map_state",
    "mechanism",
    "names",
    "no_weight_decay",
    "redraw",
]


def names() -> list[str]:
    """The mechanisms there are, in alphabetical order."""
    return registry.names(sys.modules[__name__])


def load(name: str) -> ModuleType:
    """The mechanism's module, with its `Config` and its class. Raises ValueError for an unknown name."""
    return registry.load(sys.modules[__name__], name, "attention")


def describe() -> list[dict[str, str | bool]]:
    """What each mechanism declares: name, paper and its `Capabilities`."""
    return [
        {
            "name": name,
            "paper": each.paper,
            **asdict(each.can),
            "shared_key": each.shared_key,
        }
        for name, each in ((name, mechanism(name)) for name in names())
    ]


def for_length(config: type[Any], length: int, **options: Any) -> Any:
    """A mechanism's `Config` for sequences of `length` tokens: some have to know it, by `max_length`."""
    longest = next((field for field in fields(config) if field.name == "max_length"), None)
    if longest is not None and longest.default is not None:  # None: no longest unless one is asked for
        options = {"max_length": length} | options
    return config(**options)


def mechanism(name: str) -> type[Attention]:
    """The class of that name. Raises ValueError for an unknown one."""
    module = load(name)
    return next(
        x
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, Attention) and x.__module__ == module.__name__
    )

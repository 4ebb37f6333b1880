"""The mechanisms. One file, one paper, one mechanism: the folder is the registry."""

import sys
from dataclasses import asdict
from types import ModuleType

from lintra import registry
from lintra.attention._base import Attention, AttentionConfig, Capabilities, State, map_state

__all__ = ["Attention", "AttentionConfig", "Capabilities", "State", "describe", "load", "map_state", "names"]


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
            "paper": mechanism.paper,
            **asdict(mechanism.can),
            "shared_key": mechanism.shared_key,
        }
        for name, mechanism in ((name, _mechanism(load(name))) for name in names())
    ]


def _mechanism(module: ModuleType) -> type[Attention]:
    return next(
        x
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, Attention) and x.__module__ == module.__name__
    )

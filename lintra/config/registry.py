"""Choices by name: the files of a folder, except base.py and those that begin with _, and entry points."""

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from types import ModuleType

from lintra.config import fields


def names(package: ModuleType) -> list[str]:
    """Return the keys, in alphabetical order."""
    return sorted(
        m.name
        for m in iter_modules(package.__path__)
        if not m.ispkg and m.name != "base" and not m.name.startswith("_")
    )


def load(package: ModuleType, name: str, what: str, known: Sequence[str] = ()) -> ModuleType:
    """Return the module of that key.

    Raises ValueError, with the nearest and all choices, for another `name`. `known` are the choices where
    there are others besides those of the folder."""
    if name not in names(package):
        known = known or names(package)
        near = get_close_matches(name, known) if isinstance(name, str) else []
        hint = f" (perhaps {' or '.join(near)})" if near else ""
        raise ValueError(f"{what} must be one of {', '.join(known)}; got {fields.shown(name)}{hint}")
    return import_module(f"{package.__name__}.{name}")


@cache
def announced(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name, those of packages installed at the first call."""
    points = tuple(entry_points(group=group))
    return {name: tuple(x for x in points if x.name == name) for name in sorted({x.name for x in points})}

"""A folder as the list of choices: a file's name is its key, but for base.py and for what begins with _."""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
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
    there are others beside those of the folder."""
    if name not in names(package):
        known = known or names(package)
        near = get_close_matches(name, known) if isinstance(name, str) else []
        hint = f" (perhaps {' or '.join(near)})" if near else ""
        raise ValueError(f"{what} must be one of {', '.join(known)}; got {fields.shown(name)}{hint}")
    return import_module(f"{package.__name__}.{name}")

"""A folder as the list of choices: the name of a file is its key. Files that begin with _ are not choices."""

from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

_LONGEST = 80  # characters of a wrong key in an error


def names(package: ModuleType) -> list[str]:
    """The keys, in alphabetical order."""
    return sorted(m.name for m in iter_modules(package.__path__) if not m.name.startswith("_"))


def load(package: ModuleType, name: str, what: str) -> ModuleType:
    """The module of that key. Raises ValueError, with the nearest and all choices, for another `name`."""
    if name not in names(package):
        text = repr(name)[:_LONGEST]
        near = get_close_matches(text.strip("'"), names(package))
        hint = f" (perhaps {' or '.join(near)})" if near else ""
        raise ValueError(f"{what} must be one of {', '.join(names(package))}; got {text}{hint}")
    return import_module(f"{package.__name__}.{name}")

"""Mechanisms by name: the files of this folder, and those of other packages.

A package announces a mechanism, a module with a `Config` and one subclass of `Attention`, in its
pyproject.toml:

    [project.entry-points."lintra.attention"]
    average = "my_package.average"

A mechanism without an entry point is named MODULE:Config, in a program that has imported the module.
"""

import sys
from dataclasses import asdict, fields
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

from lintra.attention.base import Attention
from lintra.config import registry

GROUP = "lintra.attention"  # of entry points
_HERE = "lintra.attention"
_BY_CLASS = ":Config"


def names() -> list[str]:
    """Return the names of all mechanisms, in alphabetical order."""
    return sorted({*registry.names(sys.modules[_HERE]), *registry.announced(GROUP)})


def load(name: str) -> ModuleType:
    """Return the mechanism's module, with its `Config` and its class.

    Raises ValueError for an unknown name, one that two mechanisms have, and one whose package cannot be used.
    """
    points = registry.announced(GROUP).get(name, ())
    own = name in registry.names(sys.modules[_HERE])
    if len(points) + own > 1:
        places = [f"{_HERE}.{name}"] * own + [_place(point) for point in points]
        raise ValueError(f"two mechanisms are called {name!r}, {' and '.join(places)}: rename one of them")
    if points:
        return _checked(points[0])
    if isinstance(name, str) and name.endswith(_BY_CLASS):
        module = name.removesuffix(_BY_CLASS)
        if module not in sys.modules:
            raise ValueError(
                f"attention {name!r} is in a module that this program has not imported: import it first, or "
                f"announce the mechanism as an entry point of the group {GROUP!r}"
            )
        return _with_config(sys.modules[module], f"attention {name!r}")
    return registry.load(sys.modules[_HERE], name, "attention", names())


def mechanism(name: str) -> type[Attention]:
    """Return the class of that name. Raises ValueError as `load` does."""
    module = load(name)
    found = [
        x
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, Attention) and x.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ValueError(f"{module.__name__} must define one subclass of Attention, got {len(found)}")
    return found[0]


def name_of(config: type) -> str | None:
    """Return the name under which `load` finds the module of a `Config` class; None if it does not."""
    module = config.__module__
    if config.__name__ != "Config" or getattr(sys.modules.get(module), "Config", None) is not config:
        return None
    package, _, last = module.rpartition(".")
    if package == _HERE:
        return last
    announced = (name for name, points in registry.announced(GROUP).items() if points[0].module == module)
    return next(announced, None if module == "__main__" else module + _BY_CLASS)


def describe() -> list[dict[str, str | bool]]:
    """Return what each mechanism declares: name, paper and `Capabilities`; those in `broken` are left out."""
    unusable = broken()
    return [
        {"name": name, "paper": each.paper, **asdict(each.can), "shared_key": each.shared_key}
        for name, each in ((name, mechanism(name)) for name in names() if name not in unusable)
    ]


def broken() -> dict[str, str]:
    """Return the mechanisms that are announced and cannot be used, with the reason."""
    found = {}
    for name in registry.announced(GROUP):
        try:
            mechanism(name)
        except ValueError as error:
            found[name] = str(error)
    return found


def for_length(kind: type[Any], length: int, **options: Any) -> Any:
    """Return a mechanism's `Config`, the class `kind`, for sequences of `length` tokens."""
    longest = next((field for field in fields(kind) if field.name == "max_length"), None)
    if longest is not None and longest.default is not None:  # None: no limit unless one is set
        options = {"max_length": length} | options
    return kind(**options)


def _place(point: EntryPoint) -> str:
    package = "" if point.dist is None else f" of {point.dist.name}"
    return f"{point.value}{package}"


def _checked(point: EntryPoint) -> ModuleType:
    where = f"attention {point.name!r} ({_place(point)})"
    try:
        module = point.load()
    except Exception as error:  # whatever the other package raises
        raise ValueError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(module, ModuleType):
        raise ValueError(f"{where} must be a module, got {type(module).__name__}")
    return _with_config(module, where)


def _with_config(module: ModuleType, where: str) -> ModuleType:
    if not isinstance(getattr(module, "Config", None), type):
        raise ValueError(f"{where} has no class Config")
    return module

"""The fields of a configuration: their types, checked the same way from Python and from JSON, and ranges."""

import dataclasses
import math
import types
import typing
from typing import Any

_LONGEST = 80  # characters of a value in an error


def check(config: Any) -> None:
    """Raise TypeError that names the field, its type and the value, for a dataclass with a wrong one."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        check_one(field.name, hints[field.name], getattr(config, field.name))


def check_one(name: str, hint: Any, value: Any) -> None:
    """Raise TypeError that names the type and the value unless a value, called `name`, is of a type."""
    if not fits(hint, value):
        raise TypeError(f"{name} must be {describe(hint)}, got {shown(value)}")


def shown(value: Any) -> str:
    """A value as an error shows it: as Python writes it, its end left out where that is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def spelled(config: Any) -> str:
    """A configuration as a program writes it, `softmax.Config(window=4)`: what differs from its defaults; one
    that is no dataclass, as it is printed."""
    if not dataclasses.is_dataclass(config):
        return str(config)
    changed = []
    for field in dataclasses.fields(config):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if (value := getattr(config, field.name)) != default:
            changed.append(f"{field.name}={value!r}")
    kind = type(config)
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}({', '.join(changed)})"


def at_least(config: Any, **least: int) -> None:
    """Raise ValueError that names the field, the rule and the value where one is below; None passes."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ValueError(f"{name} must be at least {bound}, got {value}")


def not_negative(config: Any, *names: str) -> None:
    """Raise ValueError where a field is below 0, infinite or NaN; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {value}")


def positive(config: Any, *names: str) -> None:
    """Raise ValueError where a field is not above 0, infinite or NaN; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value}")


def finite(config: Any, *names: str) -> None:
    """Raise ValueError where a field is infinite or NaN; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")


def probability(config: Any, *names: str) -> None:
    """Raise ValueError where a field is not a dropout probability, or is 1."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(config, name)}")


def seed(config: Any, name: str) -> None:
    """Raise ValueError where a field is not a seed of 64 bits."""
    if not 0 <= (value := getattr(config, name)) < 2**64:
        raise ValueError(f"{name} must lie in 0 .. 2^64 - 1, got {value}")


def offsets(config: Any, name: str) -> None:
    """Raise ValueError where a field is not offsets of earlier places that differ."""
    places = getattr(config, name)
    if any(place < 1 for place in places) or len(set(places)) < len(places):
        raise ValueError(f"{name} must be different offsets, each at least 1, got {places}")


def together(config: Any, *names: str, **needed: Any) -> None:
    """Raise ValueError where one of the fields `names` differs from its default, although the field in
    `needed` has another value than it says there: it would be ignored."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for other, value in needed.items():
        for name in names:
            if getattr(config, other) != value and getattr(config, name) != defaults[name]:
                raise ValueError(
                    f"{name} needs {other}={value!r}, got {getattr(config, name)!r} with "
                    f"{other}={getattr(config, other)!r}"
                )


def fits(hint: Any, value: Any) -> bool:
    """Return whether a value is of an annotated type: classes, unions and literals. An int passes for a
    float."""
    if len(alternatives := options(hint)) > 1:
        return any(fits(option, value) for option in alternatives)
    if typing.get_origin(hint) is typing.Literal:
        return any(value == option and type(value) is type(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        each = typing.get_args(hint)
        if each[-1] is Ellipsis:  # of any length, of one type
            return isinstance(value, tuple) and all(fits(each[0], x) for x in value)
        return isinstance(value, tuple) and len(value) == len(each) and all(map(fits, each, value))
    if hint in (int, float) and isinstance(value, bool):
        return False
    if isinstance(value, type):  # a class where an instance belongs has every method a protocol asks for
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def options(hint: Any) -> tuple[Any, ...]:
    """The types of a union, however it was written; another type alone."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)


def describe(hint: Any) -> str:
    """A type in words; a protocol is described by the first line of its docstring."""
    if len(alternatives := options(hint)) > 1:
        several = [tuple[option, ...] for option in alternatives]
        return " or ".join("several" if option in several else describe(option) for option in alternatives)
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(repr(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        each = typing.get_args(hint)
        if each[-1] is Ellipsis:
            return f"several {describe(each[0])}"
        return f"({', '.join(map(describe, each))})"
    if hint is types.NoneType:
        return "None"
    if typing.Protocol in hint.__mro__:
        line = hint.__doc__.partition("\n")[0]
        return line[0].lower() + line[1:].rstrip(".")
    if hint.__module__.startswith("lintra.") and (kinds := [kind.__name__ for kind in hint.__subclasses__()]):
        return f"a {hint.__name__} ({', '.join(f'{kind}()' for kind in kinds)})"
    return hint.__name__

"""Specifications of parameters: each returns a value in its canonical form, or refuses it."""

import collections.abc
from typing import Any

from lintra.compat.fast_transformers.events import EventDispatcher


class Spec:
    """A kind of value. `predicate` gives the canonical form of what it accepts, else raises ValueError."""

    def __init__(self, predicate: collections.abc.Callable[[Any], Any], name: str = "CustomSpec"):
        self._predicate, self._name = predicate, name

    def __repr__(self) -> str:
        return self._name

    def get(self, x: Any) -> Any:
        """The canonical form of x. Raises what the predicate raises."""
        return self._predicate(x)

    def check(self, x: Any) -> bool:
        """Return whether `get` accepts it."""
        try:
            self.get(x)
        except (TypeError, ValueError):
            return False
        return True


class Choice(Spec):
    """One of these values. Two are equal if their choices are."""

    def __init__(self, choices: collections.abc.Container[Any]):
        self._choices = choices
        super().__init__(self._one_of, f"Choice({choices!r})")

    def _one_of(self, x: Any) -> Any:
        if x not in self._choices:
            raise ValueError(f"{x!r} is not in {self._choices!r}")
        return x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choice) and self._choices == other._choices

    def __hash__(self) -> int:  # choices may be a list, which has none
        return hash(Choice)


class Optional(Spec):
    """`default` for None, and for anything else `spec`. Two are equal if both are."""

    def __init__(self, spec: Spec, default: Any = None):
        self._spec, self._default = spec, default
        super().__init__(self._or_default, f"Optional[{spec!r}, {default!r}]")

    def _or_default(self, x: Any) -> Any:
        return self._default if x is None else self._spec.get(x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Optional) and (self._spec, self._default) == (other._spec, other._default)

    def __hash__(self) -> int:
        return hash((Optional, self._spec))


def _function(x: Any) -> Any:
    if not callable(x):
        raise ValueError(f"{x!r} cannot be called")
    return x


def _dispatcher(x: Any) -> Any:
    if not isinstance(x, str | EventDispatcher):
        raise ValueError(f"{x!r} is neither an EventDispatcher nor the name of one")
    return x


Int = Spec(int, "Int")
Float = Spec(float, "Float")
Bool = Spec(bool, "Bool")
Callable = Spec(_function, "Callable")
EventDispatcherInstance = Spec(_dispatcher, "EventDispatcherInstance")

"""Filters of events: functions of an event that are true or false, combined with `&`, `|` and `~`."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lintra.compat.fast_transformers.events.event import Event


class EventFilter:
    """Base. Combines with filters, classes of events and functions of an event, on either side.

    The left one is asked first, and the right one only where it still matters.
    """

    def __call__(self, event: Any) -> Any:
        raise NotImplementedError

    def __and__(self, other: Any) -> "EventFilter":
        return _combined(self, other, lambda one, two: lambda event: one(event) and two(event))

    def __rand__(self, other: Any) -> "EventFilter":
        return _combined(other, self, lambda one, two: lambda event: one(event) and two(event))

    def __or__(self, other: Any) -> "EventFilter":
        return _combined(self, other, lambda one, two: lambda event: one(event) or two(event))

    def __ror__(self, other: Any) -> "EventFilter":
        return _combined(other, self, lambda one, two: lambda event: one(event) or two(event))

    def __invert__(self) -> "EventFilter":
        return CallableEventFilter(lambda event: not self(event))


class CallableEventFilter(EventFilter):
    """A function of an event as a filter."""

    def __init__(self, event_filter: Callable[[Any], Any]):
        self._function = event_filter

    def __call__(self, event: Any) -> Any:
        return self._function(event)


class LayerNameEventFilter(EventFilter):
    """Filter of events whose source is a module of `root` whose name there, as in its state dict, passes
    `name_filter`.

    The modules are held weakly: a filter keeps no model alive.
    """

    def __init__(self, root: nn.Module, name_filter: Callable[[str], Any]):
        self._names = WeakKeyDictionary((module, name) for name, module in root.named_modules())
        self._name_filter = name_filter

    def __call__(self, event: Any) -> Any:
        if not isinstance(event.source, nn.Module):
            return False
        name = self._names.get(event.source)
        return name is not None and self._name_filter(name)


def event_class(klass: type) -> EventFilter:
    """Events of this class."""
    return CallableEventFilter(lambda event: isinstance(event, klass))


def from_layer(layer: object) -> EventFilter:
    """Events that this module sends."""
    return CallableEventFilter(lambda event: event.source is layer)


def layer_name_contains(root: nn.Module, name: str) -> EventFilter:
    """Events of the modules of `root` with `name` in their name, such as "layers.2.attention"."""
    return LayerNameEventFilter(root, lambda found: name in found)


def _combined(one: Any, two: Any, how: Callable[[Any, Any], Callable[[Any], Any]]) -> EventFilter:
    filters = [
        event_class(part) if isinstance(part, type) and issubclass(part, Event) else part
        for part in (one, two)
    ]
    if not all(callable(part) for part in filters):
        return NotImplemented  # Python then raises TypeError with both operands in it
    return CallableEventFilter(how(*filters))

"""Dispatch of events to listeners."""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from lintra.compat.fast_transformers.events.event import Event
from lintra.compat.fast_transformers.events.filters import event_class


class EventDispatcher:
    """Call every listener whose filter is true for an event, in the order in which they were added.

        EventDispatcher.get().listen(AttentionEvent & layer_name_contains(model, "layers.2"), print)

    Modules send to the one that `get("")` gives unless they are built with another.
    """

    _dispatchers: ClassVar[dict[Hashable, "EventDispatcher"]] = {}

    def __init__(self):
        self._listeners: dict[Callable[[Any], Any], Callable[[Any], Any]] = {}

    @property
    def listening(self) -> bool:
        """Return whether there is any listener: otherwise work done only for events can be skipped."""
        return bool(self._listeners)

    def listen(self, event_filter: Callable[[Any], Any], event_handler: Callable[[Any], Any]) -> None:
        """Call `event_handler(event)` for the events of which `event_filter`, a function or class, is true.

        A handler has one filter: listening again replaces it.
        """
        if isinstance(event_filter, type) and issubclass(event_filter, Event):
            event_filter = event_class(event_filter)
        self._listeners[event_handler] = event_filter

    def remove(self, event_handler: Callable[[Any], Any]) -> None:
        """Stop calling a handler. Nothing happens if it does not listen."""
        self._listeners.pop(event_handler, None)

    def clear(self) -> None:
        """Remove all listeners."""
        self._listeners.clear()

    def dispatch(self, event: Event) -> None:
        """Show an event to the listeners. One may remove itself meanwhile."""
        if self._listeners:
            for handler, wanted in list(self._listeners.items()):
                if wanted(event):
                    handler(event)

    @classmethod
    def get(cls, key: "Hashable | EventDispatcher" = "") -> "EventDispatcher":
        """Return the dispatcher of that name, created if there is none; a dispatcher is returned as it is."""
        if isinstance(key, EventDispatcher):
            return key
        return cls._dispatchers.setdefault(key, cls())

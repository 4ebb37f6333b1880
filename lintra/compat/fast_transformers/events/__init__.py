"""Events inside the layers, reported to listeners while a model runs."""

from lintra.compat.fast_transformers.events.event import (
    AttentionEvent,
    Event,
    IntermediateOutput,
    QKVEvent,
)
from lintra.compat.fast_transformers.events.event_dispatcher import EventDispatcher

__all__ = ["AttentionEvent", "Event", "EventDispatcher", "IntermediateOutput", "QKVEvent"]

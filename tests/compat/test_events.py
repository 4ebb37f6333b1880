"""Who hears of which event."""

import gc
import weakref

import pytest
import torch
from torch import nn

from lintra.compat.fast_transformers.events import (
    AttentionEvent,
    Event,
    EventDispatcher,
    IntermediateOutput,
    QKVEvent,
)
from lintra.compat.fast_transformers.events.filters import (
    EventFilter,
    event_class,
    from_layer,
    layer_name_contains,
)

NET = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
INNER = NET[1][0]


def qkv(source: object = None) -> QKVEvent:
    return QKVEvent(source, torch.zeros(1), torch.ones(1), torch.ones(1))


def test_listeners_hear_their_events_in_their_order():
    dispatcher, heard = EventDispatcher(), []
    assert not dispatcher.listening
    first, second = (
        (lambda event: heard.append(("first", event))),
        (lambda event: heard.append(("second", event))),
    )
    dispatcher.listen(Event, first)
    dispatcher.listen(lambda event: event.source == 1, second)
    assert dispatcher.listening
    plain, one = Event(0), qkv(1)
    dispatcher.dispatch(plain)
    dispatcher.dispatch(one)
    assert heard == [("first", plain), ("first", one), ("second", one)]


def test_a_listener_has_one_filter():
    dispatcher, heard = EventDispatcher(), []
    dispatcher.listen(Event, heard.append)
    dispatcher.listen(QKVEvent, heard.append)
    dispatcher.dispatch(Event(0))
    assert heard == []
    dispatcher.dispatch(qkv())
    assert len(heard) == 1


def test_listeners_are_removed():
    dispatcher, heard = EventDispatcher(), []

    def once(event):
        heard.append(event)
        dispatcher.remove(once)

    dispatcher.listen(Event, once)
    dispatcher.listen(Event, heard.append)
    dispatcher.dispatch(Event(0))
    assert len(heard) == 2  # the other one is not left out because the first went
    dispatcher.dispatch(Event(0))
    assert len(heard) == 3
    dispatcher.remove(once)
    dispatcher.clear()
    dispatcher.dispatch(Event(0))
    assert len(heard) == 3
    assert not dispatcher.listening


def test_dispatchers_have_names():
    assert EventDispatcher.get() is EventDispatcher.get("")
    assert EventDispatcher.get("a name") is EventDispatcher.get("a name")
    assert EventDispatcher.get("a name") is not EventDispatcher.get("another")
    own = EventDispatcher()
    assert EventDispatcher.get(own) is own
    assert EventDispatcher.get(None) is EventDispatcher.get(None)


@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        (event_class(QKVEvent), [True, True, False, False]),
        (from_layer(INNER), [True, False, True, False]),
        (layer_name_contains(NET, "1.0"), [True, False, True, False]),
        (layer_name_contains(NET, "1"), [True, False, True, True]),
        (QKVEvent & from_layer(INNER), [True, False, False, False]),
        (from_layer(INNER) & QKVEvent, [True, False, False, False]),
        (QKVEvent | from_layer(INNER), [True, True, True, False]),
        (from_layer(INNER) | QKVEvent, [True, True, True, False]),
        (~from_layer(INNER), [False, True, False, True]),
        (~event_class(QKVEvent) & ~from_layer(INNER), [False, False, False, True]),
        (event_class(QKVEvent) & (lambda event: event.queries.sum() == 0), [True, True, False, False]),
        ((lambda event: isinstance(event, QKVEvent)) & from_layer(INNER), [True, False, False, False]),
    ],
)
def test_filters(wanted, passes):
    events = [qkv(INNER), qkv(None), Event(INNER), Event(NET[1])]
    assert [bool(wanted(event)) for event in events] == passes


def test_the_left_filter_is_asked_first():
    looks_inside = lambda event: event.queries.sum() == 0  # noqa: E731
    with pytest.raises(AttributeError, match="queries"):
        (looks_inside & event_class(QKVEvent))(Event(0))
    assert not (event_class(QKVEvent) & looks_inside)(Event(0))
    assert (~event_class(QKVEvent) | looks_inside)(Event(0))


def test_what_is_no_filter_cannot_be_combined():
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = from_layer(INNER) & 3
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = 3 | from_layer(INNER)


def test_own_filters_combine():
    class Small(EventFilter):
        def __call__(self, event):
            return event.queries.numel() < 2

    assert (QKVEvent & Small())(qkv())
    assert not (QKVEvent & ~Small())(qkv())


def test_a_filter_keeps_no_model_alive():
    net = nn.Sequential(nn.Linear(1, 1))
    wanted, gone = layer_name_contains(net, "0"), weakref.ref(net[0])
    assert wanted(Event(net[0]))
    del net
    gc.collect()
    assert gone() is None
    assert not wanted(Event(nn.Linear(1, 1)))


def test_events_carry_their_tensors():
    x = torch.rand(2, 3)
    assert AttentionEvent(NET, x).attention_matrix is x
    assert IntermediateOutput(NET, x).x is x
    y, z = x + 1, x + 2
    event = QKVEvent(NET, x, y, z)
    assert event.queries is x
    assert event.keys is y
    assert event.values is z
    assert event.source is NET


def test_an_attention_matrix_is_made_once_and_only_if_it_is_read():
    made = []

    def make():
        made.append(1)
        return torch.eye(2)

    event = AttentionEvent(None, make)
    assert not made
    assert torch.equal(event.attention_matrix, torch.eye(2))
    assert event.attention_matrix is event.attention_matrix
    assert made == [1]

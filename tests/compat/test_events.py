"""Which listener hears which event."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lintra.compat.fast_transformers.builders import TransformerEncoderBuilder
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
from lintra.compat.fast_transformers.masking import FullMask, TriangularCausalMask
from lintra.testing.laws import EXACT

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
    assert len(heard) == 2  # removing the first listener does not skip the second
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


SMALL = {
    "n_layers": 3,
    "n_heads": 2,
    "query_dimensions": 4,
    "value_dimensions": 5,
    "feed_forward_dimensions": 8,
}
MASKS = {
    "all": lambda: None,
    "causal": lambda: TriangularCausalMask(6),
    "any": lambda: FullMask(torch.eye(6).bool() | torch.ones(6, 6).triu().bool()),
}


def model(builder=TransformerEncoderBuilder, **options):
    """A small encoder with a dispatcher of its own, and that dispatcher."""
    torch.manual_seed(0)
    dispatcher = EventDispatcher()
    return builder.from_kwargs(event_dispatcher=dispatcher, **SMALL | options).get().double(), dispatcher


def inputs(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", MASKS)
def test_attention_shows_what_it_uses(name, dropout):
    """Each layer's weights times its values equal its output, dropout included."""
    encoder, dispatcher = model(attention_dropout=dropout)
    seen, given = [], []
    dispatcher.listen(QKVEvent, seen.append)
    for layer in encoder.layers:
        layer.attention.inner_attention.register_forward_hook(lambda _, __, y: given.append(y))
    read = []
    dispatcher.listen(AttentionEvent, lambda event: read.append(event.attention_matrix))
    encoder(inputs(2, 6, 10), MASKS[name]())
    assert [event.source for event in seen] == [layer.attention for layer in encoder.layers]
    values = [event.values for event in seen]
    assert len(read) == len(values) == len(given) == 3
    for weights, v, y in zip(read, values, given, strict=True):
        assert weights.shape == (2, 2, 6, 6)
        assert weights.requires_grad
        assert_close(torch.einsum("nhls,nshd->nlhd", weights, v), y, **EXACT)
        if not dropout:
            assert_close(weights.sum(-1), torch.ones(2, 2, 6, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("name", MASKS)
def test_listeners_change_nothing(name):
    encoder, dispatcher = model(attention_dropout=0.0, dropout=0.0)
    x, mask = inputs(2, 6, 10), MASKS[name]()
    alone = encoder(x, mask)
    dispatcher.listen(QKVEvent, lambda event: None)
    assert_close(encoder(x, mask), alone, **EXACT)
    dispatcher.listen(AttentionEvent, lambda event: event.attention_matrix.detach().zero_())
    assert_close(encoder(x, mask), alone, **EXACT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MASKS)
def test_a_listener_without_gradients_takes_none_away(name, mode):
    encoder, dispatcher = model(attention_dropout=0.0, dropout=0.0)
    x, mask = inputs(2, 6, 10).requires_grad_(), MASKS[name]()
    expected = torch.autograd.grad(encoder(x, mask).square().sum(), x)

    def look(event):
        with mode():
            assert event.attention_matrix.isfinite().all()

    dispatcher.listen(AttentionEvent, look)
    assert_close(torch.autograd.grad(encoder(x, mask).square().sum(), x), expected, **EXACT)


def test_weights_read_in_inference_stay_in_it():
    encoder, dispatcher = model()
    read = []
    dispatcher.listen(AttentionEvent, lambda event: read.append(event.attention_matrix))
    with torch.inference_mode():
        assert encoder(inputs(2, 6, 10)).is_inference()
    assert all(weights.is_inference() for weights in read)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_weights_may_be_read_after_the_forward_pass(dropout):
    """They are those of the output, with the same draws of dropout."""
    encoder, dispatcher = model(attention_dropout=dropout)
    events, values, given = [], [], []
    dispatcher.listen(AttentionEvent, events.append)
    dispatcher.listen(QKVEvent, lambda event: values.append(event.values))
    for layer in encoder.layers:
        layer.attention.inner_attention.register_forward_hook(lambda _, __, y: given.append(y))
    encoder(inputs(2, 6, 10))
    for event, v, y in zip(events, values, given, strict=True):
        assert_close(torch.einsum("nhls,nshd->nlhd", event.attention_matrix, v), y, **EXACT)


def test_every_layer_shows_its_output():
    encoder, dispatcher = model(attention_type="linear", final_normalization=False, dropout=0.0)
    seen, given = [], []
    dispatcher.listen(IntermediateOutput, seen.append)
    for layer in encoder.layers:
        layer.register_forward_hook(lambda _, __, y: given.append(y))
    y = encoder(inputs(2, 6, 10))
    assert [event.source for event in seen] == [encoder] * 3
    assert all(event.x is x for event, x in zip(seen, given, strict=True))
    assert seen[-1].x is y


def test_names_of_layers_choose():
    encoder, dispatcher = model()
    seen = []
    dispatcher.listen(QKVEvent & layer_name_contains(encoder, "layers.2.attention"), seen.append)
    encoder(inputs(2, 6, 10))
    assert [event.source for event in seen] == [encoder.layers[2].attention]
    assert [x.shape[-1] for x in (seen[0].queries, seen[0].keys, seen[0].values)] == [4, 4, 5]

"""Registering types, and what their parameters may be."""

import pytest
from torch import nn

from lintra.compat.fast_transformers.attention_registry import (
    AttentionRegistry,
    Bool,
    Callable,
    Choice,
    EventDispatcherInstance,
    Float,
    Int,
    Optional,
    RecurrentAttentionRegistry,
    RecurrentCrossAttentionRegistry,
    Spec,
)
from lintra.compat.fast_transformers.attention_registry.registry import Registry
from lintra.compat.fast_transformers.events import EventDispatcher


class One(nn.Module):
    pass


class Two(nn.Module):
    pass


def test_a_registry_knows_types_and_parameters():
    registry = Registry()
    registry.register("one", One, [("width", Int), ("rate", Optional(Float, 0.5))])
    registry.register("two", Two, [("rate", Optional(Float, 0.5)), ("kind", Choice(["a", "b"]))])
    assert registry.keys == ["one", "two"]
    assert "one" in registry
    assert "three" not in registry
    assert registry["two"] == (Two, ["rate", "kind"])
    assert registry.contains_parameter("width")
    assert not registry.contains_parameter("one")
    assert registry.validate_parameter("width", "3") == 3
    assert registry.validate_parameter("rate", None) == 0.5
    assert registry.validate_parameter("kind", "b") == "b"


def test_a_registry_refuses():
    registry = Registry()
    registry.register("one", One, [("rate", Optional(Float))])
    with pytest.raises(ValueError, match="'one' is already registered, as One"):
        registry.register("one", Two, [])
    with pytest.raises(ValueError, match=r"rate is already registered with Optional\[Float, None\], not Int"):
        registry.register("two", Two, [("width", Int), ("rate", Int)])
    assert registry.keys == ["one"]
    assert not registry.contains_parameter("width")  # a refused type leaves nothing behind
    for value in ("fast", [1], object()):
        with pytest.raises(ValueError, match=r"rate must be Optional\[Float, None\], got"):
            registry.validate_parameter("rate", value)
    with pytest.raises(ValueError, match="no registered type takes a parameter 'speed'"):
        registry.validate_parameter("speed", 1)


def test_a_spec_that_raises_key_error_is_not_taken_for_an_unknown_parameter():
    registry = Registry()
    registry.register("one", One, [("kind", Spec({"a": 1}.__getitem__, "Kind"))])
    assert registry.validate_parameter("kind", "a") == 1
    with pytest.raises(ValueError, match="kind must be Kind, got 'b'"):
        registry.validate_parameter("kind", "b")


@pytest.mark.parametrize(
    ("spec", "name", "good", "bad"),
    [
        (Int, "Int", [(3, 3), ("4", 4), (2.0, 2)], ["x", None]),
        (Float, "Float", [(1, 1.0), ("1e-3", 1e-3)], ["x", None]),
        (Bool, "Bool", [(0, False), (1, True)], []),
        (Callable, "Callable", [(len, len), (One, One)], [1, None]),
        (EventDispatcherInstance, "EventDispatcherInstance", [("", ""), ("name", "name")], [1, None]),
        (Choice(("a", None)), "Choice(('a', None))", [("a", "a"), (None, None)], ["b"]),
        (Optional(Int, 7), "Optional[Int, 7]", [(None, 7), ("3", 3)], ["x"]),
    ],
)
def test_specs(spec, name, good, bad):
    assert isinstance(spec, Spec)
    assert repr(spec) == name
    for given, canonical in good:
        assert spec.get(given) == canonical
        assert spec.check(given)
    for value in bad:
        assert not spec.check(value)
        with pytest.raises((ValueError, TypeError)):
            spec.get(value)


def test_equal_specs():
    assert Choice({1, 2}) == Choice({2, 1})
    assert hash(Choice([1])) == hash(Choice([1]))
    assert Choice({1}) != Choice({2})
    assert Optional(Int) == Optional(Int, None)
    assert hash(Optional(Int, [1])) == hash(Optional(Int, [1]))
    assert Optional(Int) != Optional(Int, 1)
    assert Optional(Int) != Optional(Float)
    assert Optional(Int) != Int
    assert Spec(int) != Spec(int)
    assert repr(Spec(int)) == "CustomSpec"
    dispatcher = EventDispatcher()
    assert EventDispatcherInstance.get(dispatcher) is dispatcher


def test_the_three_registries_are_apart():
    registries = (AttentionRegistry, RecurrentAttentionRegistry, RecurrentCrossAttentionRegistry)
    assert len({id(registry) for registry in registries}) == 3
    for registry in registries:
        assert isinstance(registry, Registry)

"""Nested data and tensors survive the conversion to JSON and back; what cannot is refused."""

import json
import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lintra.train.tree_json import flatten, unflatten

keys = st.one_of(
    st.text(max_size=5), st.integers(), st.sampled_from(["$tensor", "$tuple", "$pairs", "$float", "a/b"])
)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
)


def round_trip(value):
    tree, tensors = flatten(value)
    return unflatten(json.loads(json.dumps(tree, allow_nan=False)), tensors)


@given(plain)
def test_plain_data(value):
    again = round_trip(value)
    assert repr(again) == repr(value)  # it distinguishes 1 from True and 0.0 from -0.0


def test_tensors_and_optimizer_state():
    weight = torch.nn.Parameter(torch.randn(3, 2))
    optimizer = torch.optim.RAdam([weight])
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    again = round_trip({"state": [state], "scalar": torch.tensor(3), 0: math.inf})
    assert again["state"][0]["param_groups"] == state["param_groups"]
    for name, value in state["state"][0].items():
        assert torch.equal(again["state"][0]["state"][0][name], value)
    assert again["scalar"].dtype == torch.int64
    assert again[0] == math.inf
    assert math.isnan(round_trip(math.nan))


@given(st.lists(keys, max_size=6, unique_by=repr))
def test_tensors_under_any_keys_keep_apart(names):
    tensors = {name: torch.tensor(i) for i, name in enumerate(names)}
    tensors["deep"] = {name: torch.tensor(-i) for i, name in enumerate(names)}
    again = round_trip(tensors)
    assert {k: int(v) for k, v in again["deep"].items()} == {k: int(v) for k, v in tensors["deep"].items()}
    assert {k: int(v) for k, v in again.items() if k != "deep"} == {
        k: int(v) for k, v in tensors.items() if k != "deep"
    }


def test_refuses_what_it_would_have_to_pickle():
    with pytest.raises(TypeError, match="/callbacks/x is Event"):
        flatten({"callbacks": {"x": threading.Event()}})


def test_says_which_tensor_is_missing():
    tree, _ = flatten({"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="/a is missing"):
        unflatten(tree, {})

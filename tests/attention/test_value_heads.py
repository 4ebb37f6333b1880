"""More value heads than key heads: what they are, at any numbers of heads, and what is refused."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch.testing import assert_close

from lintra import attention
from lintra.attention import delta, gated, kda, retention, ssd
from lintra.testing import laws
from lintra.testing.laws import EXACT, Case, extra_inputs, forward, gradients

CONFIGS = [
    delta.Config(),
    delta.Config(decay=False, conv=None, gate=False),
    kda.Config(),
    gated.Config(),
    ssd.Config(),
    retention.Config(),
    retention.Config(decay_per="kv_head"),
]
each = pytest.mark.parametrize("config", CONFIGS, ids=str)
HEADS = [(2, 2, 4), (1, 1, 3), (2, 1, 2), (4, 1, 2), (3, 1, 6)]  # of queries, keys and values
BY_KEY = {"conv_q", "conv_k", "bias_q", "bias_k"}  # parameters of queries and of keys


def case_of(config, heads=2, kv_heads=2, value_heads=None) -> Case:
    name = attention.name_of(type(config))
    assert name is not None
    return Case(name, replace(config, value_heads=value_heads), True, heads=heads, kv_heads=kv_heads)


@each
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_any_numbers_of_heads(config, heads):
    """Parallel, step by step, resumed, padded and packed: all equal the definition."""
    case = case_of(config, *heads)
    laws.equals_its_definition(case, import_module(f"tests.attention.test_{case.name}").dense)
    laws.parallel_is_recurrent(case)
    laws.padding_is_absence(case)
    laws.packed_is_each_alone(case)


@each
def test_a_key_head_is_repeated_for_its_value_heads(config):
    case, wide = case_of(config, value_heads=4), case_of(config, 4, 4)
    built, repeated = case.build(), wide.build()
    with torch.no_grad():
        for name, x in repeated.state_dict().items():
            own = built.state_dict()[name]
            x.copy_(own.repeat_interleave(2, 0) if name in BY_KEY else own)
    assert extra_inputs(case) == extra_inputs(wide)
    q, k, v, *extra = case.draw()
    y = forward(case, built, q, k, v, *extra)
    expected = forward(wide, repeated, *(x.repeat_interleave(2, 2) for x in (q, k)), v, *extra)
    inputs = [q, k, v, *extra]
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@each
def test_as_many_as_key_heads_change_nothing(config):
    """Parameters, extra inputs and numbers stay the same."""
    given, absent = case_of(config, 4, 2, 2), case_of(config, 4, 2)
    first, second = given.build(), absent.build()
    assert list(first.state_dict()) == list(second.state_dict())
    assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    assert extra_inputs(given) == extra_inputs(absent)
    found = [forward(case, case.build(), *case.draw()) for case in (given, absent)]
    assert_close(*found, rtol=0, atol=0)


@each
def test_each_value_head_has_a_state(config):
    built = case_of(config, 2, 2, 6).build()
    assert built.start(5).kv.shape == (5, 6, built.dim, built.value_dim)


def test_one_query_and_key_for_all_heads_is_the_layer_of_mamba_2():
    """Steps, rates and skips are per value head."""
    built = ssd.Config(value_heads=6).build(heads=1, dim=8, value_dim=4, causal=True)
    assert built.extra_inputs() == {"dt": 6, "gate": 24}
    assert built.A_log.shape == built.dt_bias.shape == built.D.shape == (6,)
    assert built.norm.shape == (24,)


@each
def test_numbers_that_do_not_divide_are_refused(config):
    def build(value_heads):
        replace(config, value_heads=value_heads).build(heads=6, kv_heads=2, dim=4, causal=True)

    with pytest.raises(ValueError, match="value_heads must be a multiple of the key heads, got 3 and g=2"):
        build(3)
    with pytest.raises(ValueError, match="value_heads must be a multiple of the key heads, got 1 and g=2"):
        build(1)
    with pytest.raises(ValueError, match=r"value_heads must divide the query heads or .* got 4 and h=6"):
        build(4)
    with pytest.raises(ValueError, match="value_heads must be at least 1, got 0"):
        build(0)
    with pytest.raises(TypeError, match=r"value_heads must be int or None, got 4\.0"):
        build(4.0)


@each
def test_values_of_another_number_of_heads_are_refused(config):
    case = case_of(config, value_heads=4)
    q, k, v, *extra = case.draw()
    with pytest.raises(ValueError, match=r"v must be \[b=2 s=19 o=4 e=4\], got shape \[2, 19, 2, 4\]"):
        forward(case, case.build(), q, k, v[:, :, :2], *extra)

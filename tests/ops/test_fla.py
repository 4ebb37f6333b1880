"""The ops compared with the oracles of flash-linear-attention (FLA): plain PyTorch in float32.

They are read from their files, since the package around them requires a GPU.
"""

from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra import native
from lintra.ops import LinearState, linear_attention
from lintra.testing.laws import gradients
from tests.compat.fla.cases import naive  # skips this file too where FLA is not installed

IMPLS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason="no C++"))]
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # for float32, over 50 tokens


def draw(g=2, values=2, t=50, d=8, e=12):
    """q, k, v, decays of features, decays of heads, beta and a state of 2 sequences, float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(g, d), (g, d), (values, e), (values, d), (values,), (values,)]
    q, k, v, fine, coarse, beta = (torch.randn(2, t, *shape, generator=generator) for shape in shapes)
    state = torch.randn(2, values, d, e, generator=generator)
    k, fine, coarse = functional.normalize(k, dim=-1), -fine.abs(), -coarse.abs()
    return [x.requires_grad_() for x in (q, k, v, fine, coarse, beta.sigmoid().detach(), state)]


def heads_first(function):
    """Turn a function of tensors [b h t ...] into one of [b t h ...]."""
    return lambda *x, **options: function(*(each.transpose(1, 2) for each in x), **options)


def ours(*qkv, state=None, impl, **options):
    z = (
        None
        if state is None
        else state.new_zeros(*state.shape[:2], 0 if recurs(options) else qkv[0].shape[3])
    )
    before = None if state is None else LinearState(state, z)
    options = {"normalize": False, "scale": qkv[0].shape[3] ** -0.5, **options}
    y, after = linear_attention(*qkv, state=before, impl=impl, **options)
    return y, after.kv


def recurs(options):
    return "beta" in options or options.get("log_decay", torch.empty(0)).dim() == 4


def agree(found, expected, inputs):
    (y, state), (other, after) = found, expected
    pairs = [(y, other)] if after is None else [(y, other), (state, after)]
    sums = [torch.cat([pair[i].flatten() for pair in pairs]) for i in range(2)]
    assert_close(*sums, **CLOSE)
    weights = torch.linspace(-1, 1, len(sums[0]))
    assert_close(*(gradients(x * weights, inputs) for x in sums), rtol=2e-4, atol=2e-4)


impls = pytest.mark.parametrize("impl", IMPLS)


@impls
def test_linear_attention(impl):
    q, k, v, *_, state = draw()
    call = naive("linear_attn", "naive_recurrent_linear_attn")
    expected = call(q, k, v, initial_state=state, output_final_state=True)
    agree(ours(q, k, v, state=state, impl=impl), expected, [q, k, v, state])


@impls
def test_normalized_linear_attention(impl):
    q, k, v, *_, state = draw()
    q, k = q.exp(), k.exp()
    call, z = naive("linear_attn", "naive_recurrent_linear_attn"), state[..., 0].detach().abs()
    options = {"initial_state": (state, z[:, None]), "output_final_state": True, "normalize": True}
    expected, (kv, after) = call(q, k, v, **options)
    y, found = linear_attention(q, k, v, state=LinearState(state, z), eps=0.0, impl=impl)
    assert_close([y, found.kv, found.z], [expected, kv, after[:, 0]], **CLOSE)


@impls
def test_simple_gla(impl):
    q, k, v, _, decay, _, state = draw()
    expected = naive("simple_gla", "naive_recurrent_simple_gla")(q, k, v, decay, initial_state=state)
    agree(ours(q, k, v, log_decay=decay, state=state, impl=impl), expected, [q, k, v, decay, state])


@impls
def test_retention(impl):
    q, k, v, *_ = draw()
    log_decay = (1 - 2.0 ** (-5 - torch.arange(2.0))).log().expand(2, 50, 2)
    expected = heads_first(naive("retention", "naive_retention"))(q, k, v).transpose(1, 2)
    agree(ours(q, k, v, log_decay=log_decay, impl=impl), (expected, None), [q, k, v])


@impls
def test_gla(impl):
    q, k, v, decay, _, _, state = draw()
    call = partial(naive("gla", "naive_recurrent_gla"), output_final_state=True)
    expected = call(q, k, v, decay, initial_state=state)
    agree(ours(q, k, v, log_decay=decay, state=state, impl=impl), expected, [q, k, v, decay, state])


@impls
def test_delta_rule(impl):
    q, k, v, _, _, beta, state = draw()
    call = heads_first(naive("delta_rule", "delta_rule_recurrence"))
    y, after = call(q, k, v, beta, initial_state=state)
    found = ours(q, k, v, beta=beta, state=state, impl=impl)
    agree(found, (y.transpose(1, 2), after), [q, k, v, beta, state])


@impls
def test_gated_delta_rule(impl):
    q, k, v, _, decay, beta, state = draw()
    call = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    expected = call(q, k, v, beta, decay, initial_state=state, output_final_state=True)
    found = ours(q, k, v, log_decay=decay, beta=beta, state=state, impl=impl)
    agree(found, expected, [q, k, v, decay, beta, state])


@impls
def test_kda_with_more_value_heads_than_key_heads(impl):
    q, k, v, decay, _, beta, state = draw(values=4)
    call = partial(naive("kda", "naive_recurrent_kda"), output_final_state=True)
    expected = call(q, k, v, decay, beta, initial_state=state)
    found = ours(q, k, v, log_decay=decay, beta=beta, state=state, impl=impl)
    agree(found, expected, [q, k, v, decay, beta, state])

"""The ops compared with what transformers computes without a GPU: recurrences, convolutions, mixers.

In float32, in which transformers computes whatever it is given.
"""

from functools import partial
from importlib import import_module

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra import native
from lintra.attention import delta, ssd
from lintra.nn import AttentionLayer
from lintra.ops import LinearState, causal_conv1d, linear_attention, selective_scan
from lintra.testing.laws import gradients

IMPLS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason="no C++"))]
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # for float32, over 150 tokens
both = pytest.mark.parametrize("impl", IMPLS)


def draw(rates=(), t=150, g=2, d=8, e=12):
    """q, unit keys, v, decays, beta and a state of 2 sequences, all differentiable."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, t, g, d), (2, t, g, d), (2, t, g, e), (2, t, g, *rates), (2, t, g), (2, g, d, e)]
    q, k, v, decay, beta, state = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = q, functional.normalize(k, dim=-1), v, -decay.abs() / 4, beta.sigmoid(), state
    return [x.requires_grad_() for x in inputs]


def results(call, inputs):
    """y, the state after, and the gradients of an uneven sum over both."""
    y, state = call(*inputs)
    return [y, state, *gradients(torch.cat((y.flatten(), state.flatten())), inputs)]


def ours(q, k, v, decay, beta, state, *, impl):
    options = {"normalize": False, "scale": q.shape[-1] ** -0.5, "impl": impl}
    y, after = linear_attention(q, k, v, log_decay=decay, beta=beta, state=LinearState.of(state), **options)
    return y, after.kv


def theirs(function, q, k, v, decay, beta, state):
    return function(q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True)


@both
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_gated_delta_rule(fallback_module, name, impl):
    function = getattr(fallback_module("qwen3_next"), name)
    inputs = draw()
    expected = results(partial(theirs, function), inputs)
    assert_close(results(partial(ours, impl=impl), inputs), expected, **CLOSE)


@both
@pytest.mark.parametrize("name", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_kimi_delta_attention(fallback_module, name, impl):
    function = getattr(fallback_module("kimi_linear"), name)
    inputs = draw(rates=(8,))
    expected = results(partial(theirs, function), inputs)
    assert_close(results(partial(ours, impl=impl), inputs), expected, **CLOSE)


@both
def test_the_causal_convolution(fallback_module, impl):
    module = fallback_module("qwen3_next")
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, state = (
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((2, 30, 20), (20, 4), (20,), (2, 3, 20))
    )
    call = partial(causal_conv1d, activation="silu", impl=impl)
    inputs = [x, weight, bias]
    y = call(*inputs)[0]
    expected = module.causal_conv1d_fn(x.mT, weight, bias, activation="silu").mT
    assert_close(y, expected, **CLOSE)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **CLOSE)
    with torch.no_grad():
        kept = state.mT.clone()
        expected = module.causal_conv1d_update(x[:, :1].mT, kept, weight, bias, activation="silu").mT
        y, after = call(x[:, :1], weight, bias, state=state)
    assert_close([y, after.mT], [expected, kept], **CLOSE)


@both
def test_the_layer_of_qwen3_next(fallback_module, impl):
    """Gated DeltaNet with three value heads per key head; lintra projects to all queries, then all keys."""
    config = import_module("transformers.models.qwen3_next.configuration_qwen3_next").Qwen3NextConfig(
        hidden_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    mixer = fallback_module("qwen3_next").Qwen3NextGatedDeltaNet(config, 0)
    layer = AttentionLayer(16, delta.Config(value_heads=6, impl=impl), heads=2, bias=False)
    q, k, v, gate = mixer.in_proj_qkvz.weight.unflatten(0, (2, -1)).split((8, 8, 24, 24), 1)
    beta, decay = mixer.in_proj_ba.weight.unflatten(0, (2, -1)).split((3, 3), 1)
    qkv = [x.flatten(0, 1) for x in (q, k, v)]
    conv = (x.unflatten(0, (-1, 8)) for x in mixer.conv1d.weight[:, 0].split((16, 16, 48)))
    weights = {"qkv_proj.weight": torch.cat(qkv), "out_proj.weight": mixer.out_proj.weight}
    weights |= {
        f"extra_proj.{name}.weight": x.flatten(0, 1)
        for name, x in (("beta", beta), ("decay", decay), ("gate", gate))
    }
    weights |= {f"attention.conv_{name}": x for name, x in zip("qkv", conv, strict=True)}
    weights |= {f"attention.{name}": mixer.get_parameter(name) for name in ("A_log", "dt_bias")}
    weights["attention.norm"] = mixer.norm.weight
    layer.load_state_dict(weights)
    x = torch.randn(2, 150, 16).requires_grad_()
    y, expected = layer(x), mixer(x)
    assert_close(y, expected, **CLOSE)
    assert_close(gradients(y, [x]), gradients(expected, [x]), **CLOSE)
    found, state = layer.extend(x[:, :100])
    assert_close(torch.cat((found, layer.extend(x[:, 100:], state)[0]), 1), expected, **CLOSE)


@both
def test_the_mixer_of_mamba_2(fallback_module, impl):
    """A whole layer from two ops: one group of keys and queries for every two value heads."""
    config = import_module("transformers.models.mamba2.configuration_mamba2").Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, state_size=6, n_groups=2, expand=2, conv_kernel=4
    )
    torch.manual_seed(0)
    mixer = fallback_module("mamba2").Mamba2Mixer(config, 0)
    x = torch.randn(2, 150, 16).requires_grad_()

    def mix(x):
        z, mixed, dt = mixer.in_proj(x).split((32, 56, 4), -1)
        mixed, _ = causal_conv1d(
            mixed, mixer.conv1d.weight[:, 0], mixer.conv1d.bias, activation="silu", impl=impl
        )
        v, k, q = mixed.split((32, 12, 12), -1)
        v, k, q = v.unflatten(2, (4, 8)), k.unflatten(2, (2, 6)), q.unflatten(2, (2, 6))
        step = functional.softplus(dt + mixer.dt_bias)
        decay = -mixer.A_log.exp() * step
        options = {"log_decay": decay, "normalize": False, "impl": impl}
        y, _ = linear_attention(q, k, step[..., None] * v, **options)
        return mixer.out_proj(mixer.norm((y + mixer.D[:, None] * v).flatten(2), z))

    inputs = [x, *mixer.parameters()]
    y, expected = mix(x), mixer(x)
    assert_close(y, expected, **CLOSE)
    # Gradients of parameters are sums over 300 tokens.
    assert_close(gradients(y, inputs), gradients(expected, inputs), rtol=1e-3, atol=1e-3)


@both
def test_the_mechanism_of_mamba_2(fallback_module, impl):
    """The same with `ssd`: one query and one key for all value heads. transformers norms each group alone."""
    sizes = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 6, "n_groups": 1}
    config = import_module("transformers.models.mamba2.configuration_mamba2").Mamba2Config(
        **sizes, expand=2, conv_kernel=4, layer_norm_epsilon=1e-6
    )
    torch.manual_seed(0)
    mixer = fallback_module("mamba2").Mamba2Mixer(config, 0)
    attention = ssd.Config(value_heads=4, impl=impl).build(heads=1, dim=6, value_dim=8, causal=True)
    weights = {name: mixer.get_parameter(name) for name in ("A_log", "D", "dt_bias", "norm.weight")}
    weights["norm"] = weights.pop("norm.weight")
    for kind, x in (("conv", mixer.conv1d.weight[:, 0]), ("bias", mixer.conv1d.bias)):
        for name, part, d in zip("vkq", x.split((32, 6, 6)), (8, 6, 6), strict=True):
            weights[f"{kind}_{name}"] = part.unflatten(0, (-1, d))
    attention.load_state_dict(weights)
    x = torch.randn(2, 150, 16)
    gate, v, k, q, dt = mixer.in_proj(x).split((32, 32, 6, 6, 4), -1)
    q, k, v = (part.unflatten(2, (-1, d)) for part, d in ((q, 6), (k, 6), (v, 8)))
    y = attention(q, k, v, dt=dt, gate=gate).flatten(2)
    assert_close(mixer.out_proj(y), mixer(x), **CLOSE)


@both
def test_the_mixer_of_mamba(fallback_module, impl):
    config = import_module("transformers.models.mamba.configuration_mamba").MambaConfig(
        hidden_size=16, state_size=6, expand=2, conv_kernel=4, time_step_rank=3
    )
    torch.manual_seed(0)
    mixer = fallback_module("mamba").MambaMixer(config, 0)
    x = torch.randn(2, 70, 16).requires_grad_()

    def mix(x):
        u, z = mixer.in_proj(x).chunk(2, -1)
        u, _ = causal_conv1d(u, mixer.conv1d.weight[:, 0], mixer.conv1d.bias, activation="silu", impl=impl)
        low, B, C = mixer.x_proj(u).split((3, 6, 6), -1)
        dt, bias = low @ mixer.dt_proj.weight.mT, mixer.dt_proj.bias
        y, _ = selective_scan(u, dt, -mixer.A_log.exp(), B, C, mixer.D, z, bias, True, impl=impl)
        return mixer.out_proj(y)

    inputs = [x, *mixer.parameters()]
    y, expected = mix(x), mixer(x)
    assert_close(y, expected, **CLOSE)
    # Gradients of parameters are sums over 140 tokens.
    assert_close(gradients(y, inputs), gradients(expected, inputs), rtol=1e-3, atol=1e-3)

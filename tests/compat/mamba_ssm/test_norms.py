"""Norms with a gate and of a residual stream, beside PyTorch's own."""

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra.compat.mamba_ssm.ops.triton import layer_norm, layernorm_gated
from lintra.testing.laws import gradients, raises
from tests.compat.mamba_ssm import loops


def draw(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 12), (12,), (12,), (2, 5, 12))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("size", [None, 4])
def test_the_gated_norm(size, before):
    x, weight, _, z = inputs = draw()
    y = layernorm_gated.rmsnorm_fn(x, weight, None, z, 1e-5, size, before)
    expected = loops.rms_norm(x, weight, z, 1e-5, size or 12, before)
    assert_close([y, *gradients(y, inputs)], [expected, *gradients(expected, inputs)])
    module = layernorm_gated.RMSNorm(12, group_size=size, norm_before_gate=before, dtype=torch.float64)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    module.load_state_dict({"weight": weight})
    assert_close(module(x, z), y)


def test_layer_norms():
    x, weight, bias, residual = draw()
    expected = functional.layer_norm(x, (12,), weight, bias, 1e-5)
    assert_close(layernorm_gated.layernorm_fn(x, weight, bias, eps=1e-5), expected)
    module = layernorm_gated.LayerNorm(12, dtype=torch.float64)
    module.load_state_dict({"weight": weight, "bias": bias})
    assert_close(module(x), expected)
    expected = functional.layer_norm(x + residual, (12,), weight, bias, 1e-6)
    y, kept = layer_norm.layer_norm_fn(x, weight, bias, residual, prenorm=True)
    assert_close([y, kept], [expected, x + residual])
    assert_close(layer_norm.layer_norm_fn(x, weight, bias, residual), expected)


def test_the_norm_of_a_residual_stream():
    x, weight, _, residual = draw(torch.float32)
    module = layer_norm.RMSNorm(12)
    module.load_state_dict({"weight": weight})
    half = x.bfloat16()
    y, kept = module(half, residual, prenorm=True, residual_in_fp32=True)
    assert (y.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
    assert_close(kept, half.float() + residual)
    assert_close(y, functional.rms_norm(kept, (12,), weight, 1e-5).bfloat16())
    assert module(half, prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32
    assert module(half, prenorm=True)[1].dtype == torch.bfloat16


def test_refusals():
    x, weight, bias, z = draw()
    call = layer_norm.rms_norm_fn
    for name, value in {"x1": x, "weight1": weight, "bias1": bias, "rowscale": z, "dropout_p": 0.1}.items():
        raises(NotImplementedError, f"{name} is not supported", call, x, weight, None, **{name: value})
    raises(NotImplementedError, "return_dropout_mask", call, x, weight, None, return_dropout_mask=True)
    raises(ValueError, "residual must", call, x, weight, None, x[0])
    raises(ValueError, "group_size", layernorm_gated.rmsnorm_fn, x, weight, None, group_size=5)
    raises(ValueError, "weight must be", layernorm_gated.rmsnorm_fn, x, weight[1:], None)
    raises(ValueError, "z must have", layernorm_gated.rmsnorm_fn, x, weight, None, z[0])

"""The short convolution of whole sequences, compared with that of PyTorch and with transformers."""

import pytest
import torch
from torch.testing import assert_close

from lintra.compat.causal_conv1d import causal_conv1d_fn
from lintra.compat.causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
from lintra.testing.laws import raises
from tests.compat.mamba_ssm.loops import convolution, everything

EXACT = {"rtol": 1e-9, "atol": 1e-9}  # for float64


def draw(t=20, w=4, d=11, dtype=torch.float64):
    """x, weight, bias and initial states, all differentiable."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, t, d), (d, w), (d,), (2, w - 1, d))
    x, weight, bias, state = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return [y.requires_grad_() for y in (x.mT, weight, bias, state.mT)]


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("w", [2, 3, 4, 6])
@pytest.mark.parametrize("t", [1, 20])
def test_from_states_to_states(t, w, activation):
    inputs = draw(t, w)
    x, weight, bias, state = inputs
    y = causal_conv1d_fn(
        x, weight, bias, initial_states=state, return_final_states=True, activation=activation
    )
    line = torch.cat((state, x), 2)
    expected = convolution(line, weight, bias, activation is not None)[..., w - 1 :], line[..., t:]
    assert_close(everything(y, inputs), everything(expected, inputs), **EXACT)


def test_states_may_be_written_over_before_the_backward():
    """By the final states: `final_states_out` may be `initial_states`."""
    inputs = draw()
    x, weight, bias, state = inputs
    expected = causal_conv1d_fn(x, weight, bias, initial_states=state, return_final_states=True)
    held = state.clone()
    y = causal_conv1d_fn(x, weight, bias, None, held, return_final_states=True, final_states_out=held)
    assert y[1] is held
    assert_close(everything(y, inputs), everything(expected, inputs), rtol=0, atol=0)


@pytest.mark.parametrize("contiguous", [False, True])
def test_what_may_be_missing(contiguous):
    x, weight, bias, _ = draw()
    x = x.detach().contiguous() if contiguous else x.detach()
    assert_close(causal_conv1d_fn(x, weight), convolution(x, weight, None, False), **EXACT)
    assert_close(causal_conv1d_fn(x, weight, bias, activation="silu"), convolution(x, weight, bias), **EXACT)


def test_equals_the_fallback(fallback_module):
    module = fallback_module("mamba2")
    x, weight, bias, _ = draw(dtype=torch.float32)
    expected = module.causal_conv1d_fn.__wrapped__(x, weight, bias, activation="silu")
    assert_close(causal_conv1d_fn(x, weight, bias, activation="silu"), expected)


def test_final_states_are_written_to():
    x, weight, bias, _ = (y.detach() for y in draw())
    out = torch.full((2, 11, 3), torch.nan, dtype=torch.float64)
    y, last = causal_conv1d_fn(x, weight, bias, return_final_states=True, final_states_out=out)
    assert last is out
    assert_close(out, x[..., -3:], rtol=0, atol=0)
    assert_close(y, causal_conv1d_fn(x, weight, bias), rtol=0, atol=0)


def test_packed_sequences_are_each_alone():
    inputs = draw()[:3]
    x, weight, bias = inputs
    numbers = torch.tensor([[0] * 5 + [1] + [2] * 14, [7] * 12 + [-1] * 8], dtype=torch.int32)
    y = causal_conv1d_fn(x, weight, bias, seq_idx=numbers, activation="silu")
    spans = [[(0, 5), (5, 6), (6, 20)], [(0, 12)]]
    rows = [
        torch.cat([convolution(x[i : i + 1, :, first:end], weight, bias) for first, end in spans[i]], 2)
        for i in range(2)
    ]
    rows[1] = torch.nn.functional.pad(rows[1], (0, 8))  # numbers below 0 are padding
    assert_close(everything([y], inputs), everything([torch.cat(rows)], inputs), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    halves = [y.detach().to(dtype) for y in draw(dtype=torch.float32)]
    x, weight, bias, state = halves
    y, last = causal_conv1d_fn(
        x, weight, bias, initial_states=state, return_final_states=True, activation="silu"
    )
    expected = convolution(torch.cat((state, x), 2).double(), weight.double(), bias.double())[..., 3:]
    assert y.dtype == last.dtype == dtype
    assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert_close(last, x[..., -3:], rtol=0, atol=0)


def test_last_inputs_of_packed_sequences():
    x = torch.arange(1.0, 25.0).view(12, 2)
    states = causal_conv1d_varlen_states(x, torch.tensor([0, 2, 2, 12]), 4)
    assert states.shape == (3, 2, 4)
    assert_close(states[0], torch.tensor([[0, 0, 1.0, 3], [0, 0, 2, 4]]))
    assert not states[1].any()
    assert_close(states[2], x[-4:].mT)
    raises(ValueError, "cu_seqlens", causal_conv1d_varlen_states, x, torch.tensor([0, 11]), 4)
    raises(ValueError, "state_len", causal_conv1d_varlen_states, x, torch.tensor([0, 12]), -1)


def test_a_caller_may_be_compiled():
    x, weight, bias, _ = (y.detach() for y in draw(dtype=torch.float32))
    torch.compiler.reset()
    y = torch.compile(causal_conv1d_fn, backend="aot_eager")(x, weight, bias, activation="silu")
    assert_close(y, causal_conv1d_fn(x, weight, bias, activation="silu"))


def test_refusals():
    x, weight, bias, state = draw()
    call = causal_conv1d_fn
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(x, weight, bias, cu_seqlens=None)
    raises(NotImplementedError, "activation is not supported", call, x, weight, bias, activation="gelu")
    raises(ValueError, "weight must be", call, x, weight[:3], bias)
    raises(ValueError, "bias must be", call, x, weight, bias[:3])
    raises(ValueError, "states must hold", call, x, weight, bias, initial_states=state[..., 1:])
    raises(ValueError, "final_states_out must", call, x, weight, bias, final_states_out=state[:1])
    numbers = torch.zeros(2, 20, dtype=torch.int32)
    raises(ValueError, "excludes", call, x, weight, bias, seq_idx=numbers, initial_states=state)
    raises(ValueError, "excludes", call, x, weight, bias, seq_idx=numbers, return_final_states=True)
    raises(TypeError, "seq_idx must be", call, x, weight, bias, seq_idx=numbers.float())

"""The short causal convolution in PyTorch and in C++: the definition, its limits, what it refuses."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.testing import assert_close

from lintra import native
from lintra.ops import causal_conv1d, causal_conv1d_reference
from lintra.testing.laws import EXACT, gradients, some_masks

needs_native = pytest.mark.skipif(not native.available(), reason="no C++")
both = pytest.mark.parametrize("impl", ["torch", pytest.param("native", marks=needs_native)])
widths = pytest.mark.parametrize("width", [1, 2, 3, 4, 7])


def draw(b=2, t=9, c=5, width=4, *, dtype=torch.float64, seed=0):
    """x, weight, bias and a state, all differentiable."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = [(b, t, c), (c, width), (c,), (b, width - 1, c)]
    x, *others = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [y.requires_grad_() for y in (x.to(dtype), *(y.to(total) for y in others))]


def fast(x, weight, bias, state, **options):
    return causal_conv1d(x, weight, bias, activation="silu", state=state, **options)


def reference(x, weight, bias, state, mask=None, silu=True):
    return causal_conv1d_reference(x, weight, bias, state, mask, silu)


def results(call, inputs):
    """y, the last inputs, and the gradients of an uneven sum over both."""
    y, state = call(*inputs)
    used = [x for x in inputs if x is not None and x.numel()]
    return [y, state, *gradients(torch.cat((y.flatten(), state.flatten())), used)]


@both
@settings(max_examples=40)
@given(data=st.data())
def test_it_is_the_definition(impl, data):
    inputs = draw(
        b=data.draw(st.integers(0, 3), label="b"),
        t=data.draw(st.sampled_from([0, 1, 2, 3, 5, 40]), label="t"),
        c=data.draw(st.sampled_from([1, 5, 16, 127, 128, 129, 300]), label="c"),
        width=data.draw(st.integers(1, 6), label="width"),
    )
    silu, biased = data.draw(st.booleans(), label="silu"), data.draw(st.booleans(), label="bias")
    inputs[2] = inputs[2] if biased else None
    call = partial(causal_conv1d, activation="silu" if silu else None, impl=impl)
    found = results(lambda x, weight, bias, state: call(x, weight, bias, state=state), inputs)
    assert_close(found, results(partial(reference, silu=silu), inputs), **EXACT)


@widths
@needs_native
def test_on_every_instruction_set_and_number_of_threads(width):
    inputs = draw(b=3, t=50, c=300, width=width)
    expected, threads = results(reference, inputs), torch.get_num_threads()
    try:
        for name in native.instruction_sets():
            for count in (1, 3):
                torch.set_num_threads(count)
                with native.use(name):
                    assert_close(results(partial(fast, impl="native"), inputs), expected, **EXACT)
    finally:
        torch.set_num_threads(threads)


def test_it_is_the_convolution_of_pytorch():
    x, weight, bias, _ = draw(t=20)
    padded = functional.pad(x.mT, (3, 0))
    y, _ = causal_conv1d(x, weight, bias)
    assert_close(y, functional.conv1d(padded, weight[:, None], bias, groups=5).mT, **EXACT)


@both
@widths
@pytest.mark.parametrize("cut", [0, 1, 2, 5, 9])
def test_split_anywhere_and_resumed(impl, width, cut):
    inputs = draw(width=width)

    def twice(x, weight, bias, state):
        y1, middle = fast(x[:, :cut], weight, bias, state, impl=impl)
        y2, final = fast(x[:, cut:], weight, bias, middle, impl=impl)
        return torch.cat((y1, y2), 1), final

    assert_close(results(twice, inputs), results(partial(fast, impl=impl), inputs), **EXACT)


@both
@pytest.mark.parametrize("lengths", [[5, 0, 1, 17, 3], [0, 0], [9], [1] * 40])
def test_packed_sequences_are_those_alone(impl, lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x, weight, bias, _ = draw(b=1, t=sum(lengths))
    state = draw(b=len(lengths), t=0)[3]

    def packed(*inputs):
        return fast(*inputs, cu_seqlens=bounds, impl=impl)

    def alone(x, weight, bias, state):
        parts = [
            reference(part, weight, bias, before[None])
            for part, before in zip(x.split(lengths, 1), state, strict=True)
        ]
        ys, states = zip(*parts, strict=True)
        return torch.cat(ys, 1), torch.cat(states)

    inputs = [x, weight, bias, state]
    assert_close(results(packed, inputs), results(alone, inputs), **EXACT)


@both
def test_padding_is_absence(impl):
    for mask in some_masks(9):
        x, weight, bias, state = inputs = draw(b=len(mask))
        expected = results(partial(reference, mask=mask), inputs)
        assert_close(results(partial(fast, mask=mask, impl=impl), inputs), expected, **EXACT)
        spoilt = x.masked_fill(~mask[..., None], math.nan).detach().requires_grad_()
        for name in (impl, "reference"):
            found = results(partial(fast, mask=mask, impl=name), [spoilt, weight, bias, state])
            assert_close(found, expected, **EXACT)


@needs_native
@pytest.mark.parametrize("shape", [(2, 9, 5), (2, 9, 300)])
def test_any_strides(shape):
    b, t, c = shape
    _, weight, bias, state = (y.detach() for y in draw(b=b, t=t, c=c))
    wide = torch.randn(b, t, 3 * c, dtype=torch.float64)
    for x in (wide[..., c : 2 * c], wide[..., :c].mT.contiguous().mT, wide[:1, :, :c].expand(b, -1, -1)):
        assert_close(fast(x, weight, bias, state, impl="native"), reference(x, weight, bias, state), **EXACT)


@both
def test_first_and_second_derivatives(impl):
    inputs = draw(b=2, t=5, c=2, width=3)
    call = partial(fast, impl=impl)
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(lambda x: fast(x, *inputs[1:], impl=impl)[0], inputs[:1])


@both
def test_second_derivatives_where_one_input_is_computed_from_another(impl):
    x, weight, bias, _ = draw(b=2, t=5, c=2, width=3)

    def call(x):
        return fast(x, x[0, :2].mT.repeat(1, 2)[:, :3] * weight, bias, x[:, :2].sin(), impl=impl)

    y = torch.cat([found.flatten() for found in call(x)])
    (once,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert_close(again, once, **EXACT)
    assert torch.autograd.gradgradcheck(call, [x])


@needs_native
def test_it_is_an_operator_of_pytorch():
    x, weight, bias, state = draw(c=20, dtype=torch.float32)
    mask = torch.rand(2, 9) < 0.5
    operator = torch.ops.lintra.causal_conv1d
    for arguments in ((bias, state, None), (None, state, None), (bias, state, mask)):
        torch.library.opcheck(operator, (x, weight, arguments[0], arguments[1], arguments[2], None, True))
    torch.compiler.reset()  # earlier compilations would turn sizes into symbols
    compiled = torch.compile(partial(fast, impl="native"), fullgraph=True, backend="aot_eager")
    inputs = [x, weight, bias, state]
    assert_close(results(compiled, inputs), results(partial(fast, impl="torch"), inputs))


def test_under_vmap_it_is_pytorch():
    x, weight, bias, state = (y.detach() for y in draw())
    one = torch.vmap(lambda x, state: fast(x[None], weight, bias, state[None])[0][0])
    assert_close(one(x, state), reference(x, weight, bias, state)[0], **EXACT)


def test_under_autocast_it_is_bfloat16():
    x, weight, bias, state = draw(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, after = fast(x, weight, bias, state)
    expected = fast(x.bfloat16(), weight, bias, state)
    assert (y.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert_close([y, after], list(expected), rtol=0, atol=0)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_and_out_is_rounded_once(impl, dtype):
    inputs = draw(t=30, c=140, dtype=dtype)
    found = results(partial(fast, impl=impl), inputs)
    expected = results(reference, [y.detach().double().requires_grad_() for y in inputs])
    unit = torch.finfo(dtype).eps
    assert [y.dtype for y in found[:2]] == [dtype, torch.float32]
    # y and the gradient of x have the dtype; the rounded gradient of y reaches all the others.
    for value, exact in zip(found, expected, strict=True):
        assert (value.double() - exact).abs().max() <= 2 * unit * exact.abs().max().clamp(min=1)


@both
def test_without_tokens_the_state_is_a_copy(impl):
    x, weight, bias, state = (y.detach() for y in draw(t=0))
    _, after = fast(x, weight, bias, state, impl=impl)
    assert_close(after, state, rtol=0, atol=0)
    assert after.data_ptr() != state.data_ptr()


def test_only_the_last_column_is_the_token_alone():
    x = torch.randn(2, 9, 5)
    weight = torch.zeros(5, 4)
    weight[:, -1] = 1
    assert_close(causal_conv1d(x, weight)[0], x, rtol=0, atol=0)
    shifted = causal_conv1d(x, weight.flip(1))[0]
    assert_close(shifted[:, 3:], x[:, :-3], rtol=0, atol=0)
    assert not shifted[:, :3].any()


def test_refuses():
    x, weight, bias, state = (y.detach() for y in draw())
    call = partial(causal_conv1d, x, weight)
    for options, error, message in (
        ({"bias": bias[:3]}, ValueError, r"bias must be \[c=5\]"),
        ({"state": state[:, 1:]}, ValueError, "last w - 1 = 3 inputs of a convolution 4 wide, got 2"),
        ({"state": state[:1]}, ValueError, "state must be"),
        ({"state": state.float()}, TypeError, "state must be torch.float64"),
        ({"activation": "gelu"}, ValueError, "activation must be 'silu' or None, got 'gelu'"),
        ({"mask": torch.ones(2, 9)}, TypeError, "mask must be boolean"),
        ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, "all sequences lie in one row"),
        ({"impl": "triton"}, ValueError, "impl must be 'auto' or one of"),
    ):
        with pytest.raises(error, match=message):
            call(**options)
    with pytest.raises(ValueError, match=r"weight must be \[c=5 w\]"):
        causal_conv1d(x, weight[:4])
    with pytest.raises(ValueError, match="a width of at least 1 token, got w=0"):
        causal_conv1d(x, weight[:, :0])
    with pytest.raises(TypeError, match="x must be float16"):
        causal_conv1d(x.long(), weight)

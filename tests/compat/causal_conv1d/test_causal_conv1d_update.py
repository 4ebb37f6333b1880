"""The short convolution of a few tokens; the buffer of the last inputs is updated in place."""

import pytest
import torch
from torch.testing import assert_close

from lintra import native
from lintra.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from lintra.testing.laws import gradients, raises
from tests.compat.mamba_ssm.loops import convolution

EXACT = {"rtol": 1e-9, "atol": 1e-9}  # for float64
sets = pytest.mark.parametrize("name", [None, *native.instruction_sets()])


def draw(t=1, length=3, w=4, d=150, dtype=torch.float64):
    """x, the buffer, weight and bias, with more channels than a block of the kernel has."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, d, t), (3, d, length), (d, w), (d,))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def update(name, x, *others, **options):
    """With the kernels of an instruction set or, without a name, in PyTorch: a gradient is requested."""
    if name is None:
        return causal_conv1d_update(x.clone().requires_grad_(), *others, **options).detach()
    with native.use(name):
        return causal_conv1d_update(x, *others, **options)


@sets
def test_a_buffer_of_another_dtype_is_rounded_to_it(name):
    """As in transformers, where a cache may have been begun under autocast."""
    x, buffer, weight, bias = draw(dtype=torch.float32)
    low = buffer.bfloat16()
    expected = update(name, x, buffer.copy_(low), weight, bias)
    assert_close(update(name, x, low, weight, bias), expected, rtol=0, atol=0)
    assert_close(low, buffer.bfloat16(), rtol=0, atol=0)
    x, buffer, weight, bias = draw(dtype=torch.float32)  # and one that is wider keeps its digits
    before, some = buffer.clone(), torch.tensor([0, -1, -1])
    update(name, x.bfloat16(), buffer, weight, bias, conv_state_indices=some)
    assert torch.equal(buffer[1:], before[1:])


def test_autocast_changes_nothing():
    x, buffer, weight, bias = draw(dtype=torch.float32)
    expected = update(None, x, buffer.clone(), weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.clone().requires_grad_()):  # by the kernel, and in PyTorch
            assert_close(causal_conv1d_update(given, buffer.clone(), weight, bias).detach(), expected)


@sets
@pytest.mark.parametrize(("t", "length"), [(1, 3), (1, 4), (2, 3), (3, 7), (9, 4)])
def test_inputs_move_up(t, length, name):
    x, buffer, weight, bias = draw(t, length)
    line = torch.cat((buffer, x), 2)
    place = buffer.data_ptr()
    y = update(name, x, buffer, weight, bias, "silu")
    assert_close(y, convolution(line, weight, bias)[..., -t:], **EXACT)
    assert_close(buffer, line[..., -length:], rtol=0, atol=0)
    assert buffer.data_ptr() == place


@sets
@pytest.mark.parametrize("circle", [False, True])
def test_no_tokens_change_nothing(circle, name):
    x, buffer, weight, bias = draw(0)
    before = buffer.clone()
    seen = torch.arange(3) if circle else None
    assert update(name, x, buffer, weight, bias, "silu", cache_seqlens=seen).shape == x.shape
    assert_close(buffer, before, rtol=0, atol=0)


@sets
@pytest.mark.parametrize(("t", "length"), [(1, 3), (1, 5), (4, 5), (7, 5)])
def test_a_circle(t, length, name):
    """The buffer holds the input of token i at place i % length."""
    x, _, weight, bias = draw(t, length)
    before = torch.randn(3, 150, 23, dtype=torch.float64)
    seen = torch.tensor([23, 9, 14], dtype=torch.int32)
    buffer = torch.zeros(3, 150, length, dtype=torch.float64)
    expected, ys = buffer.clone(), []
    for i in range(3):
        n = int(seen[i])
        line = torch.cat((before[i, :, :n], x[i]), 1)
        for place in range(n - length, n):
            buffer[i, :, place % length] = line[:, place]
        for place in range(n + t - length, n + t):
            expected[i, :, place % length] = line[:, place]
        ys.append(convolution(line[None], weight, bias)[..., n:])
    y = update(name, x, buffer, weight, bias, "silu", seen)
    assert_close(y, torch.cat(ys), **EXACT)
    assert_close(buffer, expected, rtol=0, atol=0)


@sets
@pytest.mark.parametrize("seen", [None, torch.tensor([5, 2, 0], dtype=torch.int32)])
def test_rows_of_a_pool(seen, name):
    x, buffer, weight, bias = draw(2, 4)
    indices = torch.tensor([5, -1, 2], dtype=torch.int32)
    pool = torch.randn(7, 150, 4, dtype=torch.float64)
    pool[5], pool[2] = buffer[0], buffer[2]
    expected = update(name, x, buffer, weight, bias, cache_seqlens=seen)
    expected[1] = 0
    after = pool.clone()
    after[5], after[2] = buffer[0], buffer[2]
    options = {"cache_seqlens": seen, "conv_state_indices": indices}
    assert_close(update(name, x, pool, weight, bias, **options), expected, rtol=0, atol=0)
    assert_close(pool, after, rtol=0, atol=0)


@sets
def test_any_strides_and_no_time_axis(name):
    x, buffer, weight, bias = draw()
    views = x.mT.contiguous().mT[..., 0], buffer.mT.contiguous().mT
    expected = update(name, x, buffer, weight, bias)
    y = update(name, *views, weight, bias)
    assert y.shape == (3, 150)
    assert_close(y, expected[..., 0], rtol=0, atol=0)
    assert_close(views[1], buffer, rtol=0, atol=0)


def test_steps_are_the_whole():
    x, buffer, weight, bias = draw(t=12)
    line = torch.cat((buffer, x), 2)
    y = causal_conv1d_fn(line, weight, bias, activation="silu")[..., 3:]
    steps = [causal_conv1d_update(x[..., i], buffer, weight, bias, "silu") for i in range(12)]
    assert_close(torch.stack(steps, 2), y, **EXACT)


def test_equals_the_fallback(fallback_module):
    module = fallback_module("mamba2")
    x, buffer, weight, bias = draw(2, 4, dtype=torch.float32)
    theirs = buffer.clone()
    expected = module.causal_conv1d_update.__wrapped__(x, theirs, weight, bias, activation="silu")
    assert_close(causal_conv1d_update(x, buffer, weight, bias, "silu"), expected)
    assert_close(buffer, theirs, rtol=0, atol=0)


def test_gradients():
    x, buffer, weight, bias = draw(3, 4)
    inputs = [y.requires_grad_() for y in (x, weight, bias)]
    line = torch.cat((buffer, x), 2)
    y = causal_conv1d_update(x, buffer, weight, bias, "silu")
    expected = convolution(line, weight, bias)[..., -3:]
    assert_close([y, *gradients(y, inputs)], [expected, *gradients(expected, inputs)], **EXACT)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("circle", [False, True])
def test_gradients_of_steps_reach_earlier_tokens(circle, pool):
    """Through the buffer, which each call overwrites."""
    x, first, weight, bias = (y.requires_grad_() for y in draw(t=7, d=5))
    line = torch.cat((first, x), 2)
    expected = convolution(line, weight, bias)[..., 3:]
    indices = torch.tensor([4, 0, 2]) if pool else None
    buffer, ys, start = first.clone(), [], 0
    if pool:
        buffer = torch.zeros(5, 5, 3, dtype=first.dtype).index_copy(0, indices, first)
    for n in (1, 1, 2, 3):
        options = {"conv_state_indices": indices}
        options |= {"cache_seqlens": torch.full((3,), 3 + start)} if circle else {}
        ys.append(causal_conv1d_update(x[..., start : start + n], buffer, weight, bias, "silu", **options))
        start += n
    y, inputs = torch.cat(ys, 2), [x, first, weight, bias]
    assert_close([y, *gradients(y, inputs)], [expected, *gradients(expected, inputs)], **EXACT)
    last = buffer[indices] if pool else buffer
    last = last.roll(-((3 + start) % 3), 2) if circle else last
    after = line[..., -3:]
    assert_close([last, *gradients(last, inputs)], [after, *gradients(after, inputs)], **EXACT)


def test_a_leaf_that_requires_grad_is_not_written_over():
    x, buffer, weight, bias = draw()
    buffer.requires_grad_()
    raises(ValueError, "conv_state is written to.*clone", causal_conv1d_update, x, buffer, weight, bias)
    with torch.no_grad():
        causal_conv1d_update(x, buffer, weight, bias)


@sets
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype, name):
    x, buffer, weight, bias = (y.to(dtype) for y in draw(2, 4, dtype=torch.float32))
    line = torch.cat((buffer, x), 2)
    y = update(name, x, buffer, weight, bias, "silu")
    assert y.dtype == dtype
    expected = convolution(line.double(), weight.double(), bias.double())[..., -2:]
    assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert_close(buffer, line[..., -4:], rtol=0, atol=0)


def test_a_caller_may_be_compiled():
    x, buffer, weight, bias = draw(dtype=torch.float32)
    kept = buffer.clone()
    torch.compiler.reset()
    y = torch.compile(causal_conv1d_update, backend="aot_eager")(x, buffer, weight, bias, "silu")
    assert_close(y, causal_conv1d_update(x, kept, weight, bias, "silu"))
    assert_close(buffer, kept)


def test_refusals():
    x, buffer, weight, bias = draw()
    call = causal_conv1d_update
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(x, buffer, weight, bias, pad_slot_id=-1)
    raises(NotImplementedError, "activation is not supported", call, x, buffer, weight, bias, "gelu")
    raises(ValueError, "conv_state must hold", call, x, buffer[..., 1:], weight, bias)
    raises(ValueError, "conv_state must be", call, x, buffer[:2], weight, bias)
    raises(ValueError, "weight must be", call, x, buffer, weight[1:], bias)
    raises(TypeError, "cache_seqlens", call, x, buffer, weight, bias, cache_seqlens=torch.zeros(3))
    indices = torch.tensor([0, 1, 3])
    raises(ValueError, "conv_state_indices", call, x, buffer, weight, bias, conv_state_indices=indices)
    raises(ValueError, "conv_state_indices", call, x, buffer, weight, bias, conv_state_indices=indices[:2])


@sets
def test_what_a_graph_kept_of_the_buffer_is_refused(name):
    x, buffer, weight, _ = draw()
    kept = torch.ones_like(buffer).requires_grad_()
    loss = (kept * buffer).sum()
    update(name, x, buffer, weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    if name is not None:
        with torch.inference_mode():
            update(name, x, buffer.clone(), weight)
    with pytest.raises((ValueError, RuntimeError), match=r"share memory|more than one element"):
        update(name, x, buffer[:1].expand_as(buffer), weight)

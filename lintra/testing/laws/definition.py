"""Laws that compare a mechanism with its definition, and one call of it with another."""

# Laws call with lists of inputs, whose lengths no type knows.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import replace
from functools import partial

import torch
from torch.testing import assert_close

from lintra.ops.padding import expand_mask
from lintra.testing.laws.cases import EXACT, Case, extra_inputs, forward, gradients, outputs, weighted


def some_lengths(case: Case) -> list[int]:
    """One token, two, and as many as a block of the parallel form has, one less, one more and three of them;
    where a configuration names no small block, one of 16, as the native sum has."""
    named = (getattr(case.config, name, None) for name in ("chunk", "block", "segment", "landmarks"))
    block = next((size for size in named if size is not None and 1 < size <= 16), 16)
    lengths = {case.sized(n) for n in (1, 2, block - 1, block, block + 1, case.time, 3 * block + 5)}
    return [time for time in sorted(lengths) if case.fits(time)]


def equals_its_definition(case: Case, dense) -> None:
    """The parallel form is the dense N x N definition, values and gradients, at any length."""
    attention = case.build()
    for time in some_lengths(case):
        inputs = case.draw(time)
        everything = [*inputs, *attention.parameters()]
        y, expected = forward(case, attention, *inputs), dense(attention, *inputs)
        assert_close(y, expected, **EXACT)
        assert_close(gradients(y, everything), gradients(expected, everything), **EXACT)


def second_derivatives_are_those_of_its_definition(case: Case, dense) -> None:
    """A gradient has a gradient, by PyTorch's own operators: native kernels say that they have none."""
    case = replace(case, value_dim=case.dim)  # what PyTorch's fused kernels take
    if hasattr(case.config, "impl"):
        case = replace(case, config=replace(case.config, impl="torch"))
    attention, found = case.build(), []
    inputs = case.draw(case.sized(8 if case.fits(8) else 5))
    for form in (partial(forward, case), dense):
        y = form(attention, *inputs).square()
        first = torch.autograd.grad(weighted(y), inputs, create_graph=True, materialize_grads=True)
        found.append(gradients(torch.cat([g.flatten() for g in first]), inputs))
    # Nystromformer's is that of an inverse, three times as ill-conditioned as its matrix in digits.
    assert_close(*found, rtol=1e-6, atol=1e-8)


def sixteen_bits_lose_no_more_than_the_textbook(case: Case, dense) -> None:
    """bf16 and fp16 in: off by at most twice the error of the textbook formula in that precision."""
    for dtype in (torch.bfloat16, torch.float16):
        attention, inputs = case.build(), [x.detach() for x in case.draw(case.sized(64), dtype=dtype)]
        # The parameters of both are those 16 bits can hold: the law is about the arithmetic.
        attention = attention.to(dtype).double()
        exact = dense(attention, *(x.double() for x in inputs))
        attention = attention.to(dtype)
        textbook = dense(attention, *inputs)
        y = forward(case, attention, *inputs)
        assert y.dtype == dtype
        error = (y.double() - exact).abs()
        allowed = (textbook.double() - exact).abs()
        assert error.max() <= 2 * allowed.max()
        assert error.mean() <= 2 * allowed.mean()


def cross_is_the_same_sum(case: Case) -> None:
    """Cross-attention to the sequence's own keys is the bidirectional form; any lengths go."""
    attention, (q, k, v) = case.build(), case.draw()
    assert_close(attention.cross_attend(q, attention.encode_memory(k, v)), attention(q, k, v), **EXACT)
    few = attention.cross_attend(q[:, :3], attention.encode_memory(k, v))
    if attention.can.joint_queries:
        assert few.shape == (*q[:, :3].shape[:2], *outputs(case))
    else:
        assert_close(few, attention(q, k, v)[:, :3], **EXACT)
    fewer = [x[:, :7] for x in (k, v)]
    many = attention.cross_attend(q, attention.encode_memory(*fewer))
    assert many.isfinite().all()
    if not attention.can.joint_queries:
        assert_close(many[:, :7], attention(q[:, :7], *fewer), **EXACT)
        if not attention.can.placed_queries:
            assert_close(many[:, -7:], attention(q[:, -7:], *fewer), **EXACT)
    mask = case.masks()[2]
    y = attention.cross_attend(q, attention.encode_memory(k, v, mask), mask)
    assert_close(y, attention(q, k, v, mask=mask), **EXACT)
    dirty = [x.masked_fill(~expand_mask(mask, x), torch.nan) for x in (q, k, v)]
    again = attention.cross_attend(dirty[0], attention.encode_memory(*dirty[1:], mask), mask)
    assert_close(again, y, rtol=0, atol=0)


def grouped_heads_are_repeated_heads(case: Case) -> None:
    """Sharing keys and values among query heads = repeating them."""
    grouped, repeated = case.build(), case.build(kv_heads=case.heads)
    inputs = case.draw()
    group = case.heads // case.kv_heads
    with torch.no_grad():
        for many, few in zip(repeated.state_dict().values(), grouped.state_dict().values(), strict=True):
            many.copy_(few if many.shape == few.shape else few.repeat_interleave(group, 0))
    values = repeated.value_heads // grouped.value_heads  # 1 where there is a number of them by itself
    wide = [inputs[0], inputs[1].repeat_interleave(group, 2), inputs[2].repeat_interleave(values, 2)]
    for given, (name, width) in zip(inputs[3:], extra_inputs(case).items(), strict=True):
        # What is read for each key-value head is read for each head then.
        more = repeated.extra_inputs()[name] // width
        if more == 1:  # or for all of them
            wide.append(given)
        else:
            wide.append(given.unflatten(2, (case.kv_heads, -1)).repeat_interleave(more, 2).flatten(2))
    y = forward(case, grouped, *inputs)
    expected = forward(case, repeated, *wide)
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)

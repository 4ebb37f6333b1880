"""What a sum with a matrix for a state must obey: of `delta_rule`, of `gated_attention`.

`fast` is the op as a function of its differentiable inputs, tensors [b t ...] and the state last, and of
options; `definition` its reference.
"""

import torch
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.testing.laws import EXACT, gradients, spread

CUTS = [0, 1, 16, 50, 69, 70]  # of 70 tokens


def results(call, inputs):
    """y, the final state, and the gradients of an uneven sum over both."""
    y, state = call(*inputs)
    return [y, state, *gradients(torch.cat((y.flatten(), state.flatten())), inputs)]


def sizes(choose):
    """Sizes for `draw`, small and odd ones among them, each chosen by hypothesis."""
    g = choose(st.integers(1, 3), label="g")
    return {
        "b": choose(st.integers(0, 3), label="b"),
        "t": choose(st.sampled_from([0, 1, 2, 7, 8, 9, 31, 50]), label="t"),
        "h": g * choose(st.integers(1, 3), label="h/g"),
        "g": g,
        "d": choose(st.sampled_from([1, 4, 9]), label="d"),
        "e": choose(st.sampled_from([1, 3, 8]), label="e"),
    }


def resumes(fast, inputs, cut):
    """In two pieces, the second after the state of the first: the same, gradients included."""

    def twice(*x):
        y1, middle = fast(*(each[:, :cut] for each in x[:-1]), x[-1], chunk=16)
        y2, final = fast(*(each[:, cut:] for each in x[:-1]), middle, chunk=16)
        return torch.cat((y1, y2), 1), final

    assert_close(results(twice, inputs), results(fast, inputs), **EXACT)


def has_derivatives(fast, draw):
    """First ones under a mask, second ones of y."""
    mask = torch.tensor([[True, True, False, True, True], [False, True, True, True, False]])
    inputs = tuple(draw(t=5, h=2, g=1, d=2, e=2))
    call = lambda *x: fast(*x, mask=mask, chunk=2)  # noqa: E731
    assert torch.autograd.gradcheck(call, inputs, atol=1e-6, eps=1e-6)
    inputs = tuple(draw(b=1, t=3, h=1, g=1, d=2, e=2))
    assert torch.autograd.gradgradcheck(lambda *x: fast(*x, chunk=2)[0], inputs)


def leaves_padding_out(fast, inputs):
    """Each sample of 20 tokens with holes gives what its real tokens give alone, NaN elsewhere or not."""
    *tokens, state = inputs
    mask = torch.rand(2, 20, generator=torch.Generator().manual_seed(3)) > 0.4
    broken = [x.detach().masked_fill(~spread(mask, x), torch.nan) for x in tokens]
    y, after = fast(*broken, state, mask=mask, chunk=8)
    assert (y[~mask] == 0).all()
    for i in range(2):
        alone, final = fast(*(x[i : i + 1, mask[i]] for x in tokens), state[i : i + 1])
        assert_close(y[i, mask[i]], alone[0], **EXACT)
        assert_close(after[i], final[0], **EXACT)


def rounds_y_alone(fast, definition, draw, tolerance):
    """16 bits in and out, float32 between: off by the rounding of y, and `tolerance` for the sum."""
    for dtype, unit in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        inputs = draw(t=70, dtype=dtype)
        y, state = fast(*inputs)
        expected, after = definition(*(x.double() for x in inputs))
        assert y.dtype == dtype
        assert state.dtype == torch.float32
        assert ((y.double() - expected).abs() <= unit * expected.abs() + tolerance).all()
        assert_close(state.double(), after, rtol=1e-4, atol=1e-4)

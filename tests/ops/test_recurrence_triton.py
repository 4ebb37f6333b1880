"""The Triton kernels of the recurrences equal the definition, in values and gradients: on a GPU if there is
one, otherwise in Triton's interpreter, on the CPU. Buffers are filled with NaN first, so that unwritten
elements show."""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from lintra.ops import LinearState, dispatch, linear_attention, recurrence_reference
from lintra.ops.linear_attention import triton as linear_attention_triton
from lintra.ops.linear_attention import triton_recurrence
from lintra.ops.padding import expand_mask
from lintra.testing.laws import gradients, some_masks
from tests.ops.interpreter import (
    close_in_tf32,
    limit,
    patient_interpreter,  # noqa: F401 (a fixture)
    poison,
    tf32,  # noqa: F401 (a fixture)
)
from tests.ops.recurrences import (
    KINDS,
    draw,
    fast,
    given_ones,
    of_packed,
    of_repeated_heads,
    reference,
    results,
)

WHY_NOT = dispatch._no_gpu_kernels(torch.device("cuda"))
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no Triton kernels: {WHY_NOT}")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C = 16  # tokens per chunk here: few tokens then make many chunks
every = pytest.mark.parametrize("kind", KINDS)
triton = partial(fast, impl="triton")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """The buffers that the kernels write to are filled with NaN. Both modules allocate some."""
    poison(monkeypatch, triton_recurrence, linear_attention_triton)


@pytest.fixture(autouse=True)
def chunk(monkeypatch):
    """Set the length of chunks."""

    def set_it(tokens):
        monkeypatch.setattr(triton_recurrence, "CHUNK", tokens)

    # Without TF32, chunks on a GPU are half as long, and they are in the interpreter too.
    set_it(2 * C)
    return set_it


def placed(inputs, kind=torch.float32):
    """The same numbers on the device of the kernels: q, k and v in `kind`, all others in float32."""
    return [
        None if x is None else x.detach().to(DEVICE, kind if i < 3 else torch.float32).requires_grad_()
        for i, x in enumerate(inputs)
    ]


def exactly(inputs):
    return [None if x is None else x.detach().cpu().double().requires_grad_() for x in inputs]


def close(found, formula, expected):
    """The errors are within the `limit` beside chunked PyTorch, with 16 roundings."""
    for i, (a, b, e) in enumerate(zip(found, formula, expected, strict=True)):
        assert a.shape == e.shape
        if e.numel():
            error, allowed = ((x.cpu().double() - e).abs().max() for x in (a, b))
            assert error <= limit(allowed, 16, e.abs().max()), f"result {i}"


def agrees(inputs, call=reference, **options):
    """`inputs` through the kernels, chunked PyTorch and, in float64, the definition `call`."""
    inputs = placed(inputs)
    there = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    found = results(partial(triton, **there), inputs)
    formula = results(partial(fast, impl="torch", chunk=C, **there), inputs)
    close(found, formula, results(call, exactly(inputs)))


@pytest.mark.parametrize("kind", [*KINDS, "sum, head"])
def test_tails(kind):
    """Several chunks and a tail; several tiles. A decay of a head is used as one of all its features."""
    if kind == "sum, head":
        *inputs, beta, state = draw("sum, feature", b=1, t=2 * C + 5, h=2, g=1, d=17, e=18)
        inputs[3] = inputs[3].detach()[..., :1].expand_as(inputs[3]).contiguous().requires_grad_()
        agrees([*inputs, beta, state])
    else:
        agrees(draw(kind, b=1, t=2 * C + 5, h=2, g=1, d=17, e=18))


@every
@pytest.mark.parametrize("time", [1, C - 1, C, C + 1])
def test_around_a_chunk(kind, time):
    agrees(draw(kind, b=1, t=time, h=1, g=1))


@pytest.mark.slow  # two minutes in the interpreter
@every
@pytest.mark.parametrize("time", [1, 15, 16, 17, 64, 65, 130])
def test_lengths_in_full_chunks(chunk, kind, time):
    chunk(128)
    agrees(draw(kind, t=time, d=40, e=33))


@pytest.mark.slow  # a minute in the interpreter
@every
@pytest.mark.parametrize(("d", "e"), [(130, 20), (256, 64), (64, 130)])
def test_wide(chunk, kind, d, e):
    chunk(128)
    agrees(draw(kind, b=1, t=70, h=1, g=1, d=d, e=e))


@pytest.mark.parametrize("kind", ["delta, feature", "delta, head", "sum, feature"])
@pytest.mark.parametrize("heads", [(4, 2, 1), (1, 1, 2), (2, 1, 2)])
def test_heads_are_shared_in_either_direction(kind, heads):
    queries, keys, values = heads
    g = max(keys, values)
    full = draw(kind, b=1, t=C + 3, h=max(queries, g), g=g)
    q, k, v = (x[:, :, :n].detach().requires_grad_() for x, n in zip(full[:3], heads, strict=True))

    agrees([q, k, v, *full[3:]], partial(of_repeated_heads, heads=g))


@every
@pytest.mark.parametrize("lengths", [[3, 0, C + 1, 1], [0, 0]])
def test_packed_sequences_are_those_alone(kind, lengths):
    total, n = sum(lengths), len(lengths)
    inputs = draw(kind, b=1, t=total, h=2, g=1)
    inputs[5] = draw(kind, b=n, h=2, g=1)[5]
    bounds = torch.tensor([0, *lengths]).cumsum(0)

    agrees(inputs, partial(of_packed, bounds=bounds), cu_seqlens=bounds)


@every
def test_defect_18_padding_is_absence(kind):
    """Each sample with holes gives what its real tokens give alone, whether the holes are NaN or not."""
    *tokens, state = draw(kind, t=20, h=1, g=1)
    mask = some_masks(20, 2)[-1]
    broken = [
        None if x is None else x.detach().masked_fill(~expand_mask(mask, x), torch.nan).requires_grad_()
        for x in tokens
    ]
    y, after, *found = (
        x.cpu() for x in results(partial(triton, mask=mask.to(DEVICE)), placed([*broken, state]))
    )
    assert (y[~mask] == 0).all()
    assert all(x.isfinite().all() and (x[~mask] == 0).all() for x in found[:-1])
    for i in range(2):
        rows = [None if x is None else x[i : i + 1, mask[i]] for x in tokens]
        alone, final = reference(*rows, state[i : i + 1])
        # Float32: sums of twenty terms of about 1.
        assert_close([y[i, mask[i]].double(), after[i].double()], [alone[0], final[0]], rtol=1e-5, atol=1e-5)


@every
def test_steps_are_the_whole(kind):
    """Token by token, with one launch each, from a state and with padding; gradients take the longer way."""
    inputs = [None if x is None else x.detach() for x in placed(draw(kind, t=3))]
    mask = torch.tensor([[True, False, True], [True, True, True]], device=DEVICE)
    expected, final = triton(*inputs, mask=mask)
    ys, state = [], inputs[5]
    for i in range(3):
        one = [None if x is None else x[:, i : i + 1] for x in inputs[:5]]
        y, state = triton(*one, state, mask=mask[:, i : i + 1])
        ys.append(y)
    # A sum of three terms and a state, in two orders.
    assert_close([torch.cat(ys, 1), state], [expected, final], rtol=1e-5, atol=1e-5)
    assert (ys[1][0] == 0).all()


def test_a_denominator_is_a_column_of_ones():
    q, k, v, log_decay, _, state = draw("sum, feature", b=1, t=C + 3, h=2, g=1)
    q, k = q.detach().exp().requires_grad_(), k.detach().exp().requires_grad_()

    def ratio(impl, q, k, v, log_decay, state):
        before = LinearState(state, (0 * state[..., 0]).detach() + 2)
        return linear_attention(q, k, v, log_decay=log_decay, state=before, scale=0.5, impl=impl)[0]

    inputs = placed([q, k, v, log_decay, state])
    found, formula = ratio("triton", *inputs), ratio("torch", *inputs)
    here = exactly(inputs)
    expected = ratio("reference", *here)
    every = [[y, *gradients(y, x)] for y, x in ((found, inputs), (formula, inputs), (expected, here))]
    close(*every)


@pytest.mark.parametrize("kind", [name for name, (_, decay) in KINDS.items() if decay])
@pytest.mark.parametrize("rate", [-1e-9, -60.0, -1e4, -math.inf])
def test_defect_17_no_decay_overflows(kind, rate):
    """A token, or some of its features, forgets everything and its neighbours nothing."""
    inputs = draw(kind, b=1, t=2 * C, h=1, g=1, dtype=torch.float32)
    with torch.no_grad():
        inputs[3].fill_(-0.01)
        inputs[3][:, 5] = rate
        if inputs[3].dim() == 4:
            inputs[3][:, 10:] = torch.tensor([rate, -1e-9, rate, -0.1, 0.0])
    found = results(triton, placed(inputs))
    for a, e in zip(found, results(reference, exactly(inputs)), strict=True):
        assert a.isfinite().all()
        assert (a.cpu() - e).abs().max() <= 1e-5 * e.abs().max()  # float32, through two triangles


@every
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_in_and_out(kind, dtype, unit):
    """16-bit inputs and outputs, float32 between: off by the rounding of y and, on a GPU, by that of TF32,
    which cuts off bits of numbers as large as the result's own."""

    def sums(x):
        return 1e-4 if DEVICE == "cpu" else 2**-8 * float(x.abs().max())

    inputs = placed(draw(kind, b=1, t=C + 3, h=2, g=1), dtype)
    y, state = triton(*inputs)
    expected, after = reference(*exactly(inputs))
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    assert ((y.cpu().double() - expected).abs() <= unit * expected.abs() + sums(expected)).all()
    assert_close(state.cpu().double(), after, rtol=0, atol=sums(after))
    y.float().sum().backward()
    assert [x.grad.dtype for x in inputs[:3]] == [dtype] * 3


@pytest.mark.usefixtures("tf32")
@every
def test_float32_in_tf32(chunk, kind):
    """In chunks and tiles of the actual size."""
    chunk(64)
    inputs = placed(draw(kind, b=1, t=150, h=2, g=1, d=64, e=64))
    found, expected = results(triton, inputs), results(reference, exactly(inputs))
    names = ["y", "after", "q", "k", "v", "log_decay", "beta", "state"]
    close_in_tf32(found, expected, [n for n, x in zip(names, [0, 0, *inputs], strict=True) if x is not None])


@pytest.mark.slow  # half a minute in the interpreter
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_equal_keys_for_a_long_time_stay_bounded(chunk, beta):
    """The triangle is then as far from orthogonal as possible."""
    chunk(128)
    q, k, v, _, _, state = (None if x is None else x.detach() for x in draw("delta", b=1, t=1024, h=1, g=1))
    inputs = [q, k[:, :1].expand_as(k), v, None, torch.full((1, 1024, 1), beta).double(), state]
    exact, final = reference(*inputs)
    y, after = (x.cpu() for x in triton(*(None if x is None else x.detach() for x in placed(inputs))))
    # 1,024 reflections in float32, each off by about 1e-7 in one direction.
    assert (y - exact).abs().max() < 1e-4 * exact.abs().max()
    assert (after - final).abs().max() < 1e-4 * final.abs().max()


def test_beta_two_reflects():
    """I - 2 k k^T twice is the identity: a value written under a key changes its sign twice, and is back."""
    _, k, v, _, _, state = placed(draw("delta", t=2, h=2))
    k, v = k[:, :1].expand(-1, 2, -1, -1), 0 * v
    _, after = triton(k, k, v, None, torch.full((2, 2, 2), 2.0, device=DEVICE), state)
    assert_close(after, state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # from NumPy, in the interpreter
def test_what_is_broken_stays_in_its_future_and_its_sequence(name, bad):
    inputs = [None if x is None else x.detach() for x in placed(draw("delta, feature", b=1, t=2 * C))]
    inputs[5] = inputs[5].expand(3, -1, -1, -1)
    inputs["qkv".index(name)][:, C + 2, 0, 1] = bad
    y, after = triton(*inputs, cu_seqlens=torch.tensor([0, C, 2 * C - 4, 2 * C], device=DEVICE))
    fine = y.isfinite().flatten(2).all(-1)[0]
    assert fine[:C].all()
    assert fine[2 * C - 4 :].all()
    assert not fine[C + 2 : 2 * C - 4].any()
    assert after.isfinite().flatten(1).all(1).tolist() == [True, False, True]


@every
def test_rows_of_no_packed_sequence_are_zero(kind):
    """On a GPU, `cu_seqlens` is not read to refuse such rows: batches of a fixed shape may end in them."""
    q, k, v, log_decay, beta, state = (
        None if x is None else x.detach() for x in placed(draw(kind, t=3 * C, b=1))
    )
    bounds = torch.tensor([0, C - 3, C + 5], device=DEVICE)
    end = int(bounds[-1])
    state = state.expand(2, *state.shape[1:])
    more = None, bounds, 0.5
    y, _, saved = triton_recurrence.forward(q, k, v, log_decay, beta, state, *more, True)
    dq, *gradients, _ = triton_recurrence.backward(
        torch.ones_like(y), None, q, k, v, log_decay, beta, saved, state, *more
    )
    for result in (y, dq, *(x for x in gradients if x is not None)):
        assert result[:, :end].isfinite().all()
        assert not result[:, end:].any()


@every
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_a_padded_token_after_a_state_that_is_not_finite_gives_zero(kind):
    inputs = [None if x is None else x.detach() for x in placed(draw(kind, b=2, t=1))]
    state = torch.full_like(inputs[5], torch.inf)
    mask = torch.tensor([[False], [True]], device=DEVICE)
    y, after = triton(*inputs[:5], state, mask=mask)
    assert not y[0].any()
    assert torch.equal(after[0], state[0])


@every
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_gradients_of_padding_are_zero_where_those_of_a_state_are_not_finite(kind):
    q, k, v, *others, state = placed(draw(kind, b=1, t=5))
    mask = torch.tensor([[False, True, True, True, True]], device=DEVICE)
    _, after = triton(q, k, v, *others, state, mask=mask)
    (dv,) = torch.autograd.grad(after, v, torch.full_like(after, torch.inf))
    assert not dv[:, 0].any()


@every
def test_nothing_to_do(kind):
    """No tokens, no samples: the state is returned as a copy, and gradients have the right shape."""
    for b, time in ((2, 0), (0, 3)):
        inputs = placed(draw(kind, b=b, t=time))
        y, after = triton(*inputs)
        assert y.shape == (b, time, 4, 3)
        assert torch.equal(after, inputs[5])
        assert after.data_ptr() != inputs[5].data_ptr() or not b
        assert [x.shape for x in gradients(after, given_ones(inputs))] == [
            x.shape for x in given_ones(inputs)
        ]


def test_opcheck():
    for kind in ("delta, feature", "delta"):
        q, k, v, log_decay, beta, state = placed(draw(kind, b=1, t=3, h=1, g=1, d=2, e=2))
        mask = torch.ones(1, 3, dtype=torch.bool, device=DEVICE)
        for save in (True, False):
            arguments = (q, k, v, log_decay, beta, state, mask, None, 0.5, save)
            torch.library.opcheck(torch.ops.lintra.recurrence_triton.default, arguments)


def test_gradients_of_a_forward_that_kept_nothing():
    """P and T are then computed again."""
    inputs = placed(draw("delta, head", b=1, t=C + 3, h=1, g=1))
    found = []
    for save in (True, False):
        y, after, _ = torch.ops.lintra.recurrence_triton(*inputs, None, None, 0.5, save)
        found.append(torch.autograd.grad((y.sum() + after.sum()), given_ones(inputs)))
    assert_close(*found, rtol=0, atol=0)


def test_second_derivatives_are_refused():
    inputs = placed(draw("delta", b=1, t=2, h=1, g=1))
    y, _ = triton(*inputs)
    (g,) = torch.autograd.grad(y.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='triton' can be differentiated once"):
        g.sum().backward()


def test_what_it_refuses():
    inputs = [None if x is None else x.detach().to(DEVICE) for x in draw("delta, feature")]
    with pytest.raises(
        RuntimeError, match=r"impl='triton' cannot serve recurrence .*the tensors are float64"
    ):
        triton(*inputs)
    wide = placed(draw("delta", b=1, t=1, h=1, g=1, d=257))
    with pytest.raises(RuntimeError, match="keys of 257 features are wider than 256"):
        triton(*wide)
    y, _ = fast(*wide)  # PyTorch or C++ serves it
    assert_close(y.cpu().double(), recurrence_reference(*exactly(wide))[0], rtol=1e-5, atol=1e-5)

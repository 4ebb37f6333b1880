"""The selective scan in PyTorch and in C++: the definition; its limits; what it refuses."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.testing import assert_close

from lintra import native
from lintra.native import scan
from lintra.ops import Layout, causal_conv1d, selective_scan, selective_scan_reference
from lintra.ops.padding import expand_mask
from lintra.testing.laws import EXACT, Largest, gradients, some_masks
from tests.ops.recurrences import results

compiled_in = pytest.mark.skipif(not native.available(), reason="no C++")
IMPLS = ["torch", pytest.param("native", marks=compiled_in)]
both = pytest.mark.parametrize("impl", IMPLS)
TOKENS = (0, 1, 3, 4, 6)  # the positions of tensors with a time axis: u, dt, B, C, z


def draw(b=2, t=9, c=5, n=3, g=1, *, dtype=torch.float64, seed=0):
    """u, dt, A, B, C, D, z, dt_bias and a state, all differentiable; delta is about 0.3."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, t, c), (b, t, c), (c, n), (b, t, g, n), (b, t, g, n), (c,), (b, t, c), (c,), (b, c, n)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs[1] -= 1
    inputs[2] = -2 * inputs[2].abs()
    total = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = [x.to(dtype if i in TOKENS else total) for i, x in enumerate(inputs)]
    return [x.requires_grad_() for x in inputs]


def fast(u, dt, A, B, C, D, z, dt_bias, state, *, dt_softplus=True, **options):
    return selective_scan(u, dt, A, B, C, D, z, dt_bias, dt_softplus, state=state, **options)


def reference(u, dt, A, B, C, D, z, dt_bias, state, *, dt_softplus=True):
    return selective_scan_reference(u, dt, A, B, C, D, z, dt_bias, dt_softplus, state)


def without(inputs, *places):
    return [None if i in places else x for i, x in enumerate(inputs)]


@both
@settings(max_examples=60)
@given(data=st.data())
def test_it_is_the_recurrence(impl, data):
    g = data.draw(st.integers(1, 3), label="g")
    inputs = draw(
        b=data.draw(st.integers(0, 3), label="b"),
        t=data.draw(st.sampled_from([0, 1, 2, 7, 16, 17, 64, 65, 150]), label="t"),
        c=g * data.draw(st.sampled_from([1, 3, 8, 33, 70]), label="c/g"),
        n=data.draw(st.sampled_from([1, 2, 7, 16, 17]), label="n"),
        g=g,
    )
    inputs = without(inputs, *data.draw(st.sets(st.sampled_from([5, 6, 7])), label="left out"))
    dt_softplus = data.draw(st.booleans(), label="dt_softplus")
    if not dt_softplus:  # negative steps would grow without bound
        inputs[1] = inputs[1].detach().abs().requires_grad_()
        inputs[7] = None
    chunk = data.draw(st.sampled_from([1, 3, 16, 64]), label="chunk")
    found = results(partial(fast, dt_softplus=dt_softplus, chunk=chunk, impl=impl), inputs)
    assert_close(found, results(partial(reference, dt_softplus=dt_softplus), inputs), **EXACT)


@pytest.mark.parametrize(
    "sizes", [(2, 70, 67, 17, 1), (1, 1, 6, 5, 2), (1, 130, 3, 1, 3), (1, 20, 140, 16, 2)]
)
@pytest.mark.parametrize("left_out", [(), (5, 6, 7)])
def test_on_every_instruction_set(instruction_set, sizes, left_out):
    inputs = without(draw(*sizes), *left_out)
    assert_close(results(partial(fast, impl="native"), inputs), results(reference, inputs), **EXACT)


@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("lowest", [-35.0, -5.0, 5.0])
def test_float32_keeps_its_digits(instruction_set, lowest, softplus):
    """Also for step sizes as small as exp(-35), a softplus of which 1 + exp(-35) keeps no digits."""
    inputs = [x.detach() for x in draw(t=64, c=40, n=16, dtype=torch.float32)]
    inputs[1] = torch.linspace(lowest, lowest + 10, 2 * 64 * 40).reshape(2, 64, 40)
    inputs[1] = inputs[1] if softplus else inputs[1].exp().clamp(max=10)
    inputs[8].zero_()
    inputs = [x.requires_grad_() for x in without(inputs, 5, 6, 7) if x is not None]
    inputs[5:5] = [None] * 3
    call = partial(fast, dt_softplus=softplus, impl="native")
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    for a, e in zip(
        results(call, inputs), results(partial(reference, dt_softplus=softplus), exact), strict=True
    ):
        assert (a - e).abs().max() <= 3e-6 * e.abs().max()  # 1,024 terms, each off by a few units of 6e-8


@compiled_in
@pytest.mark.parametrize("mask", [None, torch.arange(150).expand(3, -1) % 7 > 0])
def test_the_number_of_threads_changes_no_bit(mask):
    """Sums over channels and sequences have a fixed order."""
    inputs = draw(b=3, t=150, c=200, n=16, dtype=torch.float32)
    call, before, found = partial(fast, mask=mask, impl="native"), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 16):
            torch.set_num_threads(threads)
            found.append(results(call, inputs))
    finally:
        torch.set_num_threads(before)
    for each in found[1:]:
        assert_close(each, found[0], rtol=0, atol=0)


@both
@pytest.mark.parametrize("cut", [0, 1, 16, 64, 69, 70])
def test_split_anywhere_and_resumed(impl, cut):
    inputs = draw(t=70)
    parts = (slice(None, cut), slice(cut, None))

    def twice(*x):
        first, second = ([x[i][:, part] if i in TOKENS else x[i] for i in range(8)] for part in parts)
        y1, middle = fast(*first, x[8], chunk=16, impl=impl)
        y2, final = fast(*second, middle, chunk=16, impl=impl)
        return torch.cat((y1, y2), 1), final

    assert_close(results(twice, inputs), results(partial(fast, impl=impl), inputs), **EXACT)


@pytest.mark.parametrize("n", [1, 16, 17])
def test_token_by_token_in_place_is_the_scan(instruction_set, n):
    inputs = [x.detach() for x in draw(b=3, t=6, c=70, n=n, g=2)]
    expected, after = reference(*inputs)
    state, ys = inputs[8].clone(), []
    for i in range(6):
        now = [x[:, i : i + 1] if place in TOKENS else x for place, x in enumerate(inputs[:8])]
        y, changed, _ = scan.forward(*now, state, True, None, None, False, out=state)
        assert changed is state
        ys.append(y)
    assert_close([torch.cat(ys, 1), state], [expected, after], **EXACT)


@compiled_in
@pytest.mark.parametrize("t", [1, 9])
def test_a_step_is_the_scan_of_one_token_with_padding_too(t):
    """When gradients are recorded, the tiles serve a single token too."""
    inputs = draw(b=3, t=t, c=70, n=17)
    mask = torch.arange(t).expand(3, -1) != torch.tensor([[0], [1], [0]])
    plain = fast(*(x.detach() for x in inputs), mask=mask, impl="native")
    assert_close(plain, fast(*inputs, mask=mask, impl="native"), **EXACT)
    if t == 1:
        assert (plain[0][::2] == 0).all()
        assert_close(plain[1][::2], inputs[8][::2], rtol=0, atol=0)


def strided(x, way):
    """x [b t c] with other strides."""
    if way == "time contiguous":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if way == "half of a projection":
        return torch.cat((x, x), 2).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[2]]
    if way == "batch contiguous":
        return x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if way == "every second":
        return x.repeat_interleave(2, 2)[..., ::2]
    return x[:, :1].expand_as(x)


@pytest.mark.parametrize(
    "way", ["time contiguous", "half of a projection", "batch contiguous", "every second", "expanded"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_strides_do_not_matter(instruction_set, way, dtype):
    for sizes in ((2, 70, 67, 3, 1), (3, 1, 20, 4, 1), (2, 20, 1, 2, 1)):
        inputs = [x.detach() for x in draw(*sizes, dtype=dtype)]
        other = [strided(x, way) if i in (0, 1, 6) else x for i, x in enumerate(inputs)]
        order = [x.contiguous().requires_grad_() for x in other]
        other = [x.detach().requires_grad_() for x in other]
        call = partial(fast, impl="native")
        found, expected = results(call, other), results(call, order)
        assert_close(found, expected, rtol=0, atol=0)
        if "time" in way:
            assert found[0].stride() == other[0].stride()


@both
@pytest.mark.parametrize("lengths", [[3, 0, 17, 1], [40], [0, 0], [64, 64, 8], [150, 2]])
def test_packed_sequences_are_those_alone(impl, lengths):
    total, m = sum(lengths), len(lengths)
    inputs = draw(b=1, t=total)
    inputs[8] = draw(b=m)[8]
    bounds = torch.tensor([0, *lengths]).cumsum(0)

    def alone(*x):
        found = [
            reference(*(x[p][:, i:j] if p in TOKENS else x[p] for p in range(8)), x[8][at : at + 1])
            for at, (i, j) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
        ]
        return torch.cat([y for y, _ in found], 1), torch.cat([after for _, after in found])

    packed = partial(fast, cu_seqlens=bounds, impl=impl)
    assert_close(results(packed, inputs), results(alone, inputs), **EXACT)


@both
def test_defect_18_padding_is_absence(impl):
    """Each sample with holes gives what its real tokens give alone, whether the holes are NaN or not."""
    inputs = draw(t=20)
    for mask in some_masks(20, 2):
        broken = [
            x.detach().masked_fill(~expand_mask(mask, x), torch.nan).requires_grad_() if i in TOKENS else x
            for i, x in enumerate(inputs)
        ]
        y, after = fast(*broken, mask=mask, chunk=8, impl=impl)
        assert (y[~mask] == 0).all()
        found = gradients(torch.cat((y.flatten(), after.flatten())), broken)
        assert all(x.isfinite().all() for x in found)
        assert all((found[i][~mask] == 0).all() for i in TOKENS)
        for i in range(2):
            rows = [x[i : i + 1, mask[i]] if place in TOKENS else x for place, x in enumerate(inputs)]
            alone, final = reference(*rows[:8], inputs[8][i : i + 1])
            assert_close(y[i, mask[i]], alone[0], **EXACT)
            assert_close(after[i], final[0], **EXACT)


@both
def test_first_and_second_derivatives(impl):
    mask = torch.tensor([[True, True, False, True, True], [False, True, True, True, False]])
    inputs = draw(t=5, c=2, n=2)
    assert torch.autograd.gradcheck(partial(fast, mask=mask, chunk=2, impl=impl), inputs, atol=1e-6, eps=1e-6)
    if impl == "native":
        y, _ = fast(*inputs, impl="native")
        (first,) = torch.autograd.grad(y.square().sum(), inputs[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="selective scan with impl='native' can be different"):
            first.sum().backward()
    else:
        few = draw(b=1, t=3, c=2, n=1)
        assert torch.autograd.gradgradcheck(partial(fast, chunk=2, impl="torch"), few)


@compiled_in
def test_the_state_alone_may_be_differentiated():
    inputs = draw(t=70)
    found = torch.autograd.grad(fast(*inputs, impl="native")[1].sum(), inputs[:4])
    assert_close(found, torch.autograd.grad(reference(*inputs)[1].sum(), inputs[:4]), **EXACT)


@compiled_in
@pytest.mark.parametrize("left_out", [(), (5, 6, 7)])
def test_it_is_an_operator_of_pytorch(left_out):
    inputs = without(draw(t=20), *left_out)
    for save in (True, False):
        arguments = (*inputs, True, None, None, save)
        torch.library.opcheck(torch.ops.lintra.selective_scan.default, arguments)
    inputs = without(draw(t=20, dtype=torch.float32), *left_out)
    compiled = torch.compile(partial(fast, impl="native"), fullgraph=True, backend="aot_eager")
    assert_close(results(compiled, inputs), results(partial(fast, impl="native"), inputs))
    with torch.no_grad():
        assert_close(compiled(*inputs), fast(*inputs))


@compiled_in
def test_compiled_with_time_contiguous():
    inputs = [
        strided(x.detach(), "time contiguous") if i in (0, 1, 6) else x for i, x in enumerate(draw(t=20))
    ]
    inputs = [x.detach().requires_grad_() for x in inputs]
    compiled = torch.compile(partial(fast, impl="native"), fullgraph=True, backend="aot_eager")

    def once(call):  # the compiled call may free its buffers in the backward
        y, state = call(*inputs)
        return [y, state, *torch.autograd.grad(y.square().sum() + state.square().sum(), inputs)]

    assert_close(once(compiled), once(reference), **EXACT)


def test_under_transforms_it_is_pytorch():
    inputs = [x.detach() for x in draw(t=20)]
    found = torch.func.vmap(lambda u: fast(u, *inputs[1:], chunk=8)[0])(torch.stack((inputs[0], -inputs[0])))
    expected = torch.stack([fast(u, *inputs[1:])[0] for u in (inputs[0], -inputs[0])])
    assert_close(found, expected, **EXACT)
    gradient = torch.func.grad(lambda u: fast(u, *inputs[1:], chunk=8)[0].sum())(inputs[0])
    u = inputs[0].clone().requires_grad_()
    assert_close(gradient, torch.autograd.grad(reference(u, *inputs[1:])[0].sum(), u)[0], **EXACT)


def test_under_autocast_it_is_bfloat16():
    inputs = draw(t=40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = fast(*inputs)
    low = [x.bfloat16() if i in TOKENS else x for i, x in enumerate(inputs)]
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert_close([y, state], list(fast(*low)))


@both
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_in_and_out(impl, dtype, unit):
    """16-bit inputs and outputs, float32 between: off by the rounding of y, and a little more for the sum."""
    inputs = draw(t=70, c=40, n=16, dtype=dtype)
    y, state = fast(*inputs, impl=impl)
    expected, after = reference(*(x.double() for x in inputs))
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    assert ((y.double() - expected).abs() <= unit * expected.abs() + 1e-4).all()
    assert_close(state.double(), after, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(y.float().sum() + state.sum(), inputs)
    assert [x.dtype for x in found] == [x.dtype for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y, state = reference(*exact)
    for a, e in zip(found, torch.autograd.grad(y.sum() + state.sum(), exact), strict=True):
        assert (a - e).abs().max() <= (2 * unit + 1e-4) * e.abs().max()


def test_memory_is_that_of_a_chunk():
    """impl='torch' keeps [b c n] numbers for no more than one chunk of tokens, in the backward too."""
    inputs = draw(b=1, t=1024, c=8, n=16, dtype=torch.float32)
    with Largest() as largest:
        fast(*inputs, chunk=32, impl="torch")[0].sum().backward()
    assert largest.numbers == 1024 * 16  # B, C


# Limits: the scan becomes something simpler where its formulas say so.


@both
def test_without_decay_it_is_a_cumulative_sum(impl):
    """A = 0, D = 0, delta = 1: C reads the sum of what B wrote."""
    u, _, A, B, C, *_ = (x.detach() for x in draw(t=70, c=6, n=4, g=2))
    y, state = selective_scan(u, torch.ones_like(u), 0 * A, B, C, 0 * A[:, 0], impl=impl)
    written = torch.einsum("btgr,btgn->btgrn", u.unflatten(2, (2, 3)), B).cumsum(1)
    assert_close(y, torch.einsum("btgrn,btgn->btgr", written, C).flatten(2), **EXACT)
    assert_close(state, written[:, -1].flatten(1, 2), **EXACT)


@both
def test_without_input_it_decays(impl):
    """u = 0: the state is exp(A sum delta) of what it was, whether A is negative or positive."""
    u, dt, A, B, C, _, _, dt_bias, state = (x.detach() for x in draw(t=40))
    for rates in (A, -A / 10):
        inputs = (0 * u, dt, rates, B, C, None, None, dt_bias, state)
        y, after = fast(*inputs, impl=impl)
        elapsed = functional.softplus(dt + dt_bias).cumsum(1)[..., None]
        states = (elapsed * rates).exp() * state[:, None]
        assert_close(after, states[:, -1], **EXACT)
        assert_close(y, (states * C).sum(-1), **EXACT)


@both
def test_a_step_of_zero_changes_nothing(impl):
    inputs = [x.detach() for x in draw(t=20)]
    inputs[1] = 0 * inputs[1]
    y, after = fast(*inputs[:5], None, None, None, inputs[8], dt_softplus=False, impl=impl)
    assert_close(after, inputs[8], rtol=0, atol=0)
    assert_close(y, torch.einsum("bcn,btn->btc", after, inputs[4][:, :, 0]), **EXACT)


@both
def test_the_gate_and_the_skip_stand_alone(impl):
    """C = 0: y is D u silu(z)."""
    u, dt, A, B, C, D, z, dt_bias, state = draw(t=20)
    y, _ = fast(u, dt, A, B, 0 * C, D, z, dt_bias, state, impl=impl)
    assert_close(y, D * u * functional.silu(z), **EXACT)


@both
def test_groups_are_repeated_channels(impl):
    inputs = draw(t=20, c=6, g=3)
    found = results(partial(fast, impl=impl), inputs)

    def repeated(u, dt, A, B, C, *others):
        alone = [
            fast(u[..., i : i + 2], dt[..., i : i + 2], A[i : i + 2], B[:, :, i // 2], C[:, :, i // 2],
                 *(x[..., i : i + 2] for x in others[:3]), others[3][:, i : i + 2], impl=impl)
            for i in (0, 2, 4)
        ]  # fmt: skip
        return torch.cat([y for y, _ in alone], 2), torch.cat([after for _, after in alone], 1)

    assert_close(found, results(repeated, inputs), **EXACT)


@both
def test_extremes_stay_finite(impl):
    """Decays to nothing, extreme step sizes on either side, closed gates: no NaN from inf times 0."""
    inputs = [x.detach() for x in draw(t=64, dtype=torch.float32)]
    inputs[1][:, ::3] = 300.0
    inputs[1][:, 1::3] = -300.0
    inputs[6][:, ::2] = -300.0
    inputs = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = results(partial(fast, impl=impl), inputs), results(reference, exact)
    for a, e in zip(found, expected, strict=True):
        assert a.isfinite().all()
        assert (a - e).abs().max() <= 1e-5 * e.abs().max()


@both
def test_without_tokens_the_state_is_a_copy(impl):
    inputs = draw(t=0)
    for name in (impl, "reference"):
        y, after = fast(*inputs, impl=name)
        assert y.shape == (2, 0, 5)
        assert after.data_ptr() != inputs[8].data_ptr()
        assert_close(after, inputs[8])


def test_no_state_is_a_state_of_zeros():
    inputs = draw(t=20)
    assert_close(fast(*inputs[:8], None), fast(*inputs[:8], 0 * inputs[8]), rtol=0, atol=0)


def test_weights_may_be_of_another_dtype():
    inputs = [x.detach() for x in draw(t=20, dtype=torch.bfloat16)]
    low = [x.bfloat16() if i in (2, 5, 7) else x for i, x in enumerate(inputs)]
    wide = [x.float() if i in (2, 5, 7) else x for i, x in enumerate(low)]
    assert_close(fast(*low), fast(*wide), rtol=0, atol=0)


def change(place, function, **sizes):
    inputs = draw(**sizes)
    inputs[place] = function(inputs[place])
    return inputs


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        (change(0, lambda x: x[0]), {}, ValueError, r"u must have the 3 axes \[b t c\]"),
        (change(0, lambda x: x.long()), {}, TypeError, "u must be float16"),
        (change(1, lambda x: x[:, :4]), {}, ValueError, r"dt must be \[b=2 t=9 c=5\]"),
        (change(1, lambda x: x.float()), {}, TypeError, "dt must have the dtype of u, torch.float64"),
        (change(2, lambda x: x[:3]), {}, ValueError, r"A must be \[c=5 n\]"),
        (draw(n=0), {}, ValueError, "A at least 1 state, got c=5 and n=0"),
        (change(2, lambda x: x.long()), {}, TypeError, "A must be float16"),
        (change(3, lambda x: x[..., :2]), {}, ValueError, r"B must be \[b=2 t=9 g=1 n=3\]"),
        (change(3, lambda x: x[:, :, 0]), {}, ValueError, r"C must have the 3 axes \[b t n\]"),
        (change(4, lambda x: x.float()), {}, TypeError, "C must have the dtype of u"),
        (draw(g=2), {}, ValueError, "groups of B and C must divide the channels, got g=2 and c=5"),
        (change(5, lambda x: x[:2]), {}, ValueError, r"D must be \[c=5\]"),
        (change(6, lambda x: x[:, :, :2]), {}, ValueError, r"z must be \[b=2 t=9 c=5\]"),
        (change(7, lambda x: x.to("meta")), {}, ValueError, "dt_bias must be on the device of u, cpu"),
        (change(8, lambda x: x[..., :2]), {}, ValueError, r"state must be \[b=2 c=5 n=3\]"),
        (change(8, lambda x: x.float()), {}, TypeError, "state must be torch.float64 on cpu"),
        (draw(), {"chunk": 0}, ValueError, "chunk must be at least 1 token, got 0"),
        (draw(), {"mask": torch.ones(2, 9)}, TypeError, "mask must be boolean"),
        (draw(), {"cu_seqlens": torch.tensor([0, 9])}, ValueError, r"u must be \[1 t ...\]"),
        (draw(), {"impl": "triton"}, ValueError, "impl must be 'auto' or one of"),
    ],
)  # fmt: skip
def test_refuses(inputs, options, error, message):
    with pytest.raises(error, match=message):
        fast(*inputs, **options)


@compiled_in
def test_a_state_of_another_dtype_is_not_read():
    """A layout stands for arguments that have been checked, and a compiler skips the checks of a state."""
    x, w = torch.randn(1, 5, 8), torch.randn(8, 4)
    state = torch.ones(1, 3, 8, dtype=torch.bfloat16)
    A, B = -torch.ones(8, 4), torch.randn(1, 5, 4)
    for before, call in (
        (state, lambda **of: causal_conv1d(x, w, **of)),
        (state.new_ones(1, 8, 4), lambda **of: selective_scan(x, x.abs(), A, B, B, **of)),
    ):
        with pytest.raises(TypeError, match=r"state must be torch\.float32, got torch\.bfloat16"):
            call(state=before, layout=Layout.of("x", x), impl="native")

"""The sum with a decay of every feature, and the delta rule with every decay, in PyTorch and in C++: the
definition; what it recalls; its limits; what it refuses."""

import math
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.testing import assert_close

from lintra import native
from lintra.ops import LinearState, linear_attention
from lintra.ops.padding import expand_mask
from lintra.testing.laws import EXACT, gradients, some_masks
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

CUTS = [0, 1, 16, 50, 69, 70]  # over 70 tokens
IMPLS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason="no C++"))]

every = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("impl", IMPLS)


@both
@settings(max_examples=60)
@given(data=st.data())
def test_it_is_the_recurrence(impl, data):
    kind = data.draw(st.sampled_from(list(KINDS)), label="kind")
    g = data.draw(st.integers(1, 3), label="g")
    inputs = draw(
        kind,
        b=data.draw(st.integers(0, 3), label="b"),
        t=data.draw(st.sampled_from([0, 1, 2, 7, 16, 17, 31, 50, 150]), label="t"),
        h=g * data.draw(st.integers(1, 3), label="h/g"),
        g=g,
        d=data.draw(st.sampled_from([1, 4, 9, 20]), label="d"),
        e=data.draw(st.sampled_from([1, 3, 8, 33]), label="e"),
    )
    chunk = data.draw(st.sampled_from([1, 3, 16, 64]), label="chunk")
    found = results(partial(fast, chunk=chunk, impl=impl), inputs)
    assert_close(found, results(reference, inputs), **EXACT)


@every
@pytest.mark.skipif(not native.available(), reason="no C++")
def test_on_every_instruction_set(kind):
    inputs = draw(kind, t=70, d=20, e=33)
    expected = results(reference, inputs)
    for name in native.instruction_sets():
        with native.use(name):
            assert_close(results(partial(fast, impl="native"), inputs), expected, **EXACT)


def strided(x, way):
    """x [b t ...], with the same numbers or, expanded, those of its first token."""
    if way == "every second":
        return x.repeat_interleave(2, -1)[..., ::2]
    if way == "time contiguous":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x[:, :1].expand_as(x)


@every
@pytest.mark.parametrize("way", ["every second", "time contiguous", "expanded"])
@pytest.mark.skipif(not native.available(), reason="no C++")
def test_strides_do_not_matter(kind, way):
    """Of q, k, v, decays and step sizes; the state is transposed."""
    *tokens, state = (None if x is None else x.detach() for x in draw(kind, t=40, d=20, e=33))
    other = [None if x is None else strided(x, way) for x in tokens]
    other.append(state.mT.contiguous().mT)
    order = [None if x is None else x.contiguous().requires_grad_() for x in other]
    other = [None if x is None else x.detach().requires_grad_() for x in other]
    for name in native.instruction_sets():
        with native.use(name):
            call = partial(fast, impl="native")
            assert_close(results(call, other), results(call, order), rtol=0, atol=0)


@every
@pytest.mark.skipif(not native.available(), reason="no C++")
def test_columns_are_shared_between_threads_where_heads_are_few(kind):
    inputs = draw(kind, b=1, t=70, h=2, g=1, d=9, e=100)
    expected = results(reference, inputs)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5, 16):
            torch.set_num_threads(threads)
            assert_close(results(partial(fast, impl="native"), inputs), expected, **EXACT)
    finally:
        torch.set_num_threads(before)


@both
@every
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_sequence(kind, impl, packed, bad):
    """The others have the same values and gradients as beside a clean sequence, to the last bit."""
    inputs = draw(kind, b=3, t=20, h=2, g=1, d=5, e=3)
    spoilt = [None if x is None else x.detach().clone() for x in inputs]
    spoilt[1][0, 3] = spoilt[2][0, 4] = bad
    spoilt = [None if x is None else x.requires_grad_() for x in spoilt]
    bounds = torch.tensor([0, 20, 40, 60]) if packed else None

    def call(*x):
        if packed:
            x = [None if each is None else each.flatten(0, 1)[None] for each in x[:-1]] + [x[-1]]
        y, state = fast(*x, impl=impl, cu_seqlens=bounds)
        return y.view(3, 20, 2, 3), state

    for found, expected in zip(results(call, spoilt), results(call, inputs), strict=True):
        assert_close(found[1:], expected[1:], rtol=0, atol=0)


@both
@every
@pytest.mark.parametrize("cut", CUTS)
def test_split_anywhere_and_resumed(kind, impl, cut):
    inputs = draw(kind, t=70)

    def twice(*x):
        pieces = [[None if each is None else each[:, part] for each in x[:-1]] for part in parts]
        y1, middle = fast(*pieces[0], x[-1], chunk=16, impl=impl)
        y2, final = fast(*pieces[1], middle, chunk=16, impl=impl)
        return torch.cat((y1, y2), 1), final

    parts = (slice(None, cut), slice(cut, None))
    assert_close(results(twice, inputs), results(partial(fast, impl=impl), inputs), **EXACT)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.skipif(not native.available(), reason="no C++")
def test_one_token_may_be_added_in_place(kind, dtype):
    inputs = [None if x is None else x.detach() for x in draw(kind, b=3, t=1, d=20, e=33, dtype=dtype)]
    expected, after = fast(*inputs)
    state = LinearState.of(inputs[5].clone())
    tensors = dict(zip(("q", "k", "v", "log_decay", "beta"), inputs, strict=False))
    y, changed = linear_attention(**tensors, state=state, normalize=False, inplace=True)
    assert changed is state
    assert torch.equal(y, expected)
    assert torch.equal(state.kv, after)


@pytest.mark.skipif(not native.available(), reason="no C++")
def test_a_token_in_place_has_the_dtype_of_the_values():
    q, k, v = (torch.randn(1, 1, 2, 4).bfloat16() for _ in range(3))
    options = {"beta": torch.rand(1, 1, 2), "feature_map": "relu", "normalize": False}
    with torch.no_grad():
        state = linear_attention(q, k, v, **options)[1]
        for inplace in (False, True):
            y, _ = linear_attention(q, k, v, state=state, inplace=inplace, **options)
            assert y.dtype == torch.bfloat16


@every
@pytest.mark.parametrize(("t", "inplace"), [(2, True), (0, True), (1, False)])
def test_a_state_is_written_over_by_one_token_alone(kind, t, inplace):
    inputs = [None if x is None else x.detach() for x in draw(kind, t=t)]
    before = inputs[5].clone()
    after = fast(*inputs, inplace=inplace)[1]
    assert after.data_ptr() != inputs[5].data_ptr()
    assert torch.equal(inputs[5], before)


@every
@pytest.mark.skipif(not native.available(), reason="no C++")
def test_a_graph_that_kept_a_state_is_refused_once_it_is_written_over(kind):
    inputs = draw(kind, t=1)
    inputs[5] = inputs[5].detach()
    y, _ = fast(*inputs, impl="torch")
    with torch.no_grad():
        fast(*inputs, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(y, given_ones(inputs[:5]))


@every
def test_gradients_keep_the_state_before(kind):
    inputs = draw(kind, t=1)
    given = given_ones(inputs)
    found = gradients(fast(*inputs, inplace=True)[0], given)
    assert_close(found, gradients(reference(*inputs)[0], given), **EXACT)


@both
@every
@pytest.mark.parametrize(
    "heads", [(4, 2, 4), (2, 2, 4), (4, 4, 2), (1, 1, 3), (6, 3, 3), (1, 1, 1), (8, 2, 4)]
)
def test_heads_are_shared_in_either_direction(kind, impl, heads):
    queries, keys, values = heads
    g = max(keys, values)
    full = draw(kind, t=20, h=max(queries, g), g=g)
    q, k, v = (x[:, :, :n].detach().requires_grad_() for x, n in zip(full[:3], heads, strict=True))
    inputs = [q, k, v, *full[3:]]

    assert_close(
        results(partial(fast, impl=impl), inputs),
        results(partial(of_repeated_heads, heads=g), inputs),
        **EXACT,
    )


@both
@every
@pytest.mark.parametrize("lengths", [[3, 0, 17, 1], [40], [0, 0], [16, 16, 8], [150, 2]])
def test_packed_sequences_are_those_alone(kind, impl, lengths):
    total, n = sum(lengths), len(lengths)
    inputs = draw(kind, b=1, t=total)
    inputs[5] = draw(kind, b=n)[5]
    bounds = torch.tensor([0, *lengths]).cumsum(0)

    packed = partial(fast, cu_seqlens=bounds, impl=impl)
    assert_close(results(packed, inputs), results(partial(of_packed, bounds=bounds), inputs), **EXACT)


@both
@every
def test_defect_18_padding_is_absence(kind, impl):
    """Each sample with holes gives what its real tokens give alone, whether the holes are NaN or not."""
    *tokens, state = draw(kind, t=20)
    for mask in some_masks(20, 2):
        broken = [
            None if x is None else x.detach().masked_fill(~expand_mask(mask, x), torch.nan).requires_grad_()
            for x in tokens
        ]
        y, after = fast(*broken, state, mask=mask, chunk=8, impl=impl)
        assert (y[~mask] == 0).all()
        found = gradients(torch.cat((y.flatten(), after.flatten())), given_ones(broken))
        assert all(x.isfinite().all() and (x[~mask] == 0).all() for x in found)
        for i in range(2):
            rows = [None if x is None else x[i : i + 1, mask[i]] for x in tokens]
            alone, final = reference(*rows, state[i : i + 1])
            assert_close(y[i, mask[i]], alone[0], **EXACT)
            assert_close(after[i], final[0], **EXACT)


@both
def test_normalize_divides_by_the_sum_of_weights(impl):
    """With a decay of every feature; the scale multiplies the ratio."""
    q, k, v, log_decay, _, state = draw("sum, feature", t=30)
    q, k = q.detach().exp().requires_grad_(), k.detach().exp().requires_grad_()
    z = (0 * state[..., 0]).detach() + 2

    def ratio(q, k, v, log_decay, state):
        options = {"log_decay": log_decay, "state": LinearState(state, z), "scale": 0.5, "impl": impl}
        y, after = linear_attention(q, k, v, **options)
        return y, after.kv

    def written_out(q, k, v, log_decay, state):
        ones = v.new_ones(*v.shape[:3], 1)
        joined = torch.cat((state, z[..., None]), -1)
        y, after = reference(q, k, torch.cat((v, ones), -1), log_decay, None, joined)
        return 0.5 * y[..., :-1] / (y[..., -1:] + 1e-6), after[..., :-1]

    inputs = [q, k, v, log_decay, state]
    assert_close(results(ratio, inputs), results(written_out, inputs), **EXACT)


@both
@pytest.mark.parametrize("key_heads", [2, 4])
def test_feature_maps_and_input_weights_come_before(impl, key_heads):
    """With as many key heads as states, or fewer."""
    q, k, v, log_decay, _, _ = draw("sum, feature", t=30, h=4, g=4)
    k = k[:, :, :key_heads]
    log_input = log_decay[..., 0]
    options = {"feature_map": "elu+1", "log_input": log_input, "log_decay": log_decay, "impl": impl}
    y, after = linear_attention(q, k, v, normalize=False, **options)
    q, k = (functional.elu(x) + 1 for x in (q, k))
    k = k.repeat_interleave(4 // key_heads, 2)
    expected, state = reference(q, k * log_input.exp()[..., None], v, log_decay, None, 0 * after.kv)
    assert_close([y, after.kv], [expected, state], **EXACT)


@every
def test_first_and_second_derivatives(kind):
    mask = torch.tensor([[True, True, False, True, True], [False, True, True, True, False]])
    inputs = draw(kind, t=5, h=2, g=1, d=2, e=2)
    tensors = tuple(given_ones(inputs))

    def call(*x, **options):
        left = list(x)
        return fast(*(None if each is None else left.pop(0) for each in inputs), chunk=2, **options)

    assert torch.autograd.gradcheck(partial(call, mask=mask, impl="torch"), tensors, atol=1e-6, eps=1e-6)
    if native.available():
        assert torch.autograd.gradcheck(partial(call, mask=mask, impl="native"), tensors, atol=1e-6, eps=1e-6)
        y, _ = call(*tensors, impl="native")
        (first,) = torch.autograd.grad(y.square().sum(), tensors[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="impl='torch' for second derivatives"):
            first.sum().backward()
    inputs = draw(kind, b=1, t=3, h=1, g=1, d=2, e=2)
    assert torch.autograd.gradgradcheck(lambda *x: call(*x, impl="torch")[0], tuple(given_ones(inputs)))


@every
@pytest.mark.skipif(not native.available(), reason="no C++")
def test_it_is_an_operator_of_pytorch(kind):
    q, k, v, log_decay, beta, state = draw(kind, t=20)
    for save in (True, False):
        arguments = (q, k, v, log_decay, beta, state, None, None, 0.5, save)
        torch.library.opcheck(torch.ops.lintra.recurrence.default, arguments)
    inputs = draw(kind, t=20, dtype=torch.float32)
    torch.compiler.reset()  # earlier compilations would turn sizes into symbols
    compiled = torch.compile(partial(fast, impl="native"), fullgraph=True, backend="aot_eager")
    assert_close(results(compiled, inputs), results(partial(fast, impl="native"), inputs))
    sized = torch.compile(partial(fast, impl="native"), fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        assert_close(compiled(*inputs), fast(*inputs))
        assert_close(sized(*inputs), fast(*inputs))


@every
def test_under_vmap_it_is_pytorch(kind):
    inputs = draw(kind, t=20)
    found = torch.func.vmap(lambda q: fast(q, *inputs[1:])[0])(torch.stack((inputs[0], 2 * inputs[0])))
    y, _ = fast(*inputs)
    assert_close(found, torch.stack((y, 2 * y)), **EXACT)


@every
def test_under_autocast_it_is_bfloat16(kind):
    inputs = draw(kind, t=40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = fast(*inputs)
    low = [x.bfloat16() for x in inputs[:3]]
    expected, after = fast(*low, *inputs[3:])
    assert y.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert_close([y, state], [expected, after])


def test_an_exported_sum_is_of_any_length():
    class Sum(torch.nn.Module):
        def forward(self, q, k, v, log_decay, state):
            return fast(q, k, v, log_decay, None, state, chunk=4, impl="torch")

    time = torch.export.Dim("time", min=5)
    shapes = (*[{1: time}] * 4, {})
    options = {"dynamic_shapes": shapes, "prefer_deferred_runtime_asserts_over_guards": True}
    detached = [[x.detach() for x in given_ones(draw("sum, feature", t=t))] for t in (7, 5, 9, 30)]
    graph = torch.export.export(Sum(), tuple(detached[0]), **options).module()
    for inputs in detached:
        *inputs, state = inputs
        inputs[3] = inputs[3].index_fill(1, torch.tensor([2]), -1e5)  # so that its neighbours lose no digit
        assert_close(graph(*inputs, state), Sum()(*inputs, state), **EXACT)


# Limits: one rule becomes another where their formulas say so.


@both
def test_orthonormal_keys_are_recalled_exactly(impl):
    generator = torch.Generator().manual_seed(0)
    k = torch.linalg.qr(torch.randn(2, 6, 6, dtype=torch.float64, generator=generator))[0]
    k = k[:, :, None]  # six keys of one head
    v = draw("delta", t=6, g=1)[2]
    _, state = fast(k, k, v, None, torch.ones(2, 6, 1).double(), None, impl=impl)
    assert_close(torch.einsum("bgde,btgd->btge", state, k), v, **EXACT)


@both
def test_a_repeated_key_overwrites_its_value(impl):
    """beta = 1: only the last value comes back, and no other key is disturbed."""
    q, k, v, _, _, state = draw("delta", t=9, h=2)
    k = torch.cat((k[:, :1].expand(-1, 8, -1, -1), k[:, 8:]), 1)
    y, _ = fast(k, k, v, None, torch.ones(2, 9, 2).double(), state, impl=impl)
    assert_close(y, v, **EXACT)
    other = q - (q * k[:, :1]).sum(-1, keepdim=True) * k[:, :1]  # orthogonal to the key
    y, _ = fast(other[:, :8], k[:, :8], v[:, :8], None, torch.ones(2, 8, 2).double(), state, impl=impl)
    assert_close(y, torch.einsum("bgde,btgd->btge", state, other[:, :8]), **EXACT)


@both
def test_beta_two_reflects(impl):
    """I - 2 k k^T twice is the identity: a value written under a key changes its sign twice, and is back."""
    _, k, v, _, _, state = draw("delta", t=2, h=2)
    k, v = k[:, :1].expand(-1, 2, -1, -1), 0 * v
    _, after = fast(k, k, v, None, torch.full((2, 2, 2), 2.0).double(), state, impl=impl)
    assert_close(after, state, **EXACT)


@both
@pytest.mark.parametrize("kind", ["delta, head", "delta, feature", "delta"])
def test_beta_zero_writes_nothing(kind, impl):
    q, k, v, log_decay, beta, state = draw(kind, t=40)
    _, after = fast(q, k, v, log_decay, 0 * beta, state, impl=impl)
    decay = 0 if log_decay is None else log_decay.sum(1)
    kept = state if log_decay is None else decay.exp().reshape(2, 2, -1, 1) * state
    assert_close(after, kept, **EXACT)


@both
@pytest.mark.parametrize("kind", ["delta, head", "delta, feature"])
def test_a_decay_of_one_is_none(kind, impl):
    inputs = draw(kind, t=40)
    inputs[3] = (0 * inputs[3].detach()).requires_grad_()
    call = partial(fast, impl=impl)
    found = results(call, inputs)
    expected = results(lambda q, k, v, _, beta, state: call(q, k, v, None, beta, state), inputs)
    del found[5], expected[5]  # the gradient of the decay itself
    assert_close(found, expected, **EXACT)


@both
@pytest.mark.parametrize("delta", [False, True])
def test_equal_features_are_one_decay_a_head(delta, impl):
    """KDA with equal decays is the gated delta rule, and gated linear attention the sum with a decay."""
    inputs = draw("delta, feature" if delta else "sum, feature", t=40)

    def equal(q, k, v, log_decay, beta, state):
        return fast(q, k, v, log_decay[..., :1].expand_as(log_decay), beta, state, chunk=16, impl=impl)

    def one(q, k, v, log_decay, beta, state):
        before = LinearState(state, state[..., 0] * 0 if not delta else state.new_empty(2, 2, 0))
        options = {"normalize": False, "impl": impl, "log_decay": log_decay[..., 0], "beta": beta}
        y, after = linear_attention(q, k, v, state=before, **options)
        return y, after.kv

    assert_close(results(equal, inputs), results(one, inputs), **EXACT)


@both
def test_orthogonal_keys_leave_the_gated_sum(impl):
    """Orthogonal keys make all k k^T terms vanish: linear attention with decay and inputs beta."""
    q, _, v, log_decay, beta, _ = draw("delta, head", t=6, d=6)
    k = torch.eye(6).double()[None, :, None].expand(2, 6, 2, 6)
    y, state = fast(q, k, v, log_decay, beta, None, impl=impl)
    options = {"log_decay": log_decay, "log_input": beta.log(), "normalize": False, "impl": "torch"}
    expected, after = linear_attention(q, k, v, **options)
    assert_close([y, state], [expected, after.kv], **EXACT)
    inputs = [q, v, beta, log_decay]
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


# Numbers.


@both
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_equal_keys_for_a_long_time_stay_bounded(beta, impl):
    """The triangle is then as far from orthogonal as possible."""
    inputs = draw("delta", t=2048, dtype=torch.float32)
    q, k, v, _, _, state = (None if x is None else x.detach() for x in inputs)
    k = k[:, :1].expand_as(k)
    inputs = [q, k, v, None, torch.full((2, 2048, 2), beta), state]
    exact, final = reference(*(None if x is None else x.double() for x in inputs))
    y, after = fast(*inputs, impl=impl)
    # 2,048 reflections in float32, each off by about 1e-7 in one direction.
    assert (y - exact).abs().max() < 2e-4 * exact.abs().max()
    assert (after - final).abs().max() < 2e-4 * final.abs().max()


@both
def test_long_keys_diverge(impl):
    """`reference` warns of this, and the mechanism normalises its keys for this reason."""
    q, k, v, _, beta, state = draw("delta", t=200)
    _, after = fast(q, 3 * k, v, None, beta, state, impl=impl)
    assert after.abs().max() > 1e6


@both
@pytest.mark.parametrize("kind", [name for name, (_, decay) in KINDS.items() if decay])
@pytest.mark.parametrize("rate", [-1e-9, -5.0, -60.0, -1e4, -math.inf])
def test_defect_17_no_decay_overflows(kind, impl, rate):
    """A token, or some of its features, forgets everything and its neighbours nothing: exp(-b) would be inf,
    and differences of elapsed decays would be off by 1e-3."""
    inputs = draw(kind, t=64, dtype=torch.float32)
    with torch.no_grad():
        inputs[3].fill_(-0.01)
        inputs[3][:, 5] = rate
        if inputs[3].dim() == 4:
            inputs[3][:, 10:] = torch.tensor([rate, -1e-9, rate, -0.1, 0.0])
    found = results(partial(fast, impl=impl), inputs)
    exact = results(reference, [None if x is None else x.detach().double().requires_grad_() for x in inputs])
    for a, e in zip(found, exact, strict=True):
        assert a.isfinite().all()
        assert (a - e).abs().max() <= 1e-5 * e.abs().max()  # float32, 64 tokens through one triangle


@both
@every
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_in_and_out(kind, impl, dtype, unit):
    """16-bit inputs and outputs, float32 between: off by the rounding of y, and a little more for the sum."""
    inputs = draw(kind, t=70, dtype=dtype)
    y, state = fast(*inputs, impl=impl)
    expected, after = reference(*(None if x is None else x.double() for x in inputs))
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    assert ((y.double() - expected).abs() <= unit * expected.abs() + 1e-4).all()
    assert_close(state.double(), after, rtol=1e-4, atol=1e-4)
    y.float().sum().backward()
    assert [x.grad.dtype for x in inputs[:3]] == [dtype] * 3


@both
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("decay", ["head", "feature"])
def test_half_precision_is_rounded_once_behind_the_denominator_and_the_scale(decay, dtype, unit, impl):
    """The sums of 2,000 tokens overflow float16, but the ratio and the scaled sum do not."""
    q = torch.ones(1, 2000, 1, 64, dtype=dtype)
    v = torch.linspace(0.5, 1, 2000, dtype=torch.float64)[None, :, None, None].to(dtype)
    log_decay = torch.zeros(1, 2000, 1, 64) if decay == "feature" else torch.zeros(1, 2000, 1)
    y, _ = linear_attention(q, q, v, log_decay=log_decay, impl=impl)
    expected = v.double().cumsum(1) / torch.arange(1, 2001)[None, :, None, None]
    assert ((y.double() - expected).abs() <= unit * expected).all()
    y, _ = linear_attention(q, q, v, log_decay=log_decay, normalize=False, scale=1 / 64, impl=impl)
    expected = v.double().cumsum(1)
    assert ((y.double() - expected).abs() <= unit * expected).all()


@both
@every
def test_without_tokens_the_state_is_a_copy(kind, impl):
    inputs = draw(kind, t=0)
    for options in ({"impl": impl}, {"impl": "reference"}):
        _, after = fast(*inputs, **options)
        assert after.data_ptr() != inputs[5].data_ptr()
        assert_close(after, inputs[5])


@every
def test_a_state_in_bfloat16_stays_so(kind):
    inputs = draw(kind, t=3, dtype=torch.float32)
    low = inputs[5].detach().bfloat16()
    y, state = fast(*inputs[:5], low)
    expected, after = fast(*inputs[:5], low.float())
    assert state.dtype == torch.bfloat16
    assert_close([y, state], [expected, after.bfloat16()], rtol=0, atol=0)


@pytest.mark.skipif(not native.available(), reason="no C++")
def test_several_threads_of_python_may_call_it_at_once():
    inputs = draw("delta, feature", t=200, d=16, e=16)
    expected, found = fast(*inputs, impl="native"), {}
    workers = [
        threading.Thread(target=lambda i=i: found.update({i: fast(*inputs, impl="native")})) for i in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for each in found.values():
        assert_close(each, expected, rtol=0, atol=0)
    assert len(found) == 4


def change(kind, place, function):
    inputs = draw(kind)
    inputs[place] = function(inputs[place])
    return inputs


GATED, DELTA = "sum, feature", "delta, head"


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        (change(GATED, 3, lambda x: x[..., :4]), {}, ValueError, r"log_decay must be \[b=2 s=9 g=2 d=5\]"),
        (change(GATED, 3, lambda x: -x), {}, ValueError, "log_decay must be at most 0"),
        (change(GATED, 3, lambda x: x.long()), {}, TypeError, "log_decay must be float16"),
        (change(GATED, 0, lambda x: x[:, :, :3]), {}, ValueError, "multiple of the key-value heads, got h=3"),
        (change(GATED, 0, lambda x: x[:, :5]), {}, ValueError, "as many queries as keys, got t=5 and s=9"),
        (change(GATED, 5, lambda x: x[:, :1]), {}, ValueError, r"state.kv must be \[b=2 g=2 d=5 e=3\]"),
        (change(GATED, 5, lambda x: x.float()), {}, TypeError, "state.kv must be torch.float64 on cpu"),
        (draw(GATED), {"chunk": 0}, ValueError, "chunk must be at least 1 token, got 0"),
        (draw(GATED), {"mask": torch.ones(2, 9)}, TypeError, "mask must be boolean"),
        (draw(GATED), {"causal": False}, ValueError, "log_decay needs causal=True"),
        (draw(DELTA), {"causal": False}, ValueError, "needs causal=True"),
        (draw("delta"), {"causal": False}, ValueError, "beta needs causal=True"),
        (draw(DELTA), {"normalize": True}, ValueError, "normalize must be False with beta"),
        (draw(DELTA), {"log_input": torch.zeros(2, 9, 2)}, ValueError, "log_input must be None with beta"),
        (draw(DELTA), {"impl": "cuda"}, ValueError, "impl must be 'auto' or one of"),
        (draw(DELTA), {"impl": "triton"}, RuntimeError, "impl='triton' cannot serve recurrence here"),
        (change(DELTA, 4, lambda x: x[:, :3]), {}, ValueError, r"beta must be \[b=2 s=9 g=2\]"),
        (change(DELTA, 4, lambda x: x.long()), {}, TypeError, "beta must be float16"),
        (change(DELTA, 3, lambda x: -x), {}, ValueError, "log_decay must be at most 0"),
        (change(DELTA, 2, lambda x: x[:, :, :0]), {}, ValueError, "must be multiples of the smaller"),
        (change(DELTA, 2, torch.Tensor.float), {}, TypeError, "v must have the dtype of k"),
        (change(DELTA, 3, lambda x: x * torch.nan), {}, ValueError, "log_decay must be at most 0"),
        (draw(DELTA), {"scale": "a"}, ValueError, "scale must be a finite number or None, got 'a'"),
        (draw(DELTA), {"scale": math.inf}, ValueError, "scale must be a finite number or None, got inf"),
    ],
)
def test_refuses(inputs, options, error, message):
    with pytest.raises(error, match=message):
        fast(*inputs, **options)


@pytest.mark.parametrize(("h", "g", "values"), [(6, 2, 4), (12, 2, 8), (3, 2, 2), (4, 2, 3), (2, 2, 3)])
def test_refuses_heads_that_do_not_divide(h, g, values):
    q, k, v = (torch.ones(1, 3, n, 2) for n in (h, g, values))
    for options in ({}, {"beta": torch.ones(1, 3, max(g, values))}):
        with pytest.raises(ValueError, match="multiple"):
            linear_attention(q, k, v, normalize=False, **options)


def test_refuses_the_state_of_another_rule():
    q, k, v, _, beta, state = draw(DELTA)
    with pytest.raises(ValueError, match=r"state.z must be \[b=2 g=2 z=0\]"):
        linear_attention(q, k, v, beta=beta, normalize=False, state=LinearState(state, state[..., 0]))
    with pytest.raises(ValueError, match=r"state.z must be \[b=2 g=2 z=5\]"):
        linear_attention(q, k, v, state=LinearState.of(state))

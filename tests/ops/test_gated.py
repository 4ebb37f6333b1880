"""The sum with a decay for every feature: by halves it is the definition; its limits; what it refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.ops import LinearState, linear_attention
from lintra.ops.gated import gated_attention, gated_attention_reference
from lintra.testing.laws import EXACT
from tests.ops.sums import CUTS, has_derivatives, leaves_padding_out, results, resumes, rounds_y_alone, sizes


def draw(b=2, t=9, h=4, g=2, d=5, e=3, *, dtype=torch.float64, seed=0):
    """q, k, v, log_decay and a state, all differentiable."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, t, h, d), (b, t, g, d), (b, t, g, e), (b, t, g, d), (b, g, d, e)]
    q, k, v, decay, state = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    total = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = [*(x.to(dtype) for x in (q, k, v)), -decay.abs().to(total), state.to(total)]
    return [x.requires_grad_() for x in inputs]


def fast(*inputs, **options):
    return gated_attention(*inputs[:4], state=inputs[4], **options)


@settings(max_examples=40)
@given(data=st.data())
def test_by_halves_it_is_the_definition(data):
    inputs = draw(**sizes(data.draw))
    chunk = data.draw(st.sampled_from([1, 2, 16, 64]), label="chunk")
    found = results(lambda *x: fast(*x, chunk=chunk), inputs)
    assert_close(found, results(gated_attention_reference, inputs), **EXACT)


@pytest.mark.parametrize("strongest", [None, -1e4, -math.inf])
def test_the_definition_is_the_recurrence(strongest):
    """Also where features forget everything: a decay may be 0."""
    q, k, v, log_decay, state = inputs = draw()
    if strongest is not None:
        with torch.no_grad():
            log_decay[:, ::4, :, 1:3] = strongest
    expected, final = gated_attention_reference(*inputs)
    ys = []
    for i in range(q.shape[1]):
        state = log_decay[:, i, ..., None].exp() * state + k[:, i, ..., None] * v[:, i, :, None]
        ys.append(torch.einsum("bhd,bhde->bhe", q[:, i], state.repeat_interleave(2, 1)))
    assert_close(torch.stack(ys, 1), expected, **EXACT)
    assert_close(state, final, **EXACT)


@pytest.mark.parametrize("cut", CUTS)
def test_split_anywhere_and_resumed(cut):
    resumes(fast, draw(t=70), cut)


def test_an_exported_sum_is_of_any_length():
    class Sum(torch.nn.Module):
        def forward(self, q, k, v, log_decay, state):
            return gated_attention(q, k, v, log_decay, state=state, chunk=4)

    time = torch.export.Dim("time", min=5)
    shapes = (*[{1: time}] * 4, {})
    options = {"dynamic_shapes": shapes, "prefer_deferred_runtime_asserts_over_guards": True}
    detached = [[x.detach() for x in draw(t=t)] for t in (7, 5, 9, 30)]
    graph = torch.export.export(Sum(), tuple(detached[0]), **options).module()
    for inputs in detached:
        *inputs, state = inputs
        inputs[3] = inputs[3].index_fill(1, torch.tensor([2]), -1e5)  # and its neighbours lose no digit
        assert_close(graph(*inputs, state), gated_attention(*inputs, state=state, chunk=4), **EXACT)


def test_first_and_second_derivatives():
    has_derivatives(fast, draw)


def test_equal_channels_are_one_scalar_decay():
    inputs = draw(t=40)

    def equal(q, k, v, log_decay, state):
        return fast(q, k, v, log_decay[..., :1].expand_as(log_decay), state, chunk=16)

    def one(q, k, v, log_decay, state):
        start = LinearState(state, 0 * state[..., 0])
        options = {"normalize": False, "impl": "torch"}
        y, after = linear_attention(q, k, v, log_decay=log_decay[..., 0], state=start, **options)
        return y, after.kv

    assert_close(results(equal, inputs), results(one, inputs), **EXACT)


def test_without_decay_it_is_the_unnormalised_sum():
    q, k, v, log_decay, _ = draw(t=40)
    y, state = gated_attention(q, k, v, 0 * log_decay, chunk=8)
    expected, after = linear_attention(q, k, v, normalize=False, impl="torch")
    assert_close(y, expected, **EXACT)
    assert_close(state, after.kv, **EXACT)


@pytest.mark.parametrize("rate", [-1e-9, -5.0, -60.0, -1e4, -math.inf])
def test_defect_17_no_decay_overflows(rate):
    """Some features forget everything at once and their neighbours nothing: exp(-b) would be inf."""
    inputs = draw(t=64, dtype=torch.float32)
    with torch.no_grad():
        inputs[3][:, 10:] = torch.tensor([rate, -1e-9, rate, -0.1, 0.0])
    found = results(fast, inputs)
    exact = results(gated_attention_reference, [x.detach().double().requires_grad_() for x in inputs])
    for a, e in zip(found, exact, strict=True):
        assert a.isfinite().all()
        assert (a - e).abs().max() <= 2e-6 * e.abs().max()  # float32 and about 60 terms


def test_a_token_that_forgets_everything_costs_its_neighbours_no_digit():
    """Differences of elapsed decays would be off by 1e-3 after a decay of exp(-1e4)."""
    inputs = draw(t=64, dtype=torch.float32)
    with torch.no_grad():
        inputs[3].fill_(-0.01)
        inputs[3][:, 5] = -1e4
    exact = results(gated_attention_reference, [x.detach().double().requires_grad_() for x in inputs])
    for a, e in zip(results(fast, inputs), exact, strict=True):
        assert (a - e).abs().max() <= 2e-6 * e.abs().max()  # as above


def test_defect_18_padding_is_absence():
    leaves_padding_out(fast, draw(t=20))


def test_half_precision_in_and_out():
    rounds_y_alone(fast, gated_attention_reference, draw, tolerance=1e-5)


def change(place, function):
    inputs = draw()
    inputs[place] = function(inputs[place])
    return inputs


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        (change(3, lambda x: x[..., :4]), {}, ValueError, r"log_decay must be \[b=2 s=9 g=2 d=5\]"),
        (change(3, lambda x: -x), {}, ValueError, "log_decay must be at most 0"),
        (change(3, lambda x: x.long()), {}, TypeError, "log_decay must be float16"),
        (change(0, lambda x: x[:, :, :3]), {}, ValueError, "multiple of the key-value heads, got h=3, g=2"),
        (change(0, lambda x: x[:, :5]), {}, ValueError, "as many queries as keys, got t=5 and s=9"),
        (change(4, lambda x: x[:, :1]), {}, ValueError, r"state must be \[b=2 g=2 d=5 e=3\]"),
        (change(4, lambda x: x.float()), {}, TypeError, "state must be torch.float64 on cpu"),
        (draw(), {"chunk": 0}, ValueError, "chunk must be a power of two, got 0"),
        (draw(), {"chunk": 24}, ValueError, "chunk must be a power of two, got 24"),
        (draw(), {"mask": torch.ones(2, 9)}, TypeError, "mask must be boolean"),
    ],
)
def test_refuses(inputs, options, error, message):
    with pytest.raises(error, match=message):
        fast(*inputs, **options)

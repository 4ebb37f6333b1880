"""The delta rule: in chunks it is the recurrence; what it recalls; its limits; what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.testing import assert_close

from lintra.ops import linear_attention
from lintra.ops.delta import delta_rule, delta_rule_reference
from lintra.testing.laws import EXACT, gradients
from tests.ops.sums import CUTS, has_derivatives, leaves_padding_out, results, resumes, rounds_y_alone, sizes


def draw(b=2, t=9, h=4, g=2, d=5, e=3, *, dtype=torch.float64, seed=0):
    """q, unit keys, v, beta in [0, 2], log_decay and a state, all differentiable."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, t, h, d), (b, t, g, d), (b, t, g, e), (b, t, g), (b, t, g), (b, g, d, e)]
    q, k, v, beta, decay, state = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    inputs = [q, functional.normalize(k, dim=-1), v, 2 * beta.sigmoid(), -decay.abs(), state]
    total = torch.float64 if dtype == torch.float64 else torch.float32
    kinds = [dtype] * 3 + [total] * 3
    return [x.to(kind).requires_grad_() for x, kind in zip(inputs, kinds, strict=True)]


def fast(*inputs, **options):
    return delta_rule(*inputs[:4], log_decay=inputs[4], state=inputs[5], **options)


@settings(max_examples=40)
@given(data=st.data())
def test_in_chunks_it_is_the_recurrence(data):
    inputs = draw(**sizes(data.draw))
    chunk = data.draw(st.sampled_from([1, 3, 16, 64]), label="chunk")
    found = results(lambda *x: fast(*x, chunk=chunk), inputs)
    assert_close(found, results(delta_rule_reference, inputs), **EXACT)


@pytest.mark.parametrize("cut", CUTS)
def test_split_anywhere_and_resumed(cut):
    resumes(fast, draw(t=70), cut)


def test_first_and_second_derivatives():
    has_derivatives(fast, draw)


def test_orthonormal_keys_are_recalled_exactly():
    k = torch.linalg.qr(
        torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )[0]
    k = k[:, :, None]  # six keys of one head
    v = draw(t=6, g=1)[2]
    _, state = delta_rule(k, k, v, torch.ones(2, 6, 1).double())
    assert_close(torch.einsum("bgde,btgd->btge", state, k), v, **EXACT)


def test_a_repeated_key_overwrites_its_value():
    """beta = 1: the last value alone comes back, and no other key is disturbed."""
    q, k, v, _, _, state = draw(t=9, h=2)
    k = torch.cat((k[:, :1].expand(-1, 8, -1, -1), k[:, 8:]), 1)
    y, _ = delta_rule(k, k, v, torch.ones(2, 9, 2).double(), state=state)
    assert_close(y, v, **EXACT)
    other = q - (q * k[:, :1]).sum(-1, keepdim=True) * k[:, :1]  # orthogonal to the key
    y, _ = delta_rule(other[:, :8], k[:, :8], v[:, :8], torch.ones(2, 8, 2).double(), state=state)
    assert_close(y, torch.einsum("bgde,btgd->btge", state, other[:, :8]), **EXACT)


def test_beta_two_reflects():
    """I - 2 k k^T twice is the identity: what was written under a key twice changes its sign and back."""
    _, k, v, _, _, state = draw(t=2, h=2)
    k, v = k[:, :1].expand(-1, 2, -1, -1), 0 * v
    _, after = delta_rule(k, k, v, torch.full((2, 2, 2), 2.0).double(), state=state)
    assert_close(after, state, **EXACT)


def test_a_decay_of_one_is_none():
    inputs = draw(t=40)
    inputs[4] = (0 * inputs[4].detach()).requires_grad_()
    plain = lambda q, k, v, beta, _, state: delta_rule(q, k, v, beta, state=state)  # noqa: E731
    found, expected = results(fast, inputs), results(plain, inputs)
    del found[6], expected[6]  # the gradient of the decay itself
    assert_close(found, expected, **EXACT)


def test_orthogonal_keys_leave_the_gated_sum():
    """Where no key meets another, all k k^T terms vanish: linear attention with decay and inputs beta."""
    q, _, v, beta, log_decay, _ = draw(t=6, d=6)
    k = torch.eye(6).double()[None, :, None].expand(2, 6, 2, 6)
    y, state = delta_rule(q, k, v, beta, log_decay=log_decay)
    expected, after = linear_attention(
        q, k, v, log_decay=log_decay, log_input=beta.log(), normalize=False, impl="torch"
    )
    assert_close(y, expected, **EXACT)
    assert_close(state, after.kv, **EXACT)
    inputs = [q, v, beta, log_decay]
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_equal_keys_for_a_long_time_stay_bounded(beta):
    """The triangle is then as far from orthogonal as it gets."""
    q, k, v, _, log_decay, state = (x.detach() for x in draw(t=2048, dtype=torch.float32))
    k = k[:, :1].expand_as(k)
    inputs = [q, k, v, torch.full((2, 2048, 2), beta), 0 * log_decay, state]
    exact, final = delta_rule_reference(*(x.double() for x in inputs))
    y, after = fast(*inputs)
    # 2,048 reflections in float32, each off by about 1e-7 in one direction.
    assert (y - exact).abs().max() < 2e-4 * exact.abs().max()
    assert (after - final).abs().max() < 2e-4 * final.abs().max()


def test_long_keys_diverge():
    """What the docstring warns of: the mechanism normalises its keys for this."""
    q, k, v, beta, log_decay, state = (x.detach() for x in draw(t=200))
    _, after = fast(q, 3 * k, v, beta, 0 * log_decay, state)
    assert after.abs().max() > 1e6


@pytest.mark.parametrize("rate", [-1e-9, -60.0, -1e4])
def test_defect_17_no_decay_overflows(rate):
    """A token that forgets everything, tokens that forget nothing: exp(-b) would be inf, and differences of
    elapsed decays off by 1e-3."""
    inputs = draw(t=64, dtype=torch.float32)
    with torch.no_grad():
        inputs[4].fill_(-0.01)
        inputs[4][:, 5] = rate
    found = results(fast, inputs)
    exact = results(delta_rule_reference, [x.detach().double().requires_grad_() for x in inputs])
    for a, e in zip(found, exact, strict=True):
        assert a.isfinite().all()
        assert (a - e).abs().max() <= 1e-5 * e.abs().max()  # float32, 64 tokens through one triangle


def test_defect_18_padding_is_absence():
    leaves_padding_out(fast, draw(t=20))


def test_half_precision_in_and_out():
    rounds_y_alone(fast, delta_rule_reference, draw, tolerance=1e-4)


def change(place, function):
    inputs = draw()
    inputs[place] = function(inputs[place])
    return inputs


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        (change(3, lambda x: x[..., :1]), {}, ValueError, r"beta must be \[b=2 s=9 g=2\]"),
        (change(3, lambda x: x.long()), {}, TypeError, "beta must be float16"),
        (change(4, lambda x: x[:, :4]), {}, ValueError, r"log_decay must be \[b=2 s=9 g=2\]"),
        (change(4, lambda x: -x), {}, ValueError, "log_decay must be at most 0"),
        (change(0, lambda x: x[:, :, :3]), {}, ValueError, "multiple of the key-value heads, got h=3, g=2"),
        (change(0, lambda x: x[:, :5]), {}, ValueError, "as many queries as keys, got t=5 and s=9"),
        (change(5, lambda x: x[:, :1]), {}, ValueError, r"state must be \[b=2 g=2 d=5 e=3\]"),
        (change(5, lambda x: x.float()), {}, TypeError, "state must be torch.float64 on cpu"),
        (draw(), {"chunk": 0}, ValueError, "chunk must be at least 1 token, got 0"),
        (draw(), {"mask": torch.ones(2, 9)}, TypeError, "mask must be boolean"),
    ],
)
def test_refuses(inputs, options, error, message):
    with pytest.raises(error, match=message):
        fast(*inputs, **options)

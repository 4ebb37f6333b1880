"""The stand-in against the oracles of FLA: values and gradients of every function, and its options."""

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra.compat.fla.ops import (
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_linear_attn,
    chunk_simple_gla,
    fused_chunk_delta_rule,
    fused_chunk_gla,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    fused_recurrent_linear_attn,
    parallel_retention,
    parallel_simple_gla,
)
from lintra.compat.fla.ops.gated_delta_rule.gate import fused_gdn_gate
from lintra.compat.fla.ops.kda.gate import fused_kda_gate
from lintra.testing.laws import gradients
from tests.compat.fla import real
from tests.compat.fla.cases import (
    BY_NAME,
    CASES,
    HEADS,
    WIDTH,
    delta,
    every_case,
    gated_delta,
    kda,
    log_retention,
    naive,
    simple,
)

CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # for float32, over 50 tokens
GRADIENTS = {"rtol": 2e-4, "atol": 2e-4}


def agree(found, expected, inputs, others):
    """Outputs, states and the gradients of an uneven sum over both agree; the oracle is in float32."""
    sums = [torch.cat([x.flatten() for x in pair]) for pair in (found, expected)]
    assert sums[0].dtype == inputs[0].dtype
    assert_close(sums[0].float(), sums[1], **CLOSE)
    weights = torch.linspace(-1, 1, len(sums[0]))
    ours = gradients(sums[0] * weights.to(inputs[0].dtype), inputs)
    assert_close([x.float() for x in ours], gradients(sums[1] * weights, others), **GRADIENTS)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_and_gradients(case, dtype):
    inputs, others = case.draw(dtype), case.draw()
    agree(case(*inputs), case.oracle(*others), inputs, others)


@pytest.mark.parametrize("t", [1, 50])
@every_case
def test_a_state_may_be_written_over_before_the_backward(case, t):
    """Caches of transformers do this with the final state."""
    inputs = case.draw(t=t)
    expected = gradients(torch.cat([x.flatten() for x in case(*inputs)]), inputs)
    held = inputs[-1].clone()
    found = case(*inputs[:-1], held)
    held.copy_(found[1])
    assert_close(gradients(torch.cat([found[0].flatten(), held.flatten()]), inputs), expected)


@pytest.mark.parametrize("case", [x for x in CASES if x.grouped], ids=lambda x: x.path)
def test_more_heads_of_values_than_of_keys(case):
    inputs, others = (case.draw(values=2 * HEADS) for _ in range(2))
    agree(case(*inputs), case.oracle(*others), inputs, others)


@every_case
def test_the_scale(case):
    """Doubling the default doubles the output and leaves the state unchanged."""
    inputs = case.draw()
    (y, state), (other, after) = case(*inputs), case(*inputs, scale=2 * WIDTH**-0.5)
    assert_close([2 * y, state], [other, after])


@pytest.mark.parametrize("function", [chunk_linear_attn, fused_recurrent_linear_attn])
@pytest.mark.parametrize("begun", [True, False], ids=["from a state", "from nothing"])
def test_normalized(function, begun):
    inputs, others = (
        [x.detach().exp().requires_grad_() for x in BY_NAME["fused_recurrent_linear_attn"].draw()[:3]]
        for _ in range(2)
    )
    z = torch.rand(2, 1, HEADS, WIDTH)
    kv = torch.randn(2, HEADS, WIDTH, 12)
    options = {"initial_state": (kv, z) if begun else None, "output_final_state": True, "normalize": True}
    y, found = function(*inputs, **options)
    expected, after = naive("linear_attn", "naive_recurrent_linear_attn")(*others, **options)
    agree((y, *found), (expected, *after), inputs, others)
    y, found = function(*inputs, **options | {"initial_state": kv})  # without the sum of its keys
    options["initial_state"] = kv, torch.zeros_like(z)
    assert_close(y, naive("linear_attn", "naive_recurrent_linear_attn")(*others, **options)[0], **CLOSE)


def test_constant_decays_of_heads():
    case = BY_NAME["chunk_simple_gla"]
    q, k, v, _, state = case.draw()
    decay = torch.tensor([-0.1, -2.0])
    found = chunk_simple_gla(q, k, v, g_gamma=decay, initial_state=state, output_final_state=True)
    assert_close(found, simple(q, k, v, decay.expand(q.shape[:3]), state), **CLOSE)
    without = chunk_simple_gla(q, k, v, initial_state=state, output_final_state=True)
    assert_close(without, simple(q, k, v, torch.zeros(q.shape[:3]), state), **CLOSE)


def test_parallel_forms_and_their_scores():
    q, k, v, g, _ = BY_NAME["chunk_simple_gla"].draw()
    parallel = naive("simple_gla", "naive_parallel_simple_gla")
    expected = parallel(q, k, v, g)
    assert_close(parallel_simple_gla(q, k, v, g, output_attentions=True), expected, **CLOSE)
    y, scores = parallel_simple_gla(q, k, v, g)
    assert scores is None
    assert_close(y, expected[0], **CLOSE)
    expected = parallel(q, k, v, log_retention(q))
    assert_close(parallel_retention(q, k, v, output_attentions=True), expected, **CLOSE)
    y = naive("retention", "naive_retention")(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert_close(parallel_retention(q, k, v)[0], y, **CLOSE)
    without = parallel_simple_gla(q, k, v, output_attentions=True)
    assert_close(without, parallel(q, k, v, torch.zeros_like(g)), **CLOSE)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def test_norms_of_queries_and_keys_inside():
    """For short vectors, where the eps inside the root matters."""
    for path, oracle in (
        ("chunk_delta_rule", delta),
        ("fused_recurrent_delta_rule", delta),
        ("chunk_gated_delta_rule", gated_delta),
        ("fused_recurrent_gated_delta_rule", gated_delta),
        ("chunk_kda", kda),
        ("fused_recurrent_kda", kda),
    ):
        q, k, *others = BY_NAME[path].draw()
        q, k = 1e-3 * q, 1e-3 * k
        found = BY_NAME[path](q, k, *others, use_qk_l2norm_in_kernel=True)
        assert_close(found, oracle(unit(q), unit(k), *others), **CLOSE)


def gates(heads, *width):
    """A_log [heads] and dt_bias [heads * width], differentiable."""
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(heads * (width[0] if width else 1), generator=generator)
    return torch.randn(heads, generator=generator).requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("reflections", [True, False])
def test_gates_inside_the_gated_delta_rule(function, reflections):
    inputs = BY_NAME["chunk_gated_delta_rule"].draw(values=4)
    q, k, v, g, beta, state = inputs
    A_log, dt_bias = gates(4)
    options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "output_final_state": True}
    options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": reflections}
    found = function(q, k, v, g=g, beta=beta, initial_state=state, **options)
    decay = -A_log.exp() * functional.softplus(g + dt_bias)
    expected = gated_delta(q, k, v, decay, beta.sigmoid() * (1 + reflections), state)
    inputs += [A_log, dt_bias]
    agree(found, expected, inputs, inputs)


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus", "bounded"])
def test_gates_inside_kimi_delta_attention(function, bound):
    inputs = BY_NAME["chunk_kda"].draw(values=4)
    q, k, v, g, beta, state = inputs
    A_log, dt_bias = gates(4, WIDTH)
    options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": bound}
    options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "output_final_state": True}
    found = function(q, k, v, g=g, beta=beta, initial_state=state, **options)
    raw = g + dt_bias.view(4, WIDTH)
    rate = A_log.exp()[:, None]
    decay = -rate * functional.softplus(raw) if bound is None else bound * (rate * raw).sigmoid()
    inputs += [A_log, dt_bias]
    agree(found, kda(q, k, v, decay, 2 * beta.sigmoid(), state), inputs, inputs)


def test_a_bounded_gate_without_a_rate():
    g, bias = torch.randn(2, 5, 4, 8), torch.randn(32)
    expected = -3 * (g + bias.view(4, 8)).sigmoid()
    assert_close(fused_kda_gate(g, None, bias, lower_bound=-3.0), expected)
    with pytest.raises(ValueError, match="A_log must be given"):
        fused_kda_gate(g)


def test_what_a_gate_is_made_of_says_nothing_without_it():
    """As in FLA, where callers always pass these arguments."""
    inputs = BY_NAME["chunk_kda"].draw()
    A_log, dt_bias = gates(HEADS, WIDTH)
    given = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0, "safe_gate": True}
    assert_close(BY_NAME["chunk_kda"](*inputs, **given), BY_NAME["chunk_kda"](*inputs))


def test_gates_alone():
    from_fla = real.gates()
    A_log, dt_bias = gates(4, WIDTH)
    for dtype in (torch.float32, torch.bfloat16):
        g = torch.randn(2, 5, 4, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert_close(fused_kda_gate(g, A_log, dt_bias), from_fla["kda"](g, A_log, dt_bias))
        expected = from_fla["bounded"](g, A_log, dt_bias, -5.0, torch.bfloat16)
        assert_close(fused_kda_gate(g, A_log.view(1, 1, 4, 1), dt_bias, -5.0, torch.bfloat16), expected)
        g = g[..., 0]
        assert_close(fused_gdn_gate(g, A_log, dt_bias[:4]), from_fla["gdn"](g, A_log, dt_bias[:4]))


def test_decays_of_features_in_the_gated_delta_rule():
    """With decays of features alone, and multiplied by decays of heads."""
    q, k, v, g, beta, state = BY_NAME["chunk_kda"].draw(values=4)
    options = {"beta": beta, "initial_state": state, "output_final_state": True}
    expected = kda(q, k, v, g, beta, state)
    assert_close(fused_recurrent_gated_delta_rule(q, k, v, gk=g, **options), expected, **CLOSE)
    heads = -torch.rand(g.shape[:3])
    expected = kda(q, k, v, g + heads[..., None], beta, state)
    assert_close(fused_recurrent_gated_delta_rule(q, k, v, g=heads, gk=g, **options), expected, **CLOSE)


def test_beta_is_1_unless_given():
    q, k, v, beta, state = BY_NAME["chunk_delta_rule"].draw()
    options = {"initial_state": state, "output_final_state": True}
    expected = delta(q, k, v, torch.ones_like(beta), state)
    assert_close(fused_recurrent_delta_rule(q, k, v, **options), expected, **CLOSE)
    assert_close(fused_recurrent_gated_delta_rule(q, k, v, **options), expected, **CLOSE)


@pytest.mark.parametrize("function", [fused_chunk_gla, fused_chunk_delta_rule])
def test_what_fla_took_out(function):
    with pytest.raises(NotImplementedError, match="gone from FLA"):
        function(q=None)

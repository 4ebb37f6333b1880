"""Laws of the stand-in that need no oracle: states, packed batches, layouts, reversal, dtypes, errors."""

import warnings
from inspect import signature
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from lintra.compat.fla.ops import chunk_kda, chunk_linear_attn, chunk_simple_gla, parallel_simple_gla
from lintra.testing.laws import gradients
from tests.compat.fla.cases import BY_NAME, CASES, HEADS, LAYER, every_case, every_rule, function

BOUNDS = [0, 13, 13, 45, 50]  # the second sequence has no tokens
REVERSIBLE = ["linear_attn", "simple_gla", "gla", "retention", "lightning_attn"]


@every_case
def test_a_state_takes_up_a_sequence(case):
    *inputs, state = case.draw(torch.float64)
    parts = [[x[:, :30] for x in inputs], [x[:, 30:] for x in inputs]]
    first, between = case(*parts[0], state)
    second, after = case(*parts[1], between)
    assert_close([torch.cat((first, second), 1), after], list(case(*inputs, state)))


@every_case
def test_packed_sequences_are_as_alone(case):
    *inputs, state = case.draw(torch.float64, b=1)
    states = torch.cat([state * i for i in range(1, 5)]).detach().requires_grad_()
    y, after = case(*inputs, states, cu_seqlens=torch.tensor(BOUNDS))
    ys, afters = [], []
    for i, (start, stop) in enumerate(pairwise(BOUNDS)):
        part = case(*(x[:, start:stop] for x in inputs), states[i : i + 1])
        ys.append(part[0])
        afters.append(part[1])
    expected = torch.cat(ys, 1), torch.cat(afters)
    assert_close((y, after), expected)
    sums = [torch.cat((x[0].flatten(), x[1].flatten())) for x in ((y, after), expected)]
    inputs = [*inputs, states]
    assert_close(*(gradients(x, inputs) for x in sums))


def test_packed_and_normalized():
    q, k, v, _ = (x.detach().exp() for x in BY_NAME["chunk_linear_attn"].draw(torch.float64, b=1))
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    y, (kv, z) = chunk_linear_attn(q, k, v, output_final_state=True, cu_seqlens=bounds)
    for i, (start, stop) in enumerate(pairwise(BOUNDS)):
        part = (x[:, start:stop] for x in (q, k, v))
        other, (kv_alone, z_alone) = chunk_linear_attn(*part, output_final_state=True)
        assert_close(y[:, start:stop], other)
        assert_close([kv[i : i + 1], z[i : i + 1]], [kv_alone, z_alone])


TRANSPOSABLE = [x for x in CASES if "state_v_first" in signature(x.function).parameters]


@pytest.mark.parametrize("case", TRANSPOSABLE, ids=lambda x: x.path)
def test_states_with_values_first(case):
    inputs = case.draw(torch.float64)
    y, state = case(*inputs)
    other, after = case(*inputs[:-1], inputs[-1].mT, state_v_first=True)
    assert_close([other, after.mT], [y, state])


@pytest.mark.parametrize("name", ["fused_recurrent_simple_gla", "fused_recurrent_kda", "chunk_kda"])
def test_the_older_name_of_that_layout(name):
    case = BY_NAME[name]
    inputs = case.draw()
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        found = case(*inputs[:-1], inputs[-1].mT, transpose_state_layout=True)
    assert_close(found, case(*inputs[:-1], inputs[-1].mT, state_v_first=True))
    with pytest.raises(ValueError, match="not both"):
        case(*inputs, state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize("op", REVERSIBLE)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_from_the_last_token_to_the_first(op, packed):
    case = BY_NAME[f"fused_recurrent_{op}"]
    *inputs, state = case.draw(torch.float64, b=1)
    bounds, states = None, state
    if packed:
        bounds, states = torch.tensor(BOUNDS), torch.cat([state * i for i in range(1, 5)])
    y, after = case(*inputs, states, reverse=True, cu_seqlens=bounds)
    pieces = list(pairwise(BOUNDS)) if packed else [(0, 50)]
    for i, (start, stop) in enumerate(pieces):
        part = (x[:, start:stop].flip(1) for x in inputs)
        other, last = case(*part, states[i : i + 1])
        assert_close([y[:, start:stop], after[i : i + 1]], [other.flip(1), last])


@every_case
def test_half_precision(case):
    """Outputs have the dtype of the inputs, states are float32, and both are near those of float32 inputs."""
    *inputs, state = (x.detach() for x in case.draw())
    halves = [x.bfloat16() for x in inputs]
    y, after = case(*halves, state)
    assert (y.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    expected, other = case(*(x.float() for x in halves), state)
    assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)  # y is rounded to 8 bits
    assert_close(after, other, rtol=1e-5, atol=1e-5)
    assert case(*halves, state.bfloat16())[1].dtype == torch.float32
    exact = case(*inputs, state)
    with torch.autocast("cpu", torch.bfloat16):  # with its default settings
        assert_close(case(*inputs, state), exact, rtol=0, atol=0)
        assert case(*inputs, state)[0].dtype == torch.float32


@every_case
def test_no_state_unless_asked_for(case):
    assert case(*case.draw()[:-1], None, output_final_state=False)[1] is None


@every_case
def test_a_state_is_not_changed(case):
    inputs = [x.detach() for x in case.draw(t=1)]
    before = inputs[-1].clone()
    after = case(*inputs)[1]
    assert_close(inputs[-1], before, rtol=0, atol=0)
    assert after.data_ptr() != inputs[-1].data_ptr()


@every_rule
def test_a_compiler_sees_one_graph(case):
    options, tensors = {}, case.draw(t=20)
    if "delta" in case.path or "kda" in case.path:
        options = {"use_qk_l2norm_in_kernel": True}
    if case.path.endswith("gated_delta_rule"):
        options |= {"cu_seqlens": torch.tensor([0, 7, 20])}
        tensors = [*(x[:1] for x in tensors[:-1]), tensors[-1]]
    inputs = [x.detach().requires_grad_() for x in tensors]
    compiled = torch.compile(lambda *x: case(*x, **options), fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), case(*inputs, **options)
    assert_close(found, expected)
    assert_close(*(gradients(torch.cat([x.flatten() for x in pair]), inputs) for pair in (found, expected)))


@every_case
def test_an_unknown_argument(case):
    with pytest.raises(TypeError, match="other_name"):
        case(*case.draw(), other_name=1)


@every_case
def test_a_state_of_another_shape(case):
    *inputs, state = case.draw()
    for wrong in (state[:, :, :-1], state[:1], state[0]):
        with pytest.raises(ValueError, match="initial_state must"):
            case(*inputs, wrong)
    with pytest.raises(ValueError, match="lie in one row"):
        case(*inputs, state[:1], cu_seqlens=torch.tensor([0, 50]))


UNSERVED = {
    "chunk_gated_delta_rule": {"cp_context": object()},
    "fused_recurrent_gated_delta_rule": {"gv": torch.zeros(1)},
    "fused_recurrent_gla": {"gv": torch.zeros(1)},
    "chunk_kda": {"cp_context": object(), "use_graph": True, "return_intermediate_states": True},
}


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, given in UNSERVED.items() for argument in given]
)
def test_what_is_not_served(name, argument):
    case = BY_NAME[name]
    with pytest.raises(NotImplementedError, match=argument):
        case(*case.draw(), **{argument: UNSERVED[name][argument]})


def test_beta_for_every_value_is_not_served():
    for name in ("fused_recurrent_delta_rule", "fused_recurrent_gated_delta_rule"):
        *inputs, beta, state = BY_NAME[name].draw()
        with pytest.raises(NotImplementedError, match="beta"):
            BY_NAME[name](*inputs, beta[..., None].expand(-1, -1, -1, 12), state)


def test_scores_of_packed_sequences_are_not_served():
    q, k, v, g, _ = BY_NAME["chunk_simple_gla"].draw(b=1)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        parallel_simple_gla(q, k, v, g, output_attentions=True, cu_seqlens=torch.tensor([0, 50]))


def test_arguments_that_disagree():
    q, k, v, g, beta, state = BY_NAME["chunk_kda"].draw()
    raises = pytest.raises(ValueError, match="allow_neg_eigval")
    with raises:
        chunk_kda(q, k, v, g, beta, allow_neg_eigval=True)
    with pytest.raises(ValueError, match="lower_bound must be from -5"):
        chunk_kda(q, k, v, g, beta, use_gate_in_kernel=True, safe_gate=True)
    with pytest.raises(ValueError, match="A_log must be given"):
        chunk_kda(q, k, v, g, beta, use_gate_in_kernel=True)
    with pytest.raises(ValueError, match="g must"):
        chunk_kda(q, k, v, g[..., :3], beta)
    with pytest.raises(ValueError, match="heads of v"):
        chunk_kda(q, k, v[:, :, :1], g[:, :, :1], beta[:, :, :1])
    with pytest.raises(ValueError, match="not both"):
        chunk_simple_gla(q, k, v, beta, g_gamma=torch.zeros(HEADS))
    with pytest.raises(ValueError, match="g_gamma must"):
        chunk_simple_gla(q, k, v, g_gamma=torch.zeros(HEADS + 1))
    with pytest.raises(TypeError, match="initial_state"):
        chunk_linear_attn(q, k, v, initial_state=(state, state), normalize=False)


@pytest.mark.parametrize(
    "path",
    [
        *("simple_gla.chunk_simple_gla", "retention.chunk_retention", "lightning_attn.chunk_lightning_attn"),
        *("delta_rule.chunk_delta_rule", "gated_delta_rule.chunk_gated_delta_rule"),
    ],
)
def test_heads_before_time_are_refused_as_in_fla(path):
    q, k, v, g, beta, _ = BY_NAME["chunk_gated_delta_rule"].draw()
    extra = {"gated": {"g": g, "beta": beta}, "delta": {"beta": beta}, "light": LAYER}.get(path[:5], {})
    with pytest.raises(DeprecationWarning, match="head_first"), warnings.catch_warnings():
        function(path)(q, k, v, **extra, head_first=False)


@pytest.mark.parametrize(
    "path",
    [
        *("retention.chunk_retention", "retention.fused_recurrent_retention", "retention.parallel_retention"),
        *("lightning_attn.chunk_lightning_attn", "lightning_attn.fused_recurrent_lightning_attn"),
    ],
)
def test_decays_by_number_need_one_value_head_for_each_query_head(path):
    q, v = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 4, 4)
    extra = LAYER if path.startswith("light") else {}
    with pytest.raises(ValueError, match="v must have the 2 heads of q, each with a decay of its own, got 4"):
        function(path)(q, q, v, **extra)


def test_scores_keep_their_digits_in_autocast():
    q, k, v = torch.randn(3, 1, 7, 2, 4)
    g = -torch.rand(1, 7, 2)
    expected = parallel_simple_gla(q, k, v, g, output_attentions=True)[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(parallel_simple_gla(q, k, v, g, output_attentions=True)[1], expected)

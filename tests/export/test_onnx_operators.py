"""Recurrences as one ONNX operator, standard or onnxruntime's own, give what the model gives in PyTorch."""

import pytest
import torch

from lintra import native
from lintra.attention import delta, linear, retention, softmax
from lintra.export import onnx as export
from tests.export.test_onnx import (
    CLOSE,
    LAYOUTS,
    LENGTHS,
    MECHANISMS,
    build,
    check_decoder,
    session,
    start,
)

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("opset_27")

TARGETS = {
    "standard": {"opset": 27},
    "com.microsoft": {"domain": "com.microsoft"},
    "both": {"opset": 27, "domain": "com.microsoft"},
}
RULES = {
    **dict.fromkeys(("linear", "rfa", "cosformer"), "linear"),
    **dict.fromkeys(("retention", "gated", "ssd", "performer", "rfa, gate"), "gated"),
    **dict.fromkeys(("delta", "kda"), "gated_delta"),
    "delta, no decay": "delta",
}
RECURRENCES = {name: config for name, config in MECHANISMS.items() if name != "softmax"}
RECURRENCES |= {
    "delta, no decay": delta.Config(decay=False),
    "delta, reflections": delta.Config(negative_eigenvalues=True, gate=False),
    "delta, conv of one": delta.Config(conv=1),
    "delta, no conv": delta.Config(conv=None),
    "linear, no denominator": linear.Config(normalize=False, feature_map=linear.Identity()),
    "retention, faded keys": retention.Config(decay_per="kv_head", fastest=0.5),
}
FAST = {("linear", "step", "com.microsoft"), ("linear", "parallel", "standard")}  # an export takes seconds


def nodes(content, kind):
    """The nodes of a kind: the domain of each, and its attributes by name."""
    found = [x for x in onnx.load_from_string(content).graph.node if x.op_type == kind]
    return [(x.domain, {a.name: onnx.helper.get_attribute_value(a) for a in x.attribute}) for x in found]


@pytest.mark.parametrize(
    ("name", "form", "target"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in [(n, f, t) for n in RECURRENCES for f in ("step", "parallel") for t in list(TARGETS)[:2]]
    ],
)
def test_a_recurrence_is_one_operator(name, form, target):
    model = build(attention=RECURRENCES[name], layers=1)
    content = export.to_bytes(model, form, **TARGETS[target])
    check_decoder(model, content, [1] * 12 if form == "step" else LENGTHS)
    check_decoder(model, content, [1], batch=1)
    onnx.checker.check_model(onnx.load_from_string(content), full_check=True)
    ((domain, attributes),) = nodes(content, "LinearAttention")
    assert domain == ("com.microsoft" if target == "com.microsoft" else "")
    rule = RULES.get(name) or RULES[name.partition(",")[0]]
    assert attributes["update_rule"].decode() == rule
    assert attributes["scale"] == 1.0  # as in lintra; 0 would mean d ** -0.5
    assert attributes["q_num_heads"] >= attributes["kv_num_heads"]


@pytest.mark.slow
def test_what_a_prompt_leaves_goes_on_token_by_token():
    """The parallel graph and the step have the same state."""
    model = build(attention=(delta.Config(), softmax.Config()))
    target = TARGETS["com.microsoft"]
    parallel, step = (export.to_bytes(model, form, **target) for form in ("parallel", "step"))
    check_decoder(model, parallel, [9, 2], batch=3, then=step)
    assert [x[0] for x in nodes(step, "CausalConvWithState")] == ["com.microsoft"] * 3
    assert not nodes(parallel, "CausalConvWithState")  # slower there than one product per column


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", list(TARGETS)[:2])
def test_every_layout_with_operators(layout, target):
    model = build(attention=linear.Config(), **LAYOUTS[layout])
    content = export.to_bytes(model, "parallel", **TARGETS[target])
    check_decoder(model, content, LENGTHS)
    convolutions = 2 if (layout, target) == ("recurrent", "standard") else 0
    assert len(nodes(content, "CausalConvWithState")) == convolutions


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "retention", "gated", "delta", "kda"])
@pytest.mark.parametrize("target", TARGETS)
def test_no_more_digits_are_lost_than_in_torch(name, target):
    """Over many tokens, from state to state, compared with float64 by the root mean square error."""
    model, exact = (build(attention=RECURRENCES[name], layers=2) for _ in range(2))
    exact.double()
    runner = session(export.to_bytes(model, "parallel", **TARGETS[target]))
    torch.manual_seed(1)
    state, states, errors = start(runner, 2), [None, None], [[], []]
    for length in (40, 1, 100, 7, 150):
        tokens = torch.randint(0, 5, (2, length))
        with torch.no_grad():
            right, states[0] = exact.extend(tokens, states[0])
            ours, states[1] = model.extend(tokens, states[1])
        params, *after = runner.run(None, {"tokens": tokens.numpy(), **state})
        state = dict(zip(state, after, strict=True))
        for found, kept in zip((torch.from_numpy(params), ours), errors, strict=True):
            kept.append((found - right).square().flatten())
    of_onnx, of_torch = (torch.cat(kept).mean().sqrt() for kept in errors)
    assert of_onnx < 3 * of_torch + 1e-7  # a sum token by token rounds more often than one by chunks
    for name, x in state.items():
        if name.endswith(".kv"):
            layer = int(name.split(".")[2])
            torch.testing.assert_close(
                torch.from_numpy(x).double(), states[0].layers[layer].attention.kv, **CLOSE
            )


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_a_denominator_is_no_column_of_the_values(heads):
    """It is the running sum of the keys, for every query head of a group: the operator reads only v."""
    model = build(attention=linear.Config(), layers=1, heads=heads[0], kv_heads=heads[1])
    content = export.to_bytes(model, "parallel", domain="com.microsoft")
    check_decoder(model, content, LENGTHS)
    shapes = {x.name: x.type.tensor_type.shape.dim for x in onnx.load_from_string(content).graph.input}
    (node,) = [x for x in onnx.load_from_string(content).graph.node if x.op_type == "LinearAttention"]
    assert shapes[node.input[3]][-1].dim_value == model.blocks[0].attn.attention.value_dim


def test_what_opset_27_says_of_itself():
    """Only standard operators, the same metadata as in every file, and softmax unchanged."""
    content = export.to_bytes(build(attention=softmax.Config(), layers=1), "step", opset=27)
    graph = onnx.load_from_string(content)
    assert {(x.domain, x.version) for x in graph.opset_import} == {("", 27)}
    assert graph.ir_version >= onnx.helper.find_min_ir_version_for(list(graph.opset_import))
    assert {x.key for x in graph.metadata_props} == {"lintra", "format", "form", "model", "config", "start"}
    assert not nodes(content, "LinearAttention")


@pytest.mark.slow
def test_no_compiler_is_needed(monkeypatch):
    """The operators of lintra that those of ONNX replace are named but never run."""
    model = build(attention=delta.Config(), layers=1)
    monkeypatch.setattr(native, "why_not", lambda: "it is not built")
    monkeypatch.setattr(native, "available", lambda: False)
    content = export.to_bytes(model, "step", domain="com.microsoft")
    assert len(nodes(content, "LinearAttention")) == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"opset": 21}, "opset must be 20 or 27, got 21"),
        ({"domain": "ai.onnx.ml"}, "domain must be ai.onnx or com.microsoft, got ai.onnx.ml"),
    ],
)
def test_other_targets_are_refused(target, message):
    with pytest.raises(ValueError, match=message):
        export.to_bytes(build(), "step", **target)
    with pytest.raises(ValueError, match=message):
        export.why_not(build(), "step", **target)


def test_which_parallel_forms_need_an_operator():
    model = build(attention=delta.Config())
    assert "opset 27 has one for the whole recurrence" in export.why_not(model, "parallel")
    assert export.why_not(model, "parallel", opset=27) is None
    assert export.why_not(model, "parallel", domain="com.microsoft") is None
    long = build(attention=MECHANISMS["cosformer"].__class__(max_length=64))
    assert "chunks of 64 tokens" in export.why_not(long, "parallel")
    assert export.why_not(long, "parallel", opset=27) is None  # no chunks are needed
    windowed = build(attention=softmax.Config(window=4))
    assert "its cache is a window" in export.why_not(windowed, "step", opset=27)

"""The installed FLA, made for GPUs, with tensors of the CPU served by lintra."""

import sys
from inspect import signature

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra.compat.fla import installed, modules
from tests.compat.fla import real
from tests.compat.fla.cases import CASES, every_case


@pytest.fixture
def fla():
    """FLA's module of functions, served by lintra until the test is over."""
    module = real.fla("fla.ops")
    installed.wrap()
    yield module
    installed.unwrap()


@every_case
def test_tensors_of_the_cpu_are_served(fla, case):
    inputs = case.draw()
    expected = case(*inputs)
    *extra, state = inputs[3:]
    given = dict(zip(case.extra, extra, strict=True)) | case.options
    module, name = case.path.split(".")
    for found in (getattr(fla, name), getattr(sys.modules[f"fla.ops.{module}"], name)):
        assert_close(found(*inputs[:3], initial_state=state, output_final_state=True, **given), expected)


def test_gates_are_served(fla):
    g, A_log = torch.randn(2, 5, 4, 8), torch.randn(4)
    gate = real.fla("fla.ops.kda.gate")
    assert_close(gate.fused_kda_gate(g, A_log), gate.naive_kda_gate(g, A_log))
    gate = real.fla("fla.ops.gated_delta_rule.gate")
    assert_close(gate.fused_gdn_gate(g[..., 0], A_log), gate.naive_gdn_gate(g[..., 0], A_log))


DISPATCHED = [
    *("chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_simple_gla", "fused_chunk_simple_gla"),
]


@pytest.mark.parametrize("name", DISPATCHED)
def test_names_imported_before_are_served_too(name):
    """Through the backends of the functions that FLA dispatches itself."""
    before = getattr(real.fla(), name)
    installed.wrap()
    try:
        case = next(x for x in CASES if x.path.endswith(f".{name}"))
        *inputs, state = case.draw()
        given = dict(zip(case.extra, inputs[3:], strict=True)) | case.options
        found = before(*inputs[:3], initial_state=state, output_final_state=True, **given)
        assert_close(found, case(*inputs, state))
    finally:
        installed.unwrap()


def test_other_devices_go_where_they_went(monkeypatch):
    real.fla()
    called = []
    monkeypatch.setattr(sys.modules["fla.ops.gla"], "chunk_gla", lambda *args, **_: called.append(args))
    monkeypatch.setattr(sys.modules["fla.ops"], "chunk_gla", sys.modules["fla.ops.gla"].chunk_gla)
    installed.wrap()
    try:
        q = torch.zeros(1, 2, 1, 4, device="meta")
        sys.modules["fla.ops.gla"].chunk_gla(q, q, q, q)
        assert called[0][0] is q
    finally:
        installed.unwrap()


def test_unwrapped_it_is_as_before():
    real.fla()
    held = [x for name, x in sys.modules.items() if name.startswith("fla.")]
    assert held
    before = [dict(vars(x)) for x in held]
    installed.wrap()
    installed.wrap()
    wrapped = real.fla().chunk_gla
    installed.unwrap()
    installed.unwrap()
    assert wrapped is not real.fla().chunk_gla
    assert signature(wrapped) == signature(real.fla().chunk_gla)
    for module, names in zip(held, before, strict=True):
        assert all(vars(module)[name] is value for name, value in names.items())
    assert installed._wrapped == []


def test_backends_are_silent_when_unwrapped(fla):
    installed.unwrap()
    registry = sys.modules["fla.backends"]._get_operation_registry("gated_delta_rule")
    ours = registry._backends["lintra"]
    assert not ours.is_available()
    installed.wrap()
    assert ours.is_available()


def test_without_fla(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.ops", None)
    with pytest.raises(ImportError, match="cannot be served"):
        installed.wrap()


def test_a_compiler_sees_one_graph_through_it(fla):
    case = next(x for x in CASES if x.path.endswith("chunk_kda"))
    q, k, v, g, beta, _ = (x.detach() for x in case.draw())
    compiled = torch.compile(lambda *x: fla.chunk_kda(*x)[0], fullgraph=True, backend="eager")
    assert_close(compiled(q, k, v, g, beta), fla.chunk_kda(q, k, v, g, beta)[0])


def test_parts_of_layers_are_served(fla):
    theirs, generator = real.fla("fla.modules"), torch.Generator().manual_seed(0)
    x, gate = (torch.randn(2, 5, 6, generator=generator).requires_grad_() for _ in range(2))
    for name, arguments, inputs in (
        ("RMSNorm", {"hidden_size": 6}, (x,)),
        ("FusedRMSNormGated", {"hidden_size": 6}, (x, gate)),
        ("ShortConvolution", {"hidden_size": 6, "kernel_size": 4}, (x,)),
        ("L2Norm", {}, (x,)),
    ):
        installed, ours = getattr(theirs, name)(**arguments), getattr(modules, name)(**arguments)
        ours.load_state_dict(installed.state_dict())
        assert_close(installed(*inputs), ours(*inputs))
    mlp = theirs.GatedMLP(6, intermediate_size=8)
    expected = mlp.down_proj(functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert_close(mlp(x), expected)
    cos, sin = torch.ones(5, 2), torch.zeros(5, 2)
    q = torch.randn(1, 5, 2, 4, generator=generator)
    assert_close(real.fla("fla.modules.rotary").ops.rotary_embedding(q, cos, sin), q)


LAYERS = {
    "GatedDeltaNet": {"head_dim": 16, "num_v_heads": 4},
    "KimiDeltaAttention": {"head_dim": 16},
    "DeltaNet": {},
    "GatedLinearAttention": {},
    "LinearAttention": {},
    "MultiScaleRetention": {},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_a_cpu(fla, name):
    """For the package flash-linear-attention, if it is installed beside its core."""
    layers = real.fla("fla.layers")
    torch.manual_seed(0)
    layer = getattr(layers, name)(hidden_size=64, num_heads=2, **LAYERS[name])
    x = torch.randn(2, 30, 64)
    y = layer(x)[0]
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    with torch.no_grad():  # with its recurrent form
        assert_close(layer.eval()(x)[0], y, rtol=1e-4, atol=1e-5)

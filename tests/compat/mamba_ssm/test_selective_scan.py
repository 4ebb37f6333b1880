"""Mamba's scan and mixer, compared with loops in float64 and with transformers without its kernels."""

from importlib import import_module

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra.compat.mamba_ssm import mamba_inner_fn, selective_scan_fn
from lintra.testing.laws import raises
from tests.compat.mamba_ssm import loops
from tests.compat.mamba_ssm.loops import everything

EXACT = {"rtol": 1e-9, "atol": 1e-9}  # for float64
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # for float32, over 70 tokens
CONSTANT, SHARED, GROUPED = (12, 5), (2, 5, 23), (2, 3, 5, 23)


def draw(B=SHARED, C=SHARED, t=23, dtype=torch.float64):
    """u, delta, A, B, C, D, z and delta_bias, all differentiable."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 12, t), (2, 12, t), (12, 5), B, C, (12,), (2, 12, t), (12,)]
    inputs = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    inputs[2] = -inputs[2].exp()
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("C", [CONSTANT, SHARED, GROUPED])
@pytest.mark.parametrize("B", [CONSTANT, SHARED, GROUPED])
def test_equals_the_loop_with_all_gradients(B, C, softplus):
    inputs = draw(B, C)
    y = selective_scan_fn(*inputs, softplus, return_last_state=True)
    assert_close(everything(y, inputs), everything(loops.scan(*inputs, softplus), inputs), **EXACT)


def test_what_may_be_missing():
    inputs = draw()[:5]
    assert_close(selective_scan_fn(*inputs), loops.scan(*inputs)[0], **EXACT)


def test_transposed_views_are_read_where_they_lie():
    """As transformers passes them: channels contiguous, and time for the step sizes."""
    inputs = draw()
    views = [x.mT.contiguous().mT if i in (0, 3, 4, 6) else x for i, x in enumerate(inputs)]
    y = selective_scan_fn(*views, True)
    assert y.stride(1) == 1
    assert_close(y, selective_scan_fn(*inputs, True), **EXACT)


def test_equals_the_fallback(fallback_module):
    function = fallback_module("mamba").mamba_selective_scan.__wrapped__
    inputs = draw((2, 5, 70), (2, 5, 70), 70, torch.float32)
    expected = function(*inputs, delta_softplus=True, return_last_state=True)
    assert_close(selective_scan_fn(*inputs, delta_softplus=True, return_last_state=True), expected, **CLOSE)


@pytest.mark.parametrize(("name", "training"), [("mamba", False), ("mamba", True), ("falcon_mamba", False)])
def test_a_mixer_of_transformers(fallback_module, monkeypatch, name, training):
    """A whole layer; in training it calls the function that computes the whole mixer.

    Not Falcon in training: transformers normalises step sizes before their projection, mamba_ssm after it."""
    module = fallback_module(name)
    title = name.title().replace("_", "")
    config = getattr(import_module(f"transformers.models.{name}.configuration_{name}"), f"{title}Config")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "state_size": 6, "expand": 2, "conv_kernel": 4, "time_step_rank": 3}
    # Falcon's constructor initialises its norms before it creates them.
    mixer = getattr(module, f"{title}Mixer")(config(**sizes), 0, initialize_mixer_weights=False)
    getattr(mixer, f"init_{name}_weights")()
    mixer.train(training)
    x = torch.randn(2, 40, 16).requires_grad_()
    inputs = [x, *mixer.parameters()]
    expected = everything([mixer(x)], inputs)
    called = []

    def record(function):
        def call(*arguments, use_mambapy=None, use_associative_scan=None, **options):
            called.append(function.__name__)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(module, "mamba_selective_scan", record(selective_scan_fn))
    monkeypatch.setattr(module, "mamba_inner_fn", record(mamba_inner_fn))
    # Gradients of parameters are sums over 80 tokens.
    assert_close(everything([mixer(x)], inputs), expected, rtol=1e-3, atol=1e-4)
    assert called == ["mamba_inner_fn" if training else "selective_scan_fn"]


def inner_inputs(names=()):
    """Arguments of `mamba_inner_fn` by name, of which `names` may be missing."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"xz": (2, 16, 19), "conv1d_weight": (8, 1, 4), "conv1d_bias": (8,), "x_proj_weight": (13, 8)}
    shapes |= {"delta_proj_weight": (8, 3), "out_proj_weight": (6, 8), "out_proj_bias": (6,), "A": (8, 5)}
    shapes |= {"D": (8,), "delta_bias": (8,)}
    more = {"B": (2, 5, 19), "C": (8, 5), "B_proj_bias": (5,), "C_proj_bias": (5,), "b_rms_weight": (5,)}
    more |= {"c_rms_weight": (5,), "dt_rms_weight": (8,)}
    shapes |= {name: more[name] for name in names}
    given = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    given["A"] = -given["A"].exp()
    return {name: x.requires_grad_() for name, x in given.items()}


def inner_by_loops(given, softplus=True, eps=1e-6):
    x, z = given["xz"].chunk(2, 1)
    u = loops.convolution(x, given["conv1d_weight"][:, 0], given["conv1d_bias"])
    projected = functional.linear(u.mT, given["x_proj_weight"])
    delta = functional.linear(projected[..., :3], given["delta_proj_weight"])
    B = given.get("B", (projected[..., 3:8] + given.get("B_proj_bias", 0)).mT)
    C = given.get("C", (projected[..., -5:] + given.get("C_proj_bias", 0)).mT)

    def norm(x, name):
        if name not in given:
            return x
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * given[name]

    B, C = norm(B.mT, "b_rms_weight").mT, norm(C.mT, "c_rms_weight").mT
    delta = norm(delta, "dt_rms_weight").mT
    y, _ = loops.scan(u, delta, given["A"], B, C, given["D"], z, given["delta_bias"], softplus)
    return functional.linear(y.mT, given["out_proj_weight"], given["out_proj_bias"])


NORMS = ("b_rms_weight", "c_rms_weight", "dt_rms_weight")


@pytest.mark.parametrize(
    "names", [(), ("B",), ("B", "C"), ("B_proj_bias", "C_proj_bias"), NORMS], ids=lambda x: "+".join(x)
)
def test_the_whole_mixer_equals_loops(names):
    given = inner_inputs(names)
    inputs = list(given.values())
    y = mamba_inner_fn(**given, b_c_dt_rms_eps=1e-3)
    assert_close(everything([y], inputs), everything([inner_by_loops(given, eps=1e-3)], inputs), **EXACT)


def test_the_whole_mixer_without_softplus():
    given = inner_inputs()
    given["xz"] = given["xz"].detach() / 10  # otherwise the states may grow
    y = mamba_inner_fn(**given, delta_softplus=False, checkpoint_lvl=0)
    assert_close(y, inner_by_loops(given, False), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    # A, D and delta_bias are float32, as mamba_ssm demands.
    inputs = [x.detach().to(torch.float32) for x in draw()]
    halves = [x.to(dtype) if i in (0, 1, 3, 4, 6) else x for i, x in enumerate(inputs)]
    y, state = selective_scan_fn(*halves, True, return_last_state=True)
    expected, kept = loops.scan(*(x.double() for x in halves), True)
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert_close(state.double(), kept, **CLOSE)


def test_mixed_dtypes_go_by_the_widest():
    inputs = [x.detach().to(torch.float32) for x in draw()]
    mixed = [x.to(torch.bfloat16) if i in (0, 6) else x for i, x in enumerate(inputs)]
    y = selective_scan_fn(*mixed, True)
    assert y.dtype == torch.bfloat16
    expected = loops.scan(*(x.double() for x in mixed), True)[0]
    assert_close(y.double(), expected, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)


def test_a_caller_may_be_compiled():
    inputs = [x.detach().to(torch.float32) for x in draw()]
    torch.compiler.reset()
    y = torch.compile(selective_scan_fn, backend="aot_eager")(*inputs, True)
    assert_close(y, selective_scan_fn(*inputs, True), **CLOSE)


def test_refusals():
    u, delta, A, B, C, D, z, bias = draw()
    call = selective_scan_fn
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(u, delta, A, B, C, state=None)
    raises(NotImplementedError, "A is not supported.*real", call, u, delta, A.to(torch.complex64), B, C)
    raises(ValueError, "delta must be", call, u, delta[..., :3], A, B, C)
    raises(ValueError, "B must be", call, u, delta, A, B[:, :3], C)
    raises(ValueError, "D must be", call, u, delta, A, B, C, D[:3])
    raises(ValueError, "z must be", call, u, delta, A, B, C, D, z[:1])
    raises(ValueError, "delta_bias must be", call, u, delta, A, B, C, D, z, bias[:1])
    raises(ValueError, "groups of B", call, u, delta, A, draw(B=(2, 5, 5, 23))[3], C)
    raises(TypeError, "u must be", call, u.long(), delta, A, B, C)
    given = inner_inputs()
    raises(ValueError, "xz must be", mamba_inner_fn, **{**given, "xz": given["xz"][:, 1:]})
    raises(
        ValueError, "x_proj_weight", mamba_inner_fn, **{**given, "x_proj_weight": given["x_proj_weight"][1:]}
    )
    raises(ValueError, "checkpoint_lvl", mamba_inner_fn, **given, checkpoint_lvl=2)

"""Mamba-2's scan and mixer, compared with loops in float64 and with transformers without its kernels."""

from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra.compat.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from lintra.compat.mamba_ssm.ops.triton.ssd_combined import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)
from lintra.testing.laws import raises
from tests.compat.mamba_ssm import loops
from tests.compat.mamba_ssm.loops import everything

EXACT = {"rtol": 1e-9, "atol": 1e-9}  # for float64
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # for float32, over 150 tokens


def draw(b=2, t=37, h=4, p=5, g=2, n=6, dtype=torch.float64, heads_of_D=False):
    """x, dt, A, B, C, D, z, dt_bias and a state, all differentiable."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(b, t, h, p), (b, t, h), (h,), (b, t, g, n), (b, t, g, n), (h,) if heads_of_D else (h, p)]
    shapes += [(b, t, h, p), (h,), (b, h, p, n)]
    inputs = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    inputs[2] = -inputs[2].exp()
    return [x.requires_grad_() for x in inputs]


def ours(x, dt, A, B, C, D, z, dt_bias, state, **options):
    options = {"dt_softplus": True, "return_final_states": True} | options
    return mamba_chunk_scan_combined(
        x, dt, A, B, C, 16, D=D, z=z, dt_bias=dt_bias, initial_states=state, **options
    )


@pytest.mark.parametrize("options", [{}, {"heads_of_D": True}, {"g": 1}, {"t": 1}, {"g": 4, "t": 70}])
def test_equals_the_loop_with_all_gradients(options):
    inputs = draw(**options)
    assert_close(everything(ours(*inputs), inputs), everything(loops.ssd(*inputs), inputs), **EXACT)


@pytest.mark.parametrize("t", [1, 37])
def test_initial_states_may_be_written_over_before_the_backward(t):
    """Caches of transformers do this with the final states."""
    inputs = draw(t=t)
    held = inputs[-1].clone()
    y, states = ours(*inputs[:-1], held)
    held.copy_(states)
    assert_close(everything((y, held), inputs), everything(ours(*inputs), inputs), rtol=0, atol=0)


@pytest.mark.parametrize(("softplus", "limit"), [(True, (0.2, 0.9)), (False, (0.0, 1.0)), (False, None)])
def test_step_sizes_have_bounds(softplus, limit):
    inputs = draw()
    options = {} if limit is None else {"dt_limit": limit}
    y = ours(*inputs, dt_softplus=softplus, **options)
    expected = loops.ssd(*inputs, softplus=softplus, limit=limit or (0.0, float("inf")))
    assert_close(everything(y, inputs), everything(expected, inputs), **EXACT)


def test_what_may_be_missing():
    x, dt, A, B, C = draw()[:5]
    y = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size=256, dt_softplus=True)
    assert_close(y, loops.ssd(x, dt, A, B, C)[0], **EXACT)


def test_equals_the_fallback(fallback_module):
    inputs = draw(t=150, dtype=torch.float32, heads_of_D=True)
    x, dt, A, B, C, D, _, dt_bias, state = inputs
    function = fallback_module("mamba2").mamba2_chunk_scan.__wrapped__
    options = {"chunk_size": 64, "D": D, "dt_bias": dt_bias, "initial_states": state, "dt_softplus": True}
    options |= {"return_final_states": True}
    expected = function(x, dt, A, B, C, **options)
    assert_close(mamba_chunk_scan_combined(x, dt, A, B, C, **options), expected, **CLOSE)


@pytest.mark.parametrize("name", ["mamba2", "bamba"])
@pytest.mark.parametrize("training", [False, True])
def test_a_mixer_of_transformers(fallback_module, monkeypatch, name, training):
    """A whole layer; in training it calls the function that computes the whole mixer."""
    module = fallback_module(name)
    title = name.capitalize()
    config = getattr(import_module(f"transformers.models.{name}.configuration_{name}"), f"{title}Config")
    sizes = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 6, "n_groups": 2, "expand": 2}
    if name == "bamba":
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "mamba_n_heads": 4}
        sizes |= {"mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 1, "mamba_expand": 2}
    torch.manual_seed(0)
    mixer = getattr(module, f"{title}Mixer")(config(**sizes), 0).train(training)
    x = torch.randn(2, 50, 16).requires_grad_()
    inputs = [x, *mixer.parameters()]
    expected = everything([mixer(x)], inputs)
    called = []

    def record(function):
        def call(*arguments, **options):
            called.append(function.__name__)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(module, "mamba2_chunk_scan", record(mamba_chunk_scan_combined))
    monkeypatch.setattr(module, "mamba2_split_conv1d_scan_combined", record(mamba_split_conv1d_scan_combined))
    # Gradients of parameters are sums over 100 tokens.
    assert_close(everything([mixer(x)], inputs), expected, rtol=1e-3, atol=1e-4)
    assert called == ["mamba_split_conv1d_scan_combined" if training else "mamba_chunk_scan_combined"]


NUMBERS = torch.tensor([[0] * 9 + [1] * 1 + [2] * 27, [3] * 20 + [-1] * 17], dtype=torch.int32)


def spans(numbers):
    """The first token and the last + 1 of each sequence of a row."""
    starts = [0, *[i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]], len(numbers)]
    return list(pairwise(starts))


def test_packed_sequences_are_each_alone():
    inputs = draw()
    y, after = ours(*inputs, seq_idx=NUMBERS)
    x, dt, A, B, C, D, z, dt_bias, state = inputs
    rows, last = [], []
    for row in range(2):
        ys = []
        for first, end in spans(NUMBERS[row].tolist()):
            tokens = (row, slice(first, end))
            x_, dt_, B_, C_, z_ = (each[tokens][None] for each in (x, dt, B, C, z))
            # Only a row's first sequence continues from a state, and only if its number is 0.
            before = state[row][None] if row == 0 and first == 0 else None
            one, kept = loops.ssd(x_, dt_, A, B_, C_, D, z_, dt_bias, before)
            ys.append(one)
        rows.append(torch.cat(ys, 1))
        last.append(kept)
    expected = [torch.cat(rows), torch.cat(last)]
    assert_close(everything([y, after], inputs), everything(expected, inputs), **EXACT)


def test_nothing_leaks_between_packed_sequences():
    inputs = [x.detach() for x in draw()]
    y = ours(*inputs, seq_idx=NUMBERS)[0]
    inputs[0][0, :9] = torch.nan
    assert_close(ours(*inputs, seq_idx=NUMBERS)[0][0, 9:], y[0, 9:], rtol=0, atol=0)


def test_states_of_all_packed_sequences():
    x, dt, A, B, C, *_ = draw(b=1)
    options = {"seq_idx": NUMBERS[:1], "cu_seqlens": torch.tensor([0, 9, 10, 37]), "dt_softplus": True}
    y, final, states = mamba_chunk_scan_combined(
        x, dt, A, B, C, 16, return_final_states=True, return_varlen_states=True, **options
    )
    alone = [
        loops.ssd(*(each[:, first:end] if each.dim() > 1 else each for each in (x, dt, A, B, C)))[1]
        for first, end in ((0, 9), (9, 10), (10, 37))
    ]
    assert_close(states, torch.cat(alone), **EXACT)
    assert_close(final, states[-1:], rtol=0, atol=0)
    assert_close(mamba_chunk_scan_combined(x, dt, A, B, C, 16, **options), y, rtol=0, atol=0)


def test_steps_are_the_scan():
    """Token by token, with A and dt expanded from one number per head, as in transformers."""
    x, dt, A, B, C, D, z, dt_bias, state = (y.detach() for y in draw())
    y, after = ours(x, dt, A, B, C, D, z, dt_bias, state)
    state = state.clone()
    wide = A[:, None, None].expand(4, 5, 6)
    bias = dt_bias[:, None].expand(4, 5)
    steps = [
        selective_state_update(
            state, x[:, i], dt[:, i, :, None].expand(2, 4, 5), wide, B[:, i], C[:, i], D, z[:, i], bias, True
        )
        for i in range(37)
    ]
    assert_close(torch.stack(steps, 1), y, **EXACT)
    assert_close(state, after, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    inputs = [x.detach() for x in draw(dtype=torch.float32)]
    # Callers in half precision keep dt, A, D, dt_bias and states in float32.
    halves = [x.to(dtype) if i in (0, 3, 4, 6) else x for i, x in enumerate(inputs)]
    y, after = ours(*halves)
    expected, kept = loops.ssd(*(x.double() for x in halves))
    assert y.dtype == dtype
    assert after.dtype == torch.float32
    assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert_close(after.double(), kept, **CLOSE)


def split_inputs(mlp=0, heads_of_D=False):
    generator = torch.Generator().manual_seed(1)
    h, p, g, n = 4, 6, 2, 5
    k = h * p + 2 * g * n
    shapes = {"zxbcdt": (2, 21, 2 * mlp + h * p + k + h), "conv1d_weight": (k, 4), "conv1d_bias": (k,)}
    shapes |= {
        "dt_bias": (h,),
        "A": (h,),
        "D": (h,) if heads_of_D else (h, p),
        "initial_states": (2, h, p, n),
    }
    shapes |= {"rmsnorm_weight": (h * p,), "outproj_weight": (7, mlp + h * p), "outproj_bias": (7,)}
    given = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    given["A"] = -given["A"].exp()
    return {name: x.requires_grad_() for name, x in given.items()}


def split_by_loops(given, mlp, before, norm, silu=True, tokens=slice(None), row=slice(None)):
    wide = 24
    zxbcdt = given["zxbcdt"][row, tokens]
    gates, values, z, mixed, dt = zxbcdt.split([mlp, mlp, wide, wide + 20, 4], -1)
    mixed = loops.convolution(mixed.mT, given["conv1d_weight"], given["conv1d_bias"], silu).mT
    x, B, C = mixed.split([wide, 10, 10], -1)
    x, B, C = x.unflatten(2, (4, 6)), B.unflatten(2, (2, 5)), C.unflatten(2, (2, 5))
    gate = None if norm else z.unflatten(2, (4, 6))
    state = given.get("initial_states")
    y, after = loops.ssd(x, dt, given["A"], B, C, given["D"], gate, given["dt_bias"], state)
    y = y.flatten(2)
    y = loops.rms_norm(y, given["rmsnorm_weight"], z, 1e-6, wide // 2, before) if norm else y
    y = torch.cat((functional.silu(gates) * values, y), -1)
    if "outproj_weight" in given:
        y = functional.linear(y, given["outproj_weight"], given["outproj_bias"])
    return y, after


@pytest.mark.parametrize(("norm", "before"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("mlp", [0, 3])
def test_the_whole_mixer_equals_loops(norm, before, mlp):
    given = split_inputs(mlp)
    if not norm:
        del given["rmsnorm_weight"]
    inputs = list(given.values())
    options = {"chunk_size": 8, "ngroups": 2, "norm_before_gate": before, "return_final_states": True}
    y = mamba_split_conv1d_scan_combined(**given, **options)
    assert_close(everything(y, inputs), everything(split_by_loops(given, mlp, before, norm), inputs), **EXACT)


def test_the_whole_mixer_without_what_may_be_missing():
    given = split_inputs(heads_of_D=True)
    for name in ("initial_states", "rmsnorm_weight", "outproj_weight", "outproj_bias"):
        del given[name]
    y = mamba_split_conv1d_scan_combined(**given, chunk_size=8, ngroups=2, headdim=6, activation=None)
    assert_close(y, split_by_loops(given, 0, True, False, silu=False)[0], **EXACT)
    raises(ValueError, "headdim", mamba_split_conv1d_scan_combined, **given, chunk_size=8, ngroups=2)


def test_the_whole_mixer_of_packed_sequences():
    given = split_inputs()
    del given["initial_states"]
    numbers = torch.tensor([[0] * 8 + [1] * 13, [0] * 21])
    y = mamba_split_conv1d_scan_combined(
        **given, chunk_size=8, ngroups=2, norm_before_gate=False, seq_idx=numbers
    )
    parts = [
        split_by_loops(given, 0, False, True, tokens=tokens, row=row)[0]
        for row, tokens in (
            (slice(0, 1), slice(0, 8)),
            (slice(0, 1), slice(8, 21)),
            (slice(1, 2), slice(0, 21)),
        )
    ]
    expected = torch.cat((torch.cat(parts[:2], 1), parts[2]))
    inputs = list(given.values())
    assert_close(everything([y], inputs), everything([expected], inputs), **EXACT)


def test_a_caller_may_be_compiled():
    inputs = [x.detach() for x in draw(dtype=torch.float32)]
    torch.compiler.reset()
    y = torch.compile(ours, backend="aot_eager")(*inputs)
    assert_close(y, ours(*inputs), **CLOSE)


def test_refusals():
    x, dt, A, B, C, D, _, _, state = draw()
    call = mamba_chunk_scan_combined
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(x, dt, A, B, C, 16, chunk=3)
    raises(NotImplementedError, "A is not supported.*at most 0", call, x, dt, -A, B, C, 16, dt_softplus=True)
    raises(NotImplementedError, "A is not supported.*real", call, x, dt, A.to(torch.complex64), B, C, 16)
    raises(ValueError, "dt must be", call, x, dt[:, :3], A, B, C, 16)
    raises(ValueError, "C must be", call, x, dt, A, B, C[..., :3], 16)
    raises(ValueError, "D must be", call, x, dt, A, B, C, 16, D=D[:3])
    raises(ValueError, "initial_states must be", call, x, dt, A, B, C, 16, initial_states=state.mT)
    raises(ValueError, "groups of B", call, x[:, :, :3], dt[..., :3], A[:3], B, C, 16)
    raises(ValueError, "seq_idx must be", call, x, dt, A, B, C, 16, seq_idx=NUMBERS[:, :5])
    raises(TypeError, "seq_idx must be", call, x, dt, A, B, C, 16, seq_idx=NUMBERS.float())
    bounds = torch.tensor([0, 37])
    raises(ValueError, "cu_seqlens needs seq_idx", call, x, dt, A, B, C, 16, cu_seqlens=bounds)
    raises(ValueError, "return_varlen_states needs", call, x, dt, A, B, C, 16, return_varlen_states=True)
    options = {"seq_idx": NUMBERS, "cu_seqlens": bounds, "return_varlen_states": True}
    raises(ValueError, "1 row", call, x, dt, A, B, C, 16, **options)
    options["seq_idx"] = NUMBERS[:1]
    raises(ValueError, "must bound", call, x[:1], dt[:1], A, B[:1], C[:1], 16, **options)
    given = split_inputs()
    call = mamba_split_conv1d_scan_combined
    raises(NotImplementedError, "activation", call, **given, chunk_size=8, ngroups=2, activation="gelu")
    raises(ValueError, "ngroups", call, **given, chunk_size=8, ngroups=3)
    given["zxbcdt"] = given["zxbcdt"][..., 1:]
    raises(ValueError, "zxbcdt", call, **given, chunk_size=8, ngroups=2)

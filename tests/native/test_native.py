"""The C++ kernels compared with the definition: a quadratic sum in float64 under autograd."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

from lintra import native, ops
from lintra.native import linear_attention as kernel

pytestmark = pytest.mark.skipif(
    not native.instruction_sets(), reason=f"no native library: {native.why_not()}"
)

# Relative to the largest element. float64: sums of at most a few hundred terms. float32: the same sums with
# its rounding. Half precisions: one rounding of each output.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SUM = {torch.float64: torch.float64}


@contextmanager
def threads(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def phi(x, feature_map):
    if feature_map == "elu+1":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    return {"relu": torch.relu, "exp": torch.exp, None: lambda x: x}[feature_map](x)


def reference(q, k, v, log_decay, log_input, kv, z, mask, causal, normalize, eps, feature_map):
    """Every weight of every key for every query. Returns y and the state after."""
    b, t, h = q.shape[:3]
    s, g = v.shape[1:3]
    real = torch.ones(b, s, dtype=torch.bool) if mask is None else mask
    wide = real[:, :, None, None]
    k = torch.where(wide, phi(torch.where(wide, k, 0), feature_map), 0)
    v = torch.where(wide, v, 0)
    q = torch.where(wide, phi(torch.where(wide, q, 0), feature_map), 0) if causal else phi(q, feature_map)
    decay = (
        torch.zeros(b, s, g, dtype=q.dtype)
        if log_decay is None
        else torch.where(real[..., None], log_decay, 0)
    )
    weight = torch.ones(b, s, g, dtype=q.dtype) if log_input is None else log_input.exp()
    k = k * weight[..., None]
    passed = decay.cumsum(1)
    end = passed[:, -1:] if s else torch.zeros(b, 1, g, dtype=q.dtype)
    left = (end - passed).exp()[..., None]
    kv_out = torch.einsum("bsgf,bsge->bgfe", k * left, v) + kv * end[:, 0, :, None, None].exp()
    z_out = (k * left).sum(1) + z * end[:, 0, :, None].exp()

    def to_heads(x):
        return x.repeat_interleave(h // g, 2)

    scores = torch.einsum("bthf,bshf->bhts", q, to_heads(k))
    if causal:
        gap = passed[:, :, None] - passed[:, None]
        gap = gap.masked_fill(~torch.ones(t, s, dtype=torch.bool).tril()[None, ..., None], -torch.inf)
        scores = scores * to_heads(gap.exp().permute(0, 1, 3, 2)).permute(0, 2, 1, 3)
        reach = to_heads(passed).exp()[..., None]
    else:
        reach = torch.ones(b, t, h, 1, dtype=q.dtype)
    kv, z = kv.repeat_interleave(h // g, 1), z.repeat_interleave(h // g, 1)
    y = torch.einsum("bhts,bshe->bthe", scores, to_heads(v)) + torch.einsum("bthf,bhfe->bthe", q * reach, kv)
    if normalize:
        den = scores.sum(-1).transpose(1, 2) + torch.einsum("bthf,bhf->bth", q * reach, z) + eps
        y = torch.where(den[..., None] == 0, 0, y / torch.where(den == 0, 1, den)[..., None])
    if causal:
        y = torch.where(wide, y, 0)
    return y, kv_out, z_out


def positive(*shape, scale=1.0):
    return torch.rand(*shape, dtype=torch.float64) * scale + 0.05


def problem(t, f, e, *, b=2, h=2, g=None, s=None, decay=False, weights=False, state=False, mask=None,
            feature_map=None, seed=0):  # fmt: skip
    """The tensors of one call, in float64; q and k are positive if no feature map makes them so."""
    torch.manual_seed(seed)
    g = g or h
    s = t if s is None else s
    draw = positive if feature_map is None else (lambda *shape: torch.randn(*shape, dtype=torch.float64))
    inputs = {
        "q": draw(b, t, h, f),
        "k": draw(b, s, g, f),
        "v": torch.randn(b, s, g, e, dtype=torch.float64),
        "log_decay": -positive(b, s, g, scale=0.3) if decay else None,
        "log_input": torch.randn(b, s, g, dtype=torch.float64) if weights else None,
        "kv": torch.randn(b, g, f, e, dtype=torch.float64) if state else None,
        "z": positive(b, g, f) if state else None,
    }
    if mask is not None:
        mask = {
            "left": torch.arange(s)[None] >= torch.tensor([s // 3, 1])[:b, None],
            "right": torch.arange(s)[None] < torch.tensor([s - s // 3, s])[:b, None],
            "holes": torch.rand(b, s) < 0.6,
            "nothing": torch.arange(b)[:, None].expand(b, s) > 0,
        }[mask]
    return inputs, mask


def cast(inputs, dtype):
    total = SUM.get(dtype, torch.float32)
    return {n: x if x is None else x.to(dtype if n in ("q", "k", "v") else total) for n, x in inputs.items()}


def check(inputs, mask, dtype, *, causal=True, normalize=True, eps=1e-6, feature_map=None, poison=True):
    """Values and all gradients of the native call, compared with the reference on the same rounded inputs."""
    total = SUM.get(dtype, torch.float32)
    given = cast(inputs, dtype)
    settings = {"causal": causal, "normalize": normalize, "eps": eps, "feature_map": feature_map}
    exact = {name: None if x is None else x.double().requires_grad_() for name, x in given.items()}
    b, _, g, f = given["k"].shape
    e = given["v"].shape[-1]
    wanted = dict(exact)
    if wanted["kv"] is None:
        wanted["kv"] = torch.zeros(b, g, f, e, dtype=torch.float64, requires_grad=True)
        wanted["z"] = torch.zeros(b, g, f, dtype=torch.float64, requires_grad=True)
    expected = reference(**wanted, mask=mask, **settings)

    if mask is not None and poison:  # the content of padded places must not matter
        for name in ("k", "v", "q") if causal else ("k", "v"):
            x = given[name].clone()
            x[~mask] = float("nan")
            given[name] = x
        for name in ("log_decay", "log_input"):
            if given[name] is not None:
                given[name] = given[name].masked_fill(~mask[..., None], float("nan"))
    save_lost = normalize and dtype.itemsize == 2
    y, kv_out, z_out, den, lost = kernel.forward(**given, mask=mask, **settings, save_lost=save_lost)
    assert y.dtype == dtype
    assert kv_out.dtype == z_out.dtype == den.dtype == total
    for name, mine, right in zip(("y", "kv", "z"), (y, kv_out, z_out), expected, strict=True):
        close(name, mine, right, TOLERANCE[dtype if name == "y" else total])

    dy = torch.randn(y.shape, dtype=torch.float64).to(dtype)
    dkv, dz = (torch.randn(x.shape, dtype=torch.float64).to(total) * 0.1 for x in (kv_out, z_out))
    sources = {name: x for name, x in wanted.items() if x is not None}
    gradients = torch.autograd.grad(
        expected, list(sources.values()), [dy.double(), dkv.double(), dz.double()], allow_unused=True
    )
    right = {
        name: torch.zeros_like(x) if d is None else d
        for (name, x), d in zip(sources.items(), gradients, strict=True)
    }
    if mask is not None and poison and causal:
        dy = dy.masked_fill(~mask[..., None, None], float("nan"))
    mine = dict(
        zip(
            ("q", "k", "v", "log_decay", "log_input", "kv", "z"),
            kernel.backward(dy, dkv, dz, y=y, den=den, lost=lost, **given, mask=mask, **settings),
            strict=True,
        )
    )
    for name, x in wanted.items():
        if x is None:
            assert mine[name] is None
        else:
            # Gradients are longer chains of roundings.
            slack = 1 if dtype is torch.float64 else 3
            close(f"d{name}", mine[name], right[name], slack * TOLERANCE[dtype])
    if mask is not None:
        for name in ("k", "v", "log_decay", "log_input") + (("q",) if causal else ()):
            if mine[name] is not None:
                assert not mine[name][~mask].any(), f"d{name} in padding"


def close(name, mine, right, tolerance):
    mine = mine.double()
    assert mine.shape == right.shape, name
    assert mine.isfinite().all(), name
    if right.numel():
        error = (mine - right).abs().max() / right.abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{name}: {error:.1e}"


WIDTHS = [(1, 1), (3, 5), (16, 16), (17, 33), (64, 64), (65, 40), (32, 200), (130, 70)]
LENGTHS = [1, 2, 15, 16, 17, 33, 100]


@pytest.mark.parametrize(("f", "e"), WIDTHS)
def test_widths(instruction_set, f, e):
    inputs, mask = problem(37, f, e, decay=True, weights=True, state=True, mask="holes")
    check(inputs, mask, torch.float64)
    if f > 1:  # with one feature y does not depend on q: dq is rounding noise alone
        check(inputs, mask, torch.float32)


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("decay", [False, True])
def test_lengths(instruction_set, t, decay):
    inputs, mask = problem(t, 20, 12, decay=decay, state=decay)
    check(inputs, mask, torch.float64)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("feature_map", [None, "elu+1", "relu", "exp"])
@pytest.mark.parametrize("causal", [True, False])
def test_dtypes_and_feature_maps(instruction_set, dtype, feature_map, causal):
    inputs, mask = problem(50, 24, 19, feature_map=feature_map, mask="right", weights=True)
    # relu can leave almost nothing in a denominator; with eps, the comparison tests the kernel.
    eps = 1.0 if feature_map == "relu" else 1e-6
    check(inputs, mask, dtype, causal=causal, feature_map=feature_map, eps=eps)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mask", [None, "left", "right", "holes", "nothing"])
@pytest.mark.parametrize("weighted", [True, False])
def test_masks(instruction_set, normalize, mask, weighted):
    settings = {"decay": weighted, "weights": weighted, "feature_map": "elu+1"}
    inputs, mask = problem(40, 9, 7, h=4, g=2, mask=mask, **settings)
    for eps in (1e-6, 0.0):
        check(inputs, mask, torch.float64, normalize=normalize, feature_map="elu+1", eps=eps)


@pytest.mark.parametrize(("h", "g"), [(1, 1), (4, 1), (6, 3), (8, 8)])
@pytest.mark.parametrize("causal", [True, False])
def test_grouped_heads(instruction_set, h, g, causal):
    inputs, mask = problem(35, 18, 10, h=h, g=g, decay=causal, weights=True, state=True, mask="holes")
    check(inputs, mask, torch.float64, causal=causal)


@pytest.mark.parametrize(("t", "s"), [(20, 33), (33, 7), (5, 0), (0, 5), (1, 1)])
@pytest.mark.parametrize("weights", [True, False])
def test_cross(instruction_set, t, s, weights):
    inputs, mask = problem(t, 12, 6, s=s, h=4, g=2, weights=weights, state=True, mask="holes")
    check(inputs, mask, torch.float64, causal=False)


@pytest.mark.parametrize(("b", "t"), [(0, 5), (2, 0), (0, 1)])
def test_nothing(instruction_set, b, t):
    inputs, mask = problem(t, 6, 4, b=b, decay=True, weights=True, state=True)
    check(inputs, mask, torch.float64)


@pytest.mark.parametrize(("count", "h"), [(2, 1), (3, 1), (7, 1), (2, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_threads(instruction_set, count, h, causal):
    """Few heads and many tokens: threads split the time axis, and repeating the call gives the same bits."""
    inputs, mask = problem(1000, 12, 20, b=1, h=h, decay=causal, weights=True, state=True, mask="holes")
    with threads(count):
        check(inputs, mask, torch.float64, causal=causal)
        first, again = (
            kernel.forward(**inputs, mask=mask, causal=causal, normalize=True, eps=1e-6) for _ in range(2)
        )
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x, y)


def test_strides(instruction_set):
    """Heads before time, slices of larger tensors, expanded gradients, a last axis that is not contiguous."""
    inputs, _ = problem(21, 8, 8)
    plain = kernel.forward(**inputs)
    big = torch.randn(2, 50, 7, 13, dtype=torch.float64)
    window = big[:, 3:45:2, 1:6:4, 2:10]
    window.copy_(inputs["q"])
    odd = dict(
        inputs,
        q=window,
        k=inputs["k"].permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
        v=inputs["v"].transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert odd["k"].stride(-1) != 1
    for x, y in zip(kernel.forward(**odd), plain, strict=True):
        assert torch.equal(x, y)
    dy = torch.ones(()).double().expand(plain[0].shape)
    y, _, _, den, lost = plain
    for x, z in zip(
        kernel.backward(dy, None, None, y=y, den=den, lost=lost, **odd),
        kernel.backward(dy.contiguous(), None, None, y=y, den=den, lost=lost, **inputs),
        strict=True,
    ):
        assert x is z is None or torch.equal(x, z)


@pytest.fixture(scope="module")
def far_apart():
    """More than 4 GiB of address space. Untouched pages take no memory, so that only a few are used."""
    try:
        return torch.empty(2**31 + 2**14, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no 4 GiB of addresses: {error}")


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "time", "head"])
def test_offsets_of_more_than_32_bits(instruction_set, far_apart, axis, t):
    """Two entries on each axis, 2^32 bytes apart on one of them: 2^31 elements of q, k, v and dy."""
    inputs, mask = problem(t, 8, 8, decay=True, weights=True, mask="holes", feature_map="elu+1")
    inputs = {n: x for n, x in cast(inputs, torch.float16).items() if x is not None}
    inputs |= {"mask": mask, "dy": torch.randn(inputs["v"].shape).half()}
    apart = {}
    for i, (name, x) in enumerate(inputs.items()):
        stride, size = list(x.stride()), x.element_size()
        if axis < x.dim():
            stride[axis] = 2**32 // size
        apart[name] = far_apart.view(x.dtype).as_strided(x.shape, stride, i * 2**10 // size).copy_(x)
    for plain, far in zip(results(**inputs), results(**apart), strict=True):
        assert torch.equal(plain, far)


def results(dy, **inputs):
    """All outputs of the kernels, forward and backward."""
    y, kv, z, den, lost = kernel.forward(**inputs, feature_map="elu+1", save_lost=True)
    return y, kv, z, den, *kernel.backward(dy, kv, z, y=y, den=den, lost=lost, **inputs, feature_map="elu+1")


def test_only_outputs_of_16_bits_lose_anything(instruction_set):
    """In others, what would be lost is not read from memory that nobody wrote."""
    inputs, mask = problem(20, 13, 21, feature_map="elu+1")
    inputs = {n: x for n, x in inputs.items() if x is not None}
    for dtype in (torch.float32, torch.float64):
        given = cast(inputs, dtype)
        assert kernel.forward(**given, mask=mask, save_lost=True)[4].numel() == 0


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_steps_are_the_sequence(instruction_set, dtype):
    inputs, mask = problem(20, 13, 21, h=4, g=2, decay=True, weights=True, mask="holes", feature_map="elu+1")
    total = SUM.get(dtype, torch.float32)
    inputs = cast(inputs, dtype)
    whole = kernel.forward(**inputs, mask=mask, feature_map="elu+1")
    state, rows = {"kv": None, "z": None}, []
    for i in range(20):
        now = {n: None if x is None else x[:, i : i + 1] for n, x in inputs.items() if n not in state}
        before = {n: None if x is None else x.clone() for n, x in state.items()}
        y, kv, z, *_ = kernel.forward(**now, **state, mask=mask[:, i : i + 1], feature_map="elu+1")
        for n, x in before.items():
            assert x is None or torch.equal(x, state[n]), "the state before a step is the caller's"
        state = {"kv": kv, "z": z}
        rows.append(y)
    close("y", torch.cat(rows, 1), whole[0].double(), TOLERANCE[dtype])
    close("kv", state["kv"], whole[1].double(), TOLERANCE[total])


@pytest.mark.parametrize("wrong", ["batch", "heads", "dtype"])
def test_a_state_of_other_sequences_is_not_read(instruction_set, wrong):
    q, k, v = (torch.randn(3, 5, 2, 4) for _ in range(3))
    kv, z = torch.zeros(3, 2, 4, 4), torch.zeros(3, 2, 4)
    kv = {"batch": kv[:1], "heads": kv[:, :1], "dtype": kv.double()}[wrong]
    with native.use(instruction_set), pytest.raises((ValueError, TypeError), match=r"^kv must be "):
        kernel.forward(q, k, v, kv=kv, z=z)


@torch.no_grad()
def test_kernels_write_to_the_cpu_whatever_the_default_device():
    q, beta = torch.randn(1, 5, 2, 8), torch.rand(1, 5, 2)

    def found():
        delta = ops.linear_attention(q, q, q, beta=beta, normalize=False)
        return ops.linear_attention(q, q, q), delta

    expected = found()
    with torch.device("meta"):
        torch.testing.assert_close(found(), expected)


def test_feature_map_at_its_limits(instruction_set):
    """elu+1 is exp far below zero, without cancellation, and NaN stays NaN."""
    x = torch.tensor([-30.0, -200.0, -87.5, -103.0, -0.0, 0.0, 1e-8, -1e-8, 5.0, float("-inf"), float("nan")])
    for dtype, tolerance in ((torch.float32, 3e-7), (torch.float64, 4e-16)):
        q = x.to(dtype)[None, :, None, None]
        kv, z = torch.ones(1, 1, 1, 1, dtype=dtype), torch.ones(1, 1, 1, dtype=dtype)
        y = kernel.forward(
            q, torch.ones_like(q), torch.zeros_like(q), kv=kv, z=z, normalize=False, feature_map="elu+1"
        )[0].flatten()
        right = phi(x.double(), "elu+1").to(dtype)
        torch.testing.assert_close(y, right, rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_passes_through(instruction_set, dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    y = kernel.forward(one, one, x[None, None, None], normalize=False)[0]
    torch.testing.assert_close(y.flatten(), x, rtol=0, atol=0, equal_nan=True)
    # The midpoints between neighbouring numbers need rounding; multiples reach subnormals and overflow.
    for factor in (1 / 3, 1e-4, 3.7, 1e-7):
        kv = (x.float() * factor).nan_to_num(0, 1e30, -1e30)[None, None, None]
        nothing, z = torch.zeros_like(x)[None, None, None], torch.ones(1, 1, 1)
        y = kernel.forward(one, one * 0, nothing, normalize=False, kv=kv, z=z)[0]
        assert torch.equal(y.flatten(), kv.flatten().to(dtype))


def test_halves_are_subnormal_where_floats_are_flushed(instruction_set):
    x = torch.arange(1, 2**10, dtype=torch.int16).view(torch.float16)  # all below 6.1e-5
    one = torch.ones(1, 1, 1, 1, dtype=torch.float16)
    with threads(1):  # the setting belongs to this thread
        torch.set_flush_denormal(True)
        try:
            y = kernel.forward(one, one, x[None, None, None], normalize=False)[0]
        finally:
            torch.set_flush_denormal(False)
    assert torch.equal(y.flatten(), x)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="subnormals are slow on x86 alone")
def test_decays_come_to_zero_and_not_to_subnormals(instruction_set):
    """On every thread; afterwards they compute with subnormals as before."""
    inputs, _ = problem(200, 8, 8, decay=True)
    inputs = cast(inputs, torch.float32)
    inputs["log_decay"].fill_(-5.5)
    inputs["k"][:, 20:] = 0.0
    for count in (1, 2):
        with threads(count):
            y, kv = kernel.forward(**inputs)[:2]
        tiny = torch.finfo(torch.float32).tiny
        for x in (y, kv):
            assert not ((x != 0) & (x.abs() < tiny)).any()
        assert y[:, :20].abs().min() > 0
        small = torch.full((4096,), 1e-39)
        assert (small * 0.5 != 0).all()


def test_a_long_sum_is_not_rounded_token_by_token(instruction_set):
    """The state after 2^16 tokens, all positive: chunks are summed before they are added to it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 2**16, 1, 4, generator=generator) for _ in range(3))
    _, kv, z = kernel.forward(q, k, v)[:3]
    exact = torch.einsum("bsgf,bsge->bgfe", k.double(), v.double())
    # Token by token they were off by 1e-5.
    torch.testing.assert_close(kv.double(), exact, rtol=2e-6, atol=0)
    torch.testing.assert_close(z.double(), k.double().sum(1), rtol=2e-6, atol=0)


def test_decay_that_forgets_everything(instruction_set):
    """log_decay = -inf empties the state: later tokens see a fresh start, and nothing becomes NaN."""
    inputs, _ = problem(40, 8, 8, decay=True)
    inputs["log_decay"][:, 21] = -torch.inf
    y, kv = kernel.forward(**inputs)[:2]
    tail = {n: None if x is None else x[:, 21:] for n, x in inputs.items()}
    fresh = kernel.forward(**tail)
    torch.testing.assert_close(y[:, 21:], fresh[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kv, fresh[1], rtol=1e-12, atol=1e-12)


def test_the_future_is_not_seen(instruction_set):
    inputs, _ = problem(48, 8, 8)
    y = kernel.forward(**inputs)[0]
    for cut in (1, 16, 20, 31):
        changed = {n: x if x is None else x.clone() for n, x in inputs.items()}
        changed["k"][:, cut:], changed["v"][:, cut:] = 7.0, -7.0
        assert torch.equal(kernel.forward(**changed)[0][:, :cut], y[:, :cut])


def test_long_sequence_stays_close_to_float64():
    inputs, _ = problem(65536, 16, 16, b=1, h=1)
    low = {n: None if x is None else x.float() for n, x in inputs.items()}
    y = kernel.forward(**{n: None if x is None else x.double() for n, x in low.items()})[0]
    close("y", kernel.forward(**low)[0], y, 1e-4)


def big():
    inputs, _ = problem(2048, 32, 32, b=1, h=3, seed=5)
    return {n: None if x is None else x.float() for n, x in inputs.items()}


def test_several_python_threads():
    inputs = big()
    with threads(2):
        expected = kernel.forward(**inputs)
        wrong = []

        def work():
            for _ in range(20):
                results = zip(kernel.forward(**inputs), expected, strict=True)
                wrong.extend(1 for x, y in results if not torch.equal(x, y))

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(30)
        assert not wrong
        assert not any(worker.is_alive() for worker in workers)


FORK = """
import os, sys, torch
from lintra.native import linear_attention as kernel
torch.set_num_threads(2)
x = torch.rand(1, 4096, 3, 32)
y = kernel.forward(x, x, x)[0]
torch.mm(torch.ones(500, 500), torch.ones(500, 500))
child = os.fork()
if child == 0:
    # Compared by numpy: PyTorch's own parallel loops would hang here, as they do in any forked child.
    same = kernel.forward(x, x, x)[0].numpy().tobytes() == y.numpy().tobytes()
    os._exit(0 if same else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_fork_after_threads_were_used():
    done = run_python(FORK)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["baseline", "avx2", "avx512", "neon"])
def test_environment_variable_chooses(name):
    done = run_python("from lintra import native; print(native.instruction_set())", LINTRA_NATIVE=name)
    if name in native.instruction_sets():
        assert done.stdout.strip() == name
    else:
        assert "LINTRA_NATIVE" in done.stderr
        assert repr(name) in done.stderr


def test_environment_variable_switches_off():
    code = "from lintra import native; print(native.available(), native.why_not())"
    done = run_python(code, LINTRA_NATIVE="off")
    assert done.stdout.strip() == "False LINTRA_NATIVE=off"


def test_environment_variable_refused():
    done = run_python("from lintra import native; native.available()", LINTRA_NATIVE="sse9")
    assert "ValueError: LINTRA_NATIVE must be one of" in done.stderr
    assert "'sse9'" in done.stderr


def test_a_library_that_cannot_serve(tmp_path, monkeypatch):
    """A missing or broken library, or one built from other sources, gives a reason instead of a crash."""
    monkeypatch.setattr(native, "ABI", 999)
    assert "interface version" in native._Native().reason
    monkeypatch.setattr(native, "_folders", lambda: [tmp_path])
    assert "not built" in native._Native().reason
    (tmp_path / "liblintra.so").write_bytes(b"not a library")
    assert "does not load" in native._Native().reason


def test_no_memory():
    """If the system refuses working memory, an error is raised; nothing crashes."""
    loaded = native._native()
    settings = (loaded.chosen, 1, native.DTYPES[torch.float32], True, True, 0)
    b, t, s, h, g, f, e = 1, 16, 16, 1, 1, 2**50, 1
    call = kernel._FORWARD.pack(*settings, b, t, s, h, g, f, e, 0.0, *[0] * 32)
    with pytest.raises(MemoryError):
        native.check(loaded.library.lintra_forward(call))


def test_use():
    name = native.instruction_set()
    with native.use("baseline" if "baseline" in native.instruction_sets() else name):
        assert native.available()
    with native.use("off"):
        assert not native.available()
        assert native.why_not()
        with pytest.raises(RuntimeError, match="not available"):
            kernel.forward(*(torch.ones(1, 1, 1, 1) for _ in range(3)))
    assert native.instruction_set() == name
    with pytest.raises(ValueError, match="LINTRA_NATIVE must be one of"), native.use("mmx"):
        pass

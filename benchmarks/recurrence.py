"""`python -m benchmarks recurrence`: the delta rule, decays of every feature, selective scans, beside others.

All are in one interleaved run: PyTorch's fused softmax; what transformers computes without a GPU
(`pip install transformers`) and onnxruntime's com.microsoft.LinearAttention
(`pip install 'lintra[onnx]'`), if they are installed; and a copy of the state, which bounds the decoding of
one token.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lintra import native, ops
from lintra.bench import calls, training_step
from lintra.bench.memory import peak_of
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.native import recurrence, scan
from lintra.ops import LinearState

MEASURES = (
    "lintra/native",
    "lintra/ops/linear_attention",
    "lintra/ops/selective_scan",
    "lintra/ops/conv1d.py",
)
Call = Callable[[], object]
Work = dict[str, Call]
RULES: dict[str, tuple[bool, str | None]] = {  # whether there is a beta, and the kind of decay
    "gated": (False, "feature"),
    "delta": (True, None),
    "gated delta": (True, "head"),
    "KDA": (True, "feature"),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    tokens: int = 4096
    heads: int = 8
    dim: int = 64
    lengths: tuple[int, ...] = (2048, 8192, 32768, 65536)
    longest: int = 65536  # for which memory is measured
    wide_tokens: int = 2048  # for heads as wide as those of current models
    wide_heads: int = 16
    wide_dim: int = 128
    batch: int = 32  # sequences that are decoded together
    scan_tokens: int = 1024  # for a selective scan as wide as mamba-130m
    channels: int = 1536
    states: int = 16
    rounds: int = 11
    at_least: float = 0.1  # seconds per turn


QUICK = Sizes(
    tokens=64,
    heads=2,
    dim=16,
    lengths=(64, 128),
    longest=128,
    wide_tokens=64,
    wide_heads=2,
    wide_dim=16,
    batch=2,
    scan_tokens=16,
    channels=8,
    states=4,
    rounds=2,
    at_least=0,
)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings."""
    narrow = (sizes.tokens, sizes.heads, sizes.dim)
    wide = (sizes.wide_tokens, sizes.wide_heads, sizes.wide_dim)
    contestants: Work = {"matmul": training_step.matmul()}
    contestants |= _both("softmax", calls.fused, calls.draw(1, *narrow))
    for rule in RULES:
        for tokens in dict.fromkeys((sizes.tokens, *sizes.lengths)):
            inputs = draw(rule, tokens, sizes.heads, sizes.dim)
            contestants |= _both(f"{rule}, {tokens} tokens", attend(rule), inputs)
    shorter = (sizes.wide_tokens // 2, *wide[1:])
    for rule, shape in (("gated delta", wide), ("KDA", shorter)):
        inputs = draw(rule, *shape)
        contestants |= _both(f"{rule}, wide", attend(rule), inputs)
        for name, other in _others(rule, shape).items():
            contestants |= _both(f"{rule}, wide, {name}", other, inputs)
        if rule == "gated delta":
            contestants |= _onnx(inputs)
    contestants |= _decoding(sizes) | _scans(sizes) | _convolutions(sizes)
    timings = interleaved(
        contestants, rounds=sizes.rounds, at_least=sizes.at_least, settle=1.0, progress=progress
    )
    return _rows({name: each.median for name, each in timings.items()}, sizes), timings


def draw(
    rule: str,
    tokens: int,
    heads: int,
    dim: int,
    batch: int = 1,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """Return q, unit keys, v and, as the rule needs them, log_decay and beta in float32, with gradients
    enabled."""
    delta, decay = RULES[rule]
    q, k, v = calls.draw(batch, tokens, heads, dim, device, dtype)
    k = F.normalize(k.detach(), dim=-1).requires_grad_()
    inputs = [q, k, v]
    if decay:
        shape = (batch, tokens, heads, *([dim] if decay == "feature" else []))
        inputs.append(-0.1 * torch.rand(shape, device=device))
    if delta:
        inputs.append(torch.rand(batch, tokens, heads, device=device))
    return tuple(x.detach().requires_grad_() for x in inputs)


def attend(rule: str, **more: Any) -> Callable[..., Tensor]:
    """Return the rule as a function of what `draw` returns, with `more` options."""
    delta, decay = RULES[rule]

    def attended(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        options: dict[str, Any] = {"log_decay": others[0] if decay else None}
        options |= {"beta": others[-1] if delta else None}
        return ops.linear_attention(q, k, v, **options, **more, normalize=False, scale=q.shape[-1] ** -0.5)[0]

    return attended


def _both(name: str, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Work:
    forward, both = calls.each_pass(function, inputs)
    return {f"{name}, forward": forward, f"{name}, forward + backward": both}


def fallback(family: str, name: str) -> Callable[..., Any]:
    """Return the function that a family of transformers uses where no package has a kernel for it."""
    return inspect.unwrap(getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name))


def _others(rule: str, shape: tuple[int, int, int]) -> dict[str, Callable[..., Tensor]]:
    """Return what transformers computes without a GPU; empty if it is not installed."""
    if find_spec("transformers") is None:
        return {}
    names = {
        "gated delta": ("qwen3_next", "torch_chunk_gated_delta_rule"),
        "KDA": ("kimi_linear", "chunk_kimi_delta_attention"),
    }
    function = fallback(*names[rule])
    return {"transformers": lambda q, k, v, log_decay, beta: function(q, k, v, g=log_decay, beta=beta)[0]}


def _onnx(inputs: tuple[Tensor, ...]) -> Work:
    """The gated delta rule as one node of the operator that onnxruntime has for it."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        return {}
    import onnxruntime
    from onnx import TensorProto, helper

    _, tokens, heads, dim = inputs[0].shape
    widths = {"q": heads * dim, "k": heads * dim, "v": heads * dim, "decay": heads, "beta": heads}
    shapes = {name: (1, tokens, width) for name, width in widths.items()}
    state = (1, heads, dim, dim)
    node = helper.make_node(
        "LinearAttention",
        ["q", "k", "v", "state", "decay", "beta"],
        ["y", "after"],
        domain="com.microsoft",
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule="gated_delta",
    )

    def values(named: dict[str, tuple[int, ...]]) -> list[Any]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, x) for name, x in named.items()]

    graph = helper.make_graph(
        [node], "recurrence", values(shapes | {"state": state}), values({"y": shapes["v"], "after": state})
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # others run meanwhile
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    rows = (x.detach().reshape(shapes[name]).numpy() for name, x in zip(shapes, inputs, strict=True))
    feed = dict(zip(shapes, rows, strict=True)) | {"state": np.zeros(state, np.float32)}
    y = torch.from_numpy(session.run(["y"], feed)[0]).reshape(inputs[2].shape)
    torch.testing.assert_close(y, attend("gated delta")(*inputs).detach(), rtol=1e-3, atol=1e-3)
    return {"gated delta, wide, onnxruntime, forward": lambda: session.run(["y", "after"], feed)}


def _decoding(sizes: Sizes) -> Work:
    """One token after a state, into a new state and in place."""
    drawn = draw("gated delta", 1, sizes.wide_heads, sizes.wide_dim, sizes.batch)
    q, k, v, log_decay, beta = (x.detach() for x in drawn)
    kv = torch.randn(sizes.batch, sizes.wide_heads, sizes.wide_dim, sizes.wide_dim)
    state, other = LinearState.of(kv), torch.empty_like(kv)
    options: dict[str, Any] = {"log_decay": log_decay, "beta": beta, "normalize": False}
    step = (q, k, v, log_decay, beta)
    work: Work = {
        "decode": lambda: ops.linear_attention(q, k, v, state=state, **options),
        "copy of the states": lambda: other.copy_(kv),
    }
    if native.available():
        kept = kv.clone()
        work["decode in place"] = lambda: recurrence.forward(*step, kept, None, None, 1.0, False, out=kept)
    if find_spec("transformers") is not None:
        function = fallback("qwen3_next", "torch_recurrent_gated_delta_rule")
        given = {"g": log_decay, "beta": beta, "initial_state": kv, "output_final_state": True}
        work["decode, transformers"] = lambda: function(q, k, v, **given)
    return {name: torch.inference_mode()(call) for name, call in work.items()}


def draw_scan(tokens: int, channels: int, states: int, batch: int = 1) -> tuple[Tensor, ...]:
    """Return u, dt, A, B, C, D, z and dt_bias as in an untrained Mamba, with gradients enabled."""
    u, dt, z = (torch.randn(batch, tokens, channels) for _ in range(3))
    B, C = (torch.randn(batch, tokens, states) for _ in range(2))
    A = -torch.arange(1.0, states + 1).repeat(channels, 1)
    bias = torch.linspace(-7, -2, channels)  # steps between 1e-3 and 1e-1
    inputs = (u, 0.1 * dt, A, B, C, torch.ones(channels), z, bias)
    return tuple(x.requires_grad_() for x in inputs)


def scanned(*inputs: Tensor) -> Tensor:
    """Return y of what `draw_scan` returns."""
    return ops.selective_scan(*inputs, dt_softplus=True)[0]


def _scans(sizes: Sizes) -> Work:
    """Forward, backward and one token in place; without the backward of transformers, which takes minutes."""
    inputs = draw_scan(sizes.scan_tokens, sizes.channels, sizes.states)
    work = _both("scan", scanned, inputs)
    u, dt, A, B, C, D, z, bias = (x.detach() for x in draw_scan(1, sizes.channels, sizes.states, sizes.batch))
    state = torch.zeros(sizes.batch, sizes.channels, sizes.states)
    kept, other = state.clone(), state.clone()
    options = (True, None, None, False)
    if native.available():
        step = (u, dt, A, B[:, :, None], C[:, :, None], D, z, bias)
        work["scan, decode in place"] = lambda: scan.forward(*step, kept, *options, out=kept)
    if find_spec("transformers") is None:
        return work
    scan_all, update = (
        fallback("mamba", name) for name in ("mamba_selective_scan", "mamba_selective_state_update")
    )
    first, rates, A_, B_, C_, D_, gate, bias_ = (x.detach() for x in inputs)
    columns = [x.mT.contiguous() for x in (first, rates, gate)]
    weights = {"D": D_, "z": columns[2], "delta_bias": bias_, "delta_softplus": True}
    loop = (*columns[:2], A_, B_.mT, C_.mT)
    given = {"D": D, "z": z[:, 0], "dt_bias": bias, "dt_softplus": True}
    one = (u[:, 0], dt[:, 0], A, B[:, 0], C[:, 0])
    others = {
        "scan, transformers, forward": lambda: scan_all(*loop, **weights),
        "scan, transformers, decode": lambda: update(other, *one, **given),
    }
    found = others["scan, transformers, forward"]().mT
    torch.testing.assert_close(found, scanned(*inputs).detach(), rtol=1e-3, atol=1e-3)
    return work | {name: torch.inference_mode()(call) for name, call in others.items()}


def _convolutions(sizes: Sizes) -> Work:
    """The short convolution with SiLU, and the same by PyTorch's operators, on rows as a network has them."""
    x = torch.randn(1, sizes.tokens, sizes.channels, requires_grad=True)
    weight = torch.randn(sizes.channels, 4, requires_grad=True)
    inputs = (x, weight, torch.zeros(sizes.channels, requires_grad=True))

    def padded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        line = F.pad(x.mT, (weight.shape[1] - 1, 0))
        return F.silu(F.conv1d(line, weight[:, None], bias, groups=x.shape[2])).mT

    def ours(*inputs: Tensor) -> Tensor:
        return ops.causal_conv1d(*inputs, activation="silu")[0]

    torch.testing.assert_close(ours(*inputs), padded(*inputs), rtol=1e-3, atol=1e-3)
    return _both("convolution", ours, inputs) | _both("convolution, PyTorch", padded, inputs)


def _rows(seconds: dict[str, float], sizes: Sizes) -> list[Row]:
    both, fallback = "forward + backward", "transformers"

    def ratio(what: str, slow: str, fast: str, at_least: float | None = None) -> list[Row]:
        if slow not in seconds or fast not in seconds:
            return []
        return [Row(what, seconds[slow] / seconds[fast], "x", at_least)]

    rate = training_step.MATMUL_OPERATIONS / seconds["matmul"]
    rows = [Row(f"matmul {training_step.MATMUL}^3 float32", rate / 1e9, "GFLOP/s")]
    for rule, passed, least in (
        ("gated delta", "forward", 5),
        ("gated delta", both, 4),
        ("KDA", "forward", 20),
    ):
        ours = f"{rule}, wide, {passed}"
        rows.append(Row(f"{rule}, {sizes.wide_dim} wide, {passed}", 1e3 * seconds[ours], "ms"))
        slow = f"{rule}, wide, {fallback}, {passed}"
        rows += ratio(f"{rule}, {sizes.wide_dim} wide, {passed}: {fallback} / lintra", slow, ours, least)
    slow, ours = "gated delta, wide, onnxruntime, forward", "gated delta, wide, forward"
    rows += ratio(f"gated delta, {sizes.wide_dim} wide, forward: onnxruntime / lintra", slow, ours, 1)
    for rule in RULES:
        ours = f"{rule}, {sizes.tokens} tokens, {both}"
        rows.append(Row(f"{rule}, {both}", 1e3 * seconds[ours], "ms"))
        least = 8 if rule in ("gated", "delta") else None
        rows += ratio(f"{rule}, {both}: SDPA softmax / lintra", f"softmax, {both}", ours, least)
    for rule in RULES:
        costs = [seconds[f"{rule}, {n} tokens, forward"] / n for n in sizes.lengths]
        spread = 100 * (max(costs) / min(costs) - 1)
        rows.append(Row(f"{rule}, forward: spread of the cost per token", spread, "%", at_most=10))
    for rule in RULES:
        memory = _memory(rule, sizes) / 1e9
        what = f"{rule}: memory above the inputs, {sizes.longest:,} tokens"
        rows.append(Row(what, memory, "GB", at_most=1))
    rows.append(Row(f"decode, {sizes.batch} sequences", 1e3 * seconds["decode"], "ms"))
    rows += ratio(f"decode: {fallback} / lintra", f"decode, {fallback}", "decode")
    rows += ratio(f"decode in place: {fallback} / lintra", f"decode, {fallback}", "decode in place", 9)
    if "decode in place" in seconds:
        share = 100 * seconds["copy of the states"] / seconds["decode in place"]
        rows.append(Row("decode in place: of the rate of a copy", share, "%", 50))
    for passed in ("forward", both):
        ours = f"convolution, {passed}"
        rows.append(Row(ours, 1e3 * seconds[ours], "ms"))
        rows += ratio(f"{ours}: PyTorch / lintra", f"convolution, PyTorch, {passed}", ours)
    for passed in ("forward", both):
        rows.append(Row(f"selective scan, {passed}", 1e3 * seconds[f"scan, {passed}"], "ms"))
    slow = f"scan, {fallback}, forward"
    rows += ratio(f"selective scan, forward: {fallback} / lintra", slow, "scan, forward", 10)
    if "scan, decode in place" in seconds:
        step = seconds["scan, decode in place"]
        rows.append(Row(f"selective scan, decode in place, {sizes.batch} sequences", 1e3 * step, "ms"))
    slow, ours = f"scan, {fallback}, decode", "scan, decode in place"
    rows += ratio(f"selective scan, decode in place: {fallback} / lintra", slow, ours)
    rows.append(Row("threads", torch.get_num_threads(), ""))
    return rows


_MEMORY = """
import torch
from benchmarks.recurrence import attend, draw

inputs = draw({rule!r}, {longest}, {heads}, {dim})
forget_peak()  # what making them took
before = peak()
attend({rule!r})(*inputs).sum().backward()
print(peak() - before)
"""


def _memory(rule: str, sizes: Sizes) -> int:
    """Bytes beyond the inputs that forward + backward of the longest sequence takes."""
    return peak_of(_MEMORY.format(rule=rule, longest=sizes.longest, heads=sizes.heads, dim=sizes.dim))


def details(sizes: Sizes) -> dict[str, Any]:
    """Return the versions of the other libraries that are installed, for the report."""
    found = {}
    for name in ("transformers", "onnxruntime"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {"peers": found}

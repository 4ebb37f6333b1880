"""`lintra bench attention`: the linear sum and what surrounds it, against what the hardware can do.

All times of one table come from one interleaved run, so that their ratios hold on a busy machine too.
Operations of linear attention with features of width d and values of width e: 4 d e a token and head
forward, 14 d e forward and backward; of a training step 6 x parameters x tokens.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lintra import native
from lintra.attention import linear
from lintra.bench import calls, training_step
from lintra.bench.memory import peak_of
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved

MEASURES = ("lintra/native", "lintra/ops/linear_attention", "lintra/nn", "lintra/models/decoder.py")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amount of work that is timed."""

    tokens: int = 4096
    heads: int = 8
    dim: int = 64
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    longest: int = 65536  # of which the memory is measured
    step: training_step.Sizes = field(default_factory=training_step.Sizes)
    rounds: int = 15
    at_least: float = 0.1  # seconds of a turn: short calls are repeated and averaged


QUICK = Sizes(
    tokens=256,
    lengths=(128, 256),
    longest=512,
    heads=2,
    dim=16,
    step=training_step.QUICK,
    rounds=2,
    at_least=0,
)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Times everything -> the table's rows and the single timings."""
    impls = ["torch"] if native.why_not() else ["native", "torch"]
    bf16 = training_step.bf16_is_fast()
    contestants: dict[str, Callable[[], object]] = {"matmul": training_step.matmul(), **_imports()}
    for impl in impls:
        contestants |= _passes(impl, partial(calls.linear, impl=impl), sizes, sizes.tokens)
        contestants[f"{impl} training step"] = _step(impl, sizes, bf16=False)
        if bf16:
            contestants[f"{impl} training step, bf16"] = _step(impl, sizes, bf16=True)
    contestants |= _passes("softmax", calls.fused, sizes, sizes.tokens)
    for length in sizes.lengths:
        name = f"{impls[0]} {length}"
        contestants |= _passes(name, partial(calls.linear, impl=impls[0]), sizes, length)
    timings = interleaved(
        contestants, rounds=sizes.rounds, at_least=sizes.at_least, settle=1.0, progress=progress
    )
    return _rows(timings, sizes, impls[0]), timings


def _passes(name: str, attend: calls.Attend, sizes: Sizes, tokens: int) -> dict[str, calls.Call]:
    forward, both = calls.each_pass(attend, calls.draw(1, tokens, sizes.heads, sizes.dim))
    return {f"{name} forward": forward, f"{name} forward + backward": both}


def _step(impl: str, sizes: Sizes, *, bf16: bool) -> Callable[[], object]:
    mechanism = linear.Config(impl=impl)  # pyright: ignore[reportArgumentType]
    return training_step.step(training_step.model(mechanism, sizes.step), sizes.step, bf16=bf16)


def _imports() -> dict[str, Callable[[], object]]:
    def imported(module: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    return {"import torch": imported("torch"), "import lintra": imported("torch, lintra")}


def _rows(timings: dict[str, Timing], sizes: Sizes, impl: str) -> list[Row]:
    seconds = {name: timing.median for name, timing in timings.items()}
    rate = training_step.MATMUL_OPERATIONS / seconds["matmul"]
    unit = sizes.tokens * sizes.heads * sizes.dim**2
    both = "forward + backward"
    of_matmul = "% of matmul"

    def percent(operations: float, name: str) -> float:
        return 100 * operations / seconds[name] / rate

    def ratio(slow: str, fast: str) -> float:
        return seconds[slow] / seconds[fast]

    rows = [Row(f"matmul {training_step.MATMUL}^3 float32", rate / 1e9, "GFLOP/s")]
    if impl == "native":
        rows += [
            Row("forward: chunked PyTorch / native", ratio("torch forward", "native forward"), "x", 5),
            Row(f"{both}: chunked PyTorch / native", ratio(f"torch {both}", f"native {both}"), "x", 4),
        ]
    rows += [
        Row(f"forward, {impl}", percent(4 * unit, f"{impl} forward"), of_matmul, 50),
        Row(f"{both}, {impl}", percent(14 * unit, f"{impl} {both}"), of_matmul),
        Row(f"{both}: SDPA softmax / {impl}", ratio(f"softmax {both}", f"{impl} {both}"), "x", 13),
        Row(f"forward: SDPA softmax / {impl}", ratio("softmax forward", f"{impl} forward"), "x"),
    ]
    for what in ("forward", both):
        costs = [seconds[f"{impl} {length} {what}"] / length for length in sizes.lengths]
        spread = 100 * (max(costs) / min(costs) - 1)
        rows.append(Row(f"spread of the cost per token, {what}", spread, "%", at_most=15))
    name = f"{impl} training step"
    config = training_step.model(linear.Config(), sizes.step)
    operations = training_step.operations(config, sizes.step)
    rows.append(Row("training step", percent(operations, name), of_matmul, 65))
    if impl == "native":
        slow = "torch training step"
        rows.append(Row("training step: chunked PyTorch / native", ratio(slow, name), "x", 1.5))
        if f"{name}, bf16" in seconds:
            rows += [
                Row("the same in bf16 autocast", ratio(f"{slow}, bf16", f"{name}, bf16"), "x"),
                Row("training step: float32 / bf16, native", ratio(name, f"{name}, bf16"), "x"),
            ]
    memory = _memory(impl, sizes)
    rows.append(Row(f"memory above the inputs, {sizes.longest:,} tokens", memory / 1e9, "GB", at_most=1))
    imported = seconds["import lintra"] - seconds["import torch"]
    return [*rows, Row("import lintra beyond torch", imported, "s", at_most=0.3)]


_MEMORY = """
import torch
from lintra import ops

q, k, v = (torch.randn(1, {longest}, {heads}, {dim}).requires_grad_() for _ in range(3))
before = peak()
y, _ = ops.linear_attention(q, k, v, feature_map="elu+1", impl={impl!r})
y.sum().backward()
print(peak() - before)
"""


def _memory(impl: str, sizes: Sizes) -> int:
    """Bytes by which the peak of a fresh process grows during one forward + backward."""
    return peak_of(_MEMORY.format(longest=sizes.longest, heads=sizes.heads, dim=sizes.dim, impl=impl))

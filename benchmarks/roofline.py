"""`python -m benchmarks roofline`: what bounds the linear sum, and how near to that it runs.

A computation that does n operations per byte that it must move can run at the lower of two rates: that of
the arithmetic, here of a matrix product in float32, and n times that of the memory, here of a copy (Williams
et al.  2009, doi:10.1145/1498765.1498785). The operations of the recurrence (for softmax, of the scores
that are read) and the bytes of inputs and outputs are counted once each, not what an implementation does
besides. A tensor that stays in a cache may be faster than the line of the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lintra import ops, pictures
from lintra.bench import training_step
from lintra.bench.calls import draw, each_pass, fused, linear
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.ops import LinearState

MEASURES = ("lintra/native", "lintra/ops/linear_attention")
FLOAT = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    tokens: int = 4096
    heads: int = 8
    dim: int = 64
    layers: int = 8  # layers whose states one token after another goes through
    batches: tuple[int, ...] = (1, 16, 128)  # sequences that are decoded together
    copied: int = 2**26  # numbers, more than a cache holds
    rounds: int = 15
    at_least: float = 0.1  # seconds per turn


QUICK = Sizes(tokens=64, heads=2, dim=16, layers=2, batches=(1, 2), copied=2**12, rounds=2, at_least=0)


@dataclass(frozen=True)
class Work:
    """One computation, its operations and the bytes that it moves."""

    call: Callable[[], object]
    operations: float
    bytes: float
    seconds: float = 0.0  # set once it is measured

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.bytes

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.operations / self.seconds


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings."""
    works = {
        **_ceilings(sizes),
        **_passes(sizes),
        **{f"decode, {b}": _decode(sizes, b) for b in sizes.batches},
    }
    timings = interleaved(
        {name: work.call for name, work in works.items()},
        rounds=sizes.rounds,
        at_least=sizes.at_least,
        progress=progress,
    )
    works = {name: replace(work, seconds=timings[name].median) for name, work in works.items()}
    arithmetic, copied = works.pop("matmul"), works.pop("copy")
    memory = copied.bytes / copied.seconds
    rows = [Row("matmul", arithmetic.rate / 1e9, "GFLOP/s"), Row("copy", memory / 1e9, "GB/s")]
    for name, work in works.items():
        bound = min(arithmetic.rate, memory * work.intensity)
        rows.append(Row(f"{name}: intensity", work.intensity, "FLOP/B"))
        rows.append(Row(f"{name}: rate", work.rate / 1e9, "GFLOP/s"))
        rows.append(Row(f"{name}: of its bound", 100 * work.rate / bound, "%"))
    return rows, timings


def picture(path: Path, rows: list[Row], timings: dict[str, Timing], sizes: Sizes) -> list[Path]:
    """Draw the two bounds, and each computation below them."""
    figures = {row.what: row.figure for row in rows}
    names = [what.removesuffix(": rate") for what in figures if what.endswith(": rate")]
    pictures.roofline(
        path,
        {name: (figures[f"{name}: intensity"], figures[f"{name}: rate"]) for name in names},
        arithmetic=figures["matmul"],
        memory=figures["copy"],
        title="what bounds linear attention on this processor",
    )
    return [path]


def _ceilings(sizes: Sizes) -> dict[str, Work]:
    source, target = torch.randn(sizes.copied), torch.empty(sizes.copied)
    return {
        "matmul": Work(
            training_step.matmul(), training_step.MATMUL_OPERATIONS, 3 * FLOAT * training_step.MATMUL**2
        ),
        "copy": Work(lambda: target.copy_(source), 0, 2 * FLOAT * sizes.copied),
    }


def _passes(sizes: Sizes) -> dict[str, Work]:
    """A whole causal sequence. The forward moves q, k, v and y; the backward reads these and dy, and writes
    dq, dk and dv."""
    one = sizes.tokens * sizes.heads * sizes.dim  # numbers in a tensor
    forward, both = 4 * FLOAT * one, 12 * FLOAT * one
    scores = one * (sizes.tokens + 1) / 2  # multiplications in one product with all of the past
    inputs = draw(1, sizes.tokens, sizes.heads, sizes.dim)
    works = {}
    for name, attend, products in (("", linear, one * sizes.dim), ("softmax, ", fused, scores)):
        calls = each_pass(attend, inputs)
        works[f"{name}forward"] = Work(calls[0], 4 * products, forward)
        works[f"{name}forward + backward"] = Work(calls[1], 14 * products, both)
    return works


def _decode(sizes: Sizes, batch: int) -> Work:
    """One more token of `batch` sequences through the sums of all layers: every state read and written."""
    q, k, v = torch.randn(3, batch, 1, sizes.heads, sizes.dim)
    empty = (batch, sizes.heads, sizes.dim, sizes.dim)
    states = [LinearState.empty(*empty, device=None, dtype=torch.float32) for _ in range(sizes.layers)]
    states = [LinearState(kv + 1, z + 1) for kv, z in states]  # zeros might all be one page of memory

    def call() -> None:
        for layer, state in enumerate(states):
            _, states[layer] = ops.linear_attention(q, k, v, state=state, feature_map="elu+1")

    numbers = sizes.layers * batch * sizes.heads * sizes.dim * (sizes.dim + 1)
    return Work(torch.no_grad()(call), 4 * numbers, 2 * FLOAT * numbers)

"""`lintra bench mechanisms`: forward and backward of every mechanism, against softmax and against its length.

Each mechanism as its `Config` has it by default, causal where it can be and bidirectional where it can be, on
the same random queries, keys and values. All times of one table come from one interleaved run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean

from lintra import attention, pictures
from lintra.bench import calls
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved

MEASURES = ("lintra/native", "lintra/ops", "lintra/attention")
CAUSAL = {True: "causal", False: "bidirectional"}
QUADRATIC = "softmax"  # the yardstick; through PyTorch's own scaled_dot_product_attention
SHOWN = ("linear", QUADRATIC)  # before the others, in the picture


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amount of work that is timed."""

    tokens: int = 4096  # at which a mechanism is compared with softmax
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
    heads: int = 8
    dim: int = 64
    rounds: int = 9
    names: tuple[str, ...] = ()  # of the mechanisms; none: all


QUICK = Sizes(tokens=128, lengths=(64, 128), heads=2, dim=16, rounds=2)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Times everything -> the table's rows and the single timings, named "NAME MODE TOKENS"."""
    contestants: dict[str, Callable[[], object]] = {}
    cases = [(name, causal) for name in sizes.names or attention.names() for causal in calls.modes(name)]
    for causal in (True, False):
        # Beyond twice the length at which it is compared it would take most of the time of the whole table.
        for length in (n for n in sizes.lengths if n <= 2 * sizes.tokens and (causal or n == sizes.tokens)):
            exact = partial(calls.fused, causal=causal)
            contestants[f"{QUADRATIC} {CAUSAL[causal]} {length}"] = calls.passes(exact, _draw(sizes, length))
    for name, causal in cases:
        if name == QUADRATIC:
            continue
        lengths = sizes.lengths if causal is calls.modes(name)[0] else (sizes.tokens,)
        for length in lengths:
            contestants[f"{name} {CAUSAL[causal]} {length}"] = calls.mechanism(
                name, _draw(sizes, length), causal=causal
            )
    timings = interleaved(contestants, rounds=sizes.rounds, at_least=0, progress=progress)
    return _rows({name: timing.median for name, timing in timings.items()}, sizes), timings


def picture(path: Path, rows: list[Row], timings: dict[str, Timing], sizes: Sizes) -> list[Path]:
    """Time against length, a line for each mechanism; linear and softmax in every panel."""
    lines = {name: {n: 1e3 * s for n, s in line.items()} for name, line in _lines(timings, sizes).items()}
    before = {name: lines.pop(name) for name in SHOWN if name in lines}
    pictures.logarithmic(
        path,
        before,
        others=pictures.families(lines),
        x="tokens",
        y="forward + backward (ms)",
        title=f"{sizes.heads} heads of {sizes.dim}, one sequence",
    )
    return [path]


def _lines(timings: dict[str, Timing], sizes: Sizes) -> dict[str, dict[int, float]]:
    lines: dict[str, dict[int, float]] = {}
    for name, timing in timings.items():
        what, mode, tokens = name.split()
        if mode == CAUSAL[calls.modes(what)[0]]:
            label = f"{what}, {mode}" if mode != CAUSAL[True] else what
            lines.setdefault(label, {})[int(tokens)] = timing.median
    return lines


def _rows(seconds: dict[str, float], sizes: Sizes) -> list[Row]:
    rows = []
    for name, time in seconds.items():
        what, mode, tokens = name.split()
        if int(tokens) == sizes.tokens:
            rows.append(Row(f"{what}, {mode}, {tokens} tokens", 1e3 * time, "ms"))
            if what != QUADRATIC:
                ratio = seconds[f"{QUADRATIC} {mode} {tokens}"] / time
                rows.append(Row(f"{what}, {mode}: SDPA softmax / it", ratio, "x", at_least=1))
    for name in sizes.names or attention.names():
        mode = CAUSAL[calls.modes(name)[0]]
        times = [seconds[f"{name} {mode} {n}"] for n in sizes.lengths if f"{name} {mode} {n}" in seconds]
        if len(times) > 1 and name != QUADRATIC:
            each = [after / before for before, after in pairwise(times)]
            rows.append(
                Row(f"{name}, {mode}: twice the length, mean", geometric_mean(each), "x", at_most=2.3)
            )
            rows.append(Row(f"{name}, {mode}: twice the length, most", max(each), "x", at_most=2.3))
    return rows


def _draw(sizes: Sizes, length: int) -> calls.Inputs:
    return calls.draw(1, length, sizes.heads, sizes.dim)

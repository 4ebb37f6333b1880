"""`python -m benchmarks regression --against CHECKOUT`: the speed of everything, beside an older lintra.

Measured are forward + backward of every mechanism, networks that read dense, padded and packed batches, one
token after a state, sampling, and the drop-in for fast-transformers. Each runs in this checkout and in the
older one, which has its own .venv, in turns and in processes of their own.
"""

import math
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.checkout import OLD, Options, checkouts, serving
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved

__all__ = ["MEASURES", "QUICK", "Options", "Sizes", "run"]
MEASURES = ("lintra",)
WORKLOADS = Path(__file__).with_name("workloads.py")
AT_LEAST = 0.97  # of the older version's speed


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    against: str | None = None
    tokens: int = 1024
    rounds: int = 9
    seconds: float = 0.05  # per turn, at least


QUICK = Sizes(tokens=64, rounds=2, seconds=0.0)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the timings of the turns."""
    if sizes.against is None:
        raise ValueError("against must name a checkout of an older lintra, got None")
    with ExitStack() as stack:
        ask = {
            name: stack.enter_context(serving(*tree, WORKLOADS, sizes.tokens))
            for name, tree in checkouts(sizes.against).items()
        }
        known = [each("names") for each in ask.values()]
        names = [name for name in known[0] if all(name in each for each in known)]
        contestants, calls = {}, {}
        for name in names:
            for each in ask.values():
                each(f"run 1 {name}")
            taken = max(each(f"run 1 {name}") for each in ask.values())
            calls[name] = max(1, math.ceil(sizes.seconds / taken))
            for tree, each in ask.items():
                contestants[name + tree] = partial(each, f"run {calls[name]} {name}")
        timings = interleaved(contestants, rounds=sizes.rounds, at_least=0, progress=progress)
    rows, ratios = [], []
    for name in names:
        old, new = timings[name + OLD].median, timings[name].median
        ratios.append(old / new)
        rows.append(Row(f"{name}: before / now", ratios[-1], "x", at_least=AT_LEAST))
        rows.append(Row(name, 1e3 * new / calls[name], "ms"))
    rows.append(Row("geometric mean of all: before / now", statistics.geometric_mean(ratios), "x"))
    return rows, timings

"""`python -m benchmarks busy`: what is left of the speed while other processes use the same cores.

Forward + backward runs on all threads beside no busy process, one, as many as there are cores, and twice
as many. Speeds are relative to one thread alone on an idle machine. All are in one interleaved run; the
processes sleep while it is not their turn.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.recurrence import attend
from benchmarks.recurrence import draw as draw_recurrence
from lintra.bench import calls
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved

MEASURES = ("lintra/native",)
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    tokens: int = 4096
    heads: int = 8
    dim: int = 64
    calls: int = 8  # of a turn: long enough for the system to distribute the cores
    rounds: int = 9


QUICK = Sizes(tokens=64, heads=2, dim=16, calls=1, rounds=2)


class Spinners:
    """Processes that spin at full speed, or sleep."""

    def __init__(self, count: int):
        self.processes = [
            subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)
        ]
        self._signal(count, signal.SIGSTOP)

    def _signal(self, count: int, what: signal.Signals) -> None:
        for process in self.processes[:count]:
            os.kill(process.pid, what)

    @contextmanager
    def awake(self, count: int) -> Iterator[None]:
        """Run the body while so many processes are busy."""
        self._signal(count, signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(count, signal.SIGSTOP)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    busy = list(dict.fromkeys((0, 1, cores, 2 * cores)))
    work = {
        "linear": calls.passes(calls.linear, calls.draw(1, sizes.tokens, sizes.heads, sizes.dim)),
        "gated delta": calls.passes(
            attend("gated delta"), draw_recurrence("gated delta", sizes.tokens, sizes.heads, sizes.dim)
        ),
        "SDPA softmax": calls.passes(calls.fused, calls.draw(1, sizes.tokens, sizes.heads, sizes.dim)),
    }
    spinners = Spinners(max(busy))
    try:
        contestants = {}
        for name, call in work.items():
            contestants[f"{name}, one thread"] = _turn(call, sizes.calls, 1, threads, spinners, 0)
            for count in busy:
                contestants[f"{name}, {count} busy"] = _turn(
                    call, sizes.calls, threads, threads, spinners, count
                )
        timings = interleaved(contestants, rounds=sizes.rounds, at_least=0, settle=0.0, progress=progress)
    finally:
        torch.set_num_threads(threads)
        spinners.end()
    rows = []
    for name in work:
        alone = timings[f"{name}, one thread"].median
        for count in busy:
            share = alone / timings[f"{name}, {count} busy"].median
            least = 0.5 if count and name != "SDPA softmax" else None
            beside = f"beside {count} busy process{'' if count == 1 else 'es'}"
            rows.append(Row(f"{name}, {threads} threads {beside}", share, "of one thread", least))
    rows.append(Row("cores", cores, ""))
    return rows, timings


def _turn(call: Call, times: int, threads: int, usual: int, spinners: Spinners, busy: int) -> Call:
    """Several calls with so many threads beside so many busy processes."""

    def turn() -> None:
        torch.set_num_threads(threads)
        with spinners.awake(busy):
            for _ in range(times):
                call()
        torch.set_num_threads(usual)

    return turn

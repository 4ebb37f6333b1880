"""`python -m benchmarks scale`: training steps of 1, 2 and 4 processes, beside what the cost model predicts.

A step is a forward, a backward, the sum of the gradients and AdamW's update. A process has one thread, and
processes communicate through gloo. The model (`lintra.bench.step_time`) is given what one process alone takes
for a whole batch, half of it and a quarter, and what messages and collectives take that carry nothing of a
network. It is not given any step of several processes. On few cores the processes share them.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.links import COLLECTIVES, measured
from benchmarks.loads import Load, Training
from benchmarks.ranks import Ranks, started
from lintra.bench.machines import Link, Links, Machine
from lintra.bench.reports import Row, by_name
from lintra.bench.step_plan import Plan
from lintra.bench.step_time import Step
from lintra.bench.step_work import Bytes, Work
from lintra.bench.timing import Timing, interleaved
from lintra.nn import MLP

MEASURES = (
    "lintra/bench",
    "lintra/distributed.py",
    "lintra/nn",
    "lintra/ops/linear_attention",
    "lintra/models",
)
ERROR = 20  # percent by which a prediction may be off
LONG = 1.0  # seconds of a step that needs no steps before it to settle
PARTS = (4, 2, 1)  # parts of a batch that one process is timed on


def _loads() -> dict[str, Load]:
    piece: dict[str, Any] = {"layers": 8, "heads": 4, "width": 128, "sequences": 1, "length": 8_192}
    return {
        "width 512": Load(),
        "8,192 tokens, linear": Load(**piece, strategies=("context",)),
        "8,192 tokens, delta": Load(**piece, mechanism="delta", strategies=("context",)),
    }


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    loads: dict[str, Load] = field(default_factory=_loads)
    ranks: tuple[int, ...] = (2, 4)
    sent: tuple[int, int] = (2**10, 2**21)  # numbers in a small message and in a large one
    repeats: int = 10  # times that a message is sent
    rounds: int = 5

    @property
    def turns(self) -> int:
        """Return the number of steps of `progress`: rounds of one process, then of several."""
        return 2 * self.rounds


_TINY: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "length": 64}
QUICK = Sizes(
    loads={
        "data": Load(**_TINY, sequences=4),
        "context": Load(**_TINY, sequences=1, strategies=("context",)),
    },
    ranks=(2,),
    sent=(2**6, 2**10),
    repeats=2,
    rounds=2,
)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the timings of steps."""
    given: dict[str, Any] = {"rounds": sizes.rounds, "at_least": 0, "settle": LONG}
    with started(max(sizes.ranks)) as ranks:
        alone = interleaved(_alone(sizes), **given, progress=progress)
        links = {count: measured(ranks, count, sizes.sent, sizes.repeats) for count in sizes.ranks}
        contention = {name: _contention(ranks, load, sizes) for name, load in sizes.loads.items()}
        found = interleaved(
            _together(ranks, sizes), **given, progress=lambda done: progress(sizes.rounds + done)
        )
    rows = []
    for count, kind in product(sizes.ranks, COLLECTIVES):
        link: Link = getattr(links[count], kind)
        rows.append(Row(f"{kind}, {count} processes: latency", 1e6 * link.latency, "us"))
        rows.append(Row(f"{kind}, {count} processes: bandwidth", link.bandwidth / 1e9, "GB/s"))
    for name, load in sizes.loads.items():
        rows.append(Row(f"{name}: a feed-forward on all cores at once / alone", contention[name], "x"))
        rows += _compared(name, load, sizes, alone, found, links, contention[name])
    return rows, {**alone, **found}


def _compared(
    name: str,
    load: Load,
    sizes: Sizes,
    alone: Mapping[str, Timing],
    found: Mapping[str, Timing],
    links: Mapping[int, Links],
    contention: float,
) -> Iterator[Row]:
    """Rows of the time that several processes took for a load, beside what the model predicts."""
    work = Work(load.config())
    seconds = {parts: alone[_alone_name(name, parts)].median for parts in PARTS}
    update = alone[f"{name}, AdamW"].median
    for count, strategy in product(sizes.ranks, load.strategies):
        step = Step(
            work=work,
            machine=calibrated(work, load, seconds, update, links[count], contention),
            plan=load.plan(strategy, count),
            length=load.length,
            sequences=load.sequences,
            recompute=False,
        )
        what = _name(name, strategy, count)
        took, predicted = found[what].median, step.seconds
        yield Row(f"{what}: measured", 1e3 * took, "ms")
        yield Row(f"{what}: predicted", 1e3 * predicted, "ms")
        yield Row(f"{what}: error", 100 * (predicted / took - 1), "%", -ERROR, ERROR)


def details(sizes: Sizes) -> dict[str, object]:
    """Return the cores that processes share, for the report."""
    return {"cores_shared": _cores()}


def table(report: Mapping[str, Any]) -> str:
    """Return the table of docs/scale.md for a saved report: a row for each step of several processes."""
    rows = by_name(report)
    lines = ["| step | measured, ms | predicted, ms | error |", "| --- | --- | --- | --- |"]
    for what, took in rows.items():
        name = what.removesuffix(": measured")
        if name != what:
            predicted, error = rows[f"{name}: predicted"], rows[f"{name}: error"]
            lines.append(f"| {name} | {took:,.0f} | {predicted:,.0f} | {error:+.0f} % |")
    return "\n".join(lines)


def calibrated(
    work: Work, load: Load, seconds: dict[int, float], update: float, links: Links, contention: float
) -> Machine:
    """Return the machine that fits what one process took for parts of a batch, parts -> seconds, and for
    AdamW's update.

    Least squares of seconds = launch * layers + operations / rate, with neither of them negative."""
    parts = sorted(seconds)
    operations = np.array([_operations(work, *load.part(each)) for each in parts], dtype=np.float64)
    taken = np.array([seconds[each] for each in parts])
    slope, start = (float(x) for x in np.polyfit(operations, taken, 1))
    if start < 0 or slope <= 0:  # the line through 0
        slope, start = float(operations @ taken / (operations @ operations)), 0.0
    return Machine(
        operations=1 / slope,
        launch=start / work.layers,
        memory=float("inf"),
        memory_bandwidth=work.update_bytes(1, Bytes()) / update,
        node=_cores() + max(PARTS),  # all ranks are in one node
        inside=links,
        between=links,
        cores=_cores(),
        contention=contention,
    )


def _operations(work: Work, sequences: int, length: int) -> float:
    """Operations of a step without the optimizer's."""
    machine = Machine(
        operations=1.0, memory=0.0, memory_bandwidth=1.0, node=1, inside=_NO_LINKS, between=_NO_LINKS
    )
    shape: dict[str, Any] = {"length": length, "sequences": sequences, "recompute": False}
    return Step(work=work, machine=machine, plan=Plan(), **shape).operations


_NO_LINKS = Links.alike(Link(0.0, 1.0))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# One process.


def _alone_name(name: str, parts: int) -> str:
    return f"{name}, one process, 1 / {parts} of the batch"


def _alone(sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Steps of one process without an update, of parts of each batch, and updates."""
    found: dict[str, Callable[[], object]] = {}
    for name, load in sizes.loads.items():
        training = Training(load, "one process", 1)
        for parts in PARTS:
            found[_alone_name(name, parts)] = partial(training.gradients, *load.part(parts))
        training.gradients(*load.part(PARTS[0]))
        found[f"{name}, AdamW"] = training.optimizer.step
    return found


# Links and cores.


def _contention(ranks: Ranks, load: Load, sizes: Sizes) -> float:
    """Return how many times as long a feed-forward takes when all cores run it as on one core alone."""
    most = min(_cores(), max(sizes.ranks))
    seconds = []
    for _ in range(sizes.rounds):
        seconds.append([max(ranks.call(n, _feed_forward, load, sizes.repeats)) for n in (1, most)])
    alone, beside = (statistics.median(each) for each in zip(*seconds, strict=True))
    return max(1.0, beside / alone)


def _feed_forward(load: Load, repeats: int) -> float:
    """Seconds of a feed-forward and its backward, on half of a batch."""
    sequences, length = load.part(2)
    x, mlp = torch.randn(sequences, length, load.width), MLP(load.width)
    mlp(x).sum().backward()
    start = time.perf_counter()
    for _ in range(repeats):
        mlp(x).sum().backward()
    return (time.perf_counter() - start) / repeats


# Several processes.

_HELD: dict[Any, Any] = {}  # networks of this process, built once


def _name(name: str, strategy: str, ranks: int) -> str:
    return f"{name}, {strategy}, {ranks} processes"


def _together(ranks: Ranks, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Whole steps of several processes by each strategy."""
    found: dict[str, Callable[[], object]] = {}
    for name, load in sizes.loads.items():
        for count, strategy in product(sizes.ranks, load.strategies):
            found[_name(name, strategy, count)] = partial(ranks.call, count, _step, load, strategy, count)
    return found


def _step(load: Load, strategy: str, count: int) -> None:
    key = (load, strategy, count)
    if key not in _HELD:
        _HELD[key] = Training(load, strategy, count)
    _HELD[key].step()

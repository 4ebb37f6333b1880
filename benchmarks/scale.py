"""`python -m benchmarks scale`: training steps of 1, 2 and 4 processes, beside what the cost model predicts.

A step is a forward, a backward, the gradients added up and AdamW's update; a process has one thread, and they
speak through gloo. The model (`lintra.bench.step_time`) is given what one process takes for a whole batch,
half of it and a quarter, without anybody else, and what messages and collectives take that carry nothing of a
network: no step of several processes. On few cores the processes share them.
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ranks import Ranks, group, started
from lintra import distributed
from lintra.attention import delta, linear
from lintra.bench.machines import Collective, Link, Links, Machine
from lintra.bench.reports import Row, by_name
from lintra.bench.step_plan import Plan
from lintra.bench.step_time import Step
from lintra.bench.step_work import Bytes, Work
from lintra.bench.timing import Timing, interleaved
from lintra.models import Decoder, decoder
from lintra.nn import MLP

MEASURES = (
    "lintra/bench",
    "lintra/distributed.py",
    "lintra/nn",
    "lintra/ops/linear_attention",
    "lintra/models",
)
VOCABULARY, ERROR = 256, 20  # percent by which a prediction may be off
LONG = 1.0  # seconds of a step that needs none before it to settle
PARTS = (4, 2, 1)  # of a batch, timed by one process
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")


@dataclass(frozen=True, kw_only=True)
class Load:
    """A network and its batch."""

    mechanism: Literal["linear", "delta"] = "linear"
    layers: int = 4
    heads: int = 8
    width: int = 512
    sequences: int = 4
    length: int = 512
    strategies: tuple[str, ...] = ("DDP", "FSDP2")

    def config(self) -> decoder.Config:
        """Return the network's configuration."""
        return decoder.Config(
            attention=linear.Config() if self.mechanism == "linear" else delta.Config(),
            vocabulary=VOCABULARY,
            layers=self.layers,
            heads=self.heads,
            width=self.width,
        )

    def part(self, parts: int) -> tuple[int, int]:
        """Return the sequences and tokens of one of so many equal parts of the batch."""
        if "context" in self.strategies:
            return self.sequences, self.length // parts
        return self.sequences // parts, self.length

    def plan(self, strategy: str, ranks: int) -> Plan:
        """Return how ranks share a step."""
        if strategy == "context":
            return Plan(context=ranks, exchange="relay")
        return Plan(data=ranks, shard=ranks if strategy == "FSDP2" else 1)


def _loads() -> dict[str, Load]:
    piece: dict[str, Any] = {"layers": 8, "heads": 4, "width": 128, "sequences": 1, "length": 8_192}
    return {
        "width 512": Load(),
        "8,192 tokens, linear": Load(**piece, strategies=("context",)),
        "8,192 tokens, delta": Load(**piece, mechanism="delta", strategies=("context",)),
    }


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amount of work that is timed."""

    loads: dict[str, Load] = field(default_factory=_loads)
    ranks: tuple[int, ...] = (2, 4)
    sent: tuple[int, int] = (2**10, 2**21)  # numbers of a small message and of a large one
    repeats: int = 10  # of messages
    rounds: int = 5

    @property
    def turns(self) -> int:
        """Return what `progress` counts: rounds of one process, then of several."""
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
    """Times everything -> the table's rows and the timings of steps."""
    with started(max(sizes.ranks)) as ranks:
        alone = interleaved(_alone(sizes), rounds=sizes.rounds, at_least=0, settle=LONG, progress=progress)
        links = {count: _links(ranks, count, sizes) for count in sizes.ranks}
        contention = _contention(ranks, sizes)
        contestants = _together(ranks, sizes)
        found = interleaved(
            contestants,
            rounds=sizes.rounds,
            at_least=0,
            settle=LONG,
            progress=lambda done: progress(sizes.rounds + done),
        )
    rows = [Row("contention: beside others, as many as there are cores / alone", contention, "x")]
    for count in sizes.ranks:
        for kind in COLLECTIVES:
            link: Link = getattr(links[count], kind)
            rows.append(Row(f"{kind}, {count} processes: latency", 1e6 * link.latency, "us"))
            rows.append(Row(f"{kind}, {count} processes: bandwidth", link.bandwidth / 1e9, "GB/s"))
    for name, load in sizes.loads.items():
        work = Work(load.config())
        seconds = {parts: alone[_alone_name(name, parts)].median for parts in PARTS}
        update = alone[f"{name}, AdamW"].median
        for count, strategy in product(sizes.ranks, load.strategies):
            machine = calibrated(work, load, seconds, update, links[count], contention)
            step = Step(
                work=work,
                machine=machine,
                plan=load.plan(strategy, count),
                length=load.length,
                sequences=load.sequences,
                recompute=False,
            )
            what = _name(name, strategy, count)
            measured, predicted = found[what].median, step.seconds
            rows.append(Row(f"{what}: measured", 1e3 * measured, "ms"))
            rows.append(Row(f"{what}: predicted", 1e3 * predicted, "ms"))
            error = 100 * (predicted / measured - 1)
            rows.append(Row(f"{what}: error", error, "%", -ERROR, ERROR))
    return rows, {**alone, **found}


def details(sizes: Sizes) -> dict[str, object]:
    """Return the cores that processes share, for the report."""
    return {"cores_shared": _cores()}


def table(report: Mapping[str, Any]) -> str:
    """Return the table of docs/scale.md for a saved report: a row for each step of several processes."""
    rows = by_name(report)
    lines = ["| step | measured, ms | predicted, ms | error |", "| --- | --- | --- | --- |"]
    for what, measured in rows.items():
        name = what.removesuffix(": measured")
        if name != what:
            predicted, error = rows[f"{name}: predicted"], rows[f"{name}: error"]
            lines.append(f"| {name} | {measured:,.0f} | {predicted:,.0f} | {error:+.0f} % |")
    return "\n".join(lines)


def calibrated(
    work: Work, load: Load, seconds: dict[int, float], update: float, links: Links, contention: float
) -> Machine:
    """Return the machine of what one process took for parts of a batch, parts -> seconds, and for AdamW's
    update.

    Least squares of seconds = launch * layers + operations / rate, neither of them negative."""
    parts = sorted(seconds)
    operations = np.array([_operations(work, *load.part(each)) for each in parts], dtype=np.float64)
    taken = np.array([seconds[each] for each in parts])
    slope, start = (float(x) for x in np.polyfit(operations, taken, 1))
    if start < 0 or slope <= 0:  # through 0
        slope, start = float(operations @ taken / (operations @ operations)), 0.0
    return Machine(
        operations=1 / slope,
        launch=start / work.layers,
        memory=float("inf"),
        memory_bandwidth=work.update_bytes(1, Bytes()) / update,
        node=len(os.sched_getaffinity(0)) + max(PARTS),  # all in one
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


def _links(ranks: Ranks, count: int, sizes: Sizes) -> Links:
    """Measures messages and collectives of so many processes -> a link for each kind.

    A step of a ring is (seconds of a small one - those of its bytes) / steps, as the model has it."""
    found = {}
    for kind in COLLECTIVES:
        small, large = (ranks.call(count, _exchange, kind, count, n, sizes.repeats)[0] for n in sizes.sent)
        steps = {"all_reduce": 2 * (count - 1), "send": 1}.get(kind, count - 1)
        share = {"all_reduce": 2 * (count - 1) / count, "send": 1.0}.get(kind, (count - 1) / count)
        volumes = [4 * n * share for n in sizes.sent]
        byte = max(large - small, 1e-9) / (volumes[1] - volumes[0])
        found[kind] = Link(max(0.0, small - volumes[0] * byte) / steps, 1 / byte)
    return Links(**found)


# Their names from PyTorch 2.13 on, and before.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _exchange(kind: Collective, count: int, numbers: int, repeats: int) -> float:
    """Seconds of a collective on so many numbers, or of half a ping-pong: the median of repeats."""
    members, rank = group(count), dist.get_rank()
    x, whole = torch.zeros(numbers // count * count), torch.zeros(numbers // count * count)
    piece = torch.zeros(numbers // count)
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier(members)
        start = time.perf_counter()
        if kind == "all_reduce":
            dist.all_reduce(x, group=members)
        elif kind == "all_gather":
            _GATHER(whole, piece, group=members)
        elif kind == "reduce_scatter":
            _SCATTER(piece, x, group=members)
        elif rank == 0:
            dist.send(x, 1, group=members)
            dist.recv(x, 1, group=members)
        elif rank == 1:
            dist.recv(x, 0, group=members)
            dist.send(x, 0, group=members)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) / (2 if kind == "send" else 1)


def _contention(ranks: Ranks, sizes: Sizes) -> float:
    """How many times as long a feed-forward takes on all cores at once as on one alone."""
    most = min(_cores(), max(sizes.ranks))
    load = max(sizes.loads.values(), key=lambda load: load.width)
    seconds = []
    for _ in range(sizes.rounds):
        seconds.append([max(ranks.call(n, _feed_forward, load, sizes.repeats)) for n in (1, most)])
    alone, beside = (statistics.median(each) for each in zip(*seconds, strict=True))
    return max(1.0, beside / alone)


def _feed_forward(load: Load, repeats: int) -> float:
    """Seconds of a feed-forward and its backward, on a quarter of a batch."""
    x = torch.randn(load.sequences * load.length // 4, load.width)
    mlp = _HELD.setdefault(("mlp", load), MLP(load.width))
    mlp(x).sum().backward()
    start = time.perf_counter()
    for _ in range(repeats):
        mlp(x).sum().backward()
    return (time.perf_counter() - start) / repeats


# Several processes.

_HELD: dict[Any, Any] = {}  # of a process: networks, built once


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


class Training:
    """A network and its optimizer, on this rank, for one strategy."""

    def __init__(self, load: Load, strategy: str, count: int):
        torch.manual_seed(0)
        self.load, self.strategy, self.count = load, strategy, count
        self.model: Decoder = load.config().build()
        self.called: nn.Module = self.model
        self.mesh: Any = None
        if strategy == "DDP":
            self.called = DistributedDataParallel(
                self.model, process_group=group(count), gradient_as_bucket_view=True
            )
        elif strategy != "one process":
            self.mesh = DeviceMesh.from_group(group(count), "cpu")
        if strategy == "FSDP2":
            for block in self.model.blocks:
                fully_shard(block, mesh=self.mesh)
            fully_shard(self.model, mesh=self.mesh)
        elif strategy == "context":
            distributed.context_parallel(self.model, self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def step(self) -> None:
        """Forward, backward and update of this rank's part of the batch."""
        whole = self.load.sequences, self.load.length
        self.gradients(*(whole if self.strategy == "context" else self.load.part(self.count)))
        self.optimizer.step()

    def gradients(self, sequences: int, length: int) -> None:
        """Forward and backward of sequences of so many tokens; by context, of this rank's piece of them."""
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, VOCABULARY, (sequences, length), generator=generator)
        before, total = self.model.shift(text), text.numel()
        if self.strategy == "context":
            before, text = (distributed.shard(x, self.mesh) for x in (before, text))
        self.optimizer.zero_grad(set_to_none=self.strategy != "DDP")
        with warnings.catch_warnings():  # nothing here changes what a sharded network gives
            warnings.filterwarnings("ignore", ".*returned a view tensor")
            params = self.called(before)
        (functional.cross_entropy(params.flatten(0, 1), text.flatten(), reduction="sum") / total).backward()
        if self.strategy == "context":
            distributed.reduce_gradients(self.model, self.mesh)

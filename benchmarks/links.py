"""Timed messages and collectives of processes that communicate through gloo: the links of the cost model."""

import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.ranks import Ranks, group
from lintra.bench.machines import Collective, Link, Links

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")


def measured(ranks: Ranks, count: int, sent: tuple[int, int], repeats: int) -> Links:
    """Measure messages and collectives of so many processes -> a link for each kind.

    sent: numbers of a small message and of a large one. Their difference gives the bandwidth, what is left of
    the small one the latency of each step of a ring, as the model has it."""
    found = {}
    for kind in COLLECTIVES:
        small, large = (ranks.call(count, _exchange, kind, count, n, repeats)[0] for n in sent)
        steps = {"all_reduce": 2 * (count - 1), "send": 1}.get(kind, count - 1)
        share = {"all_reduce": 2 * (count - 1) / count, "send": 1.0}.get(kind, (count - 1) / count)
        volumes = [4 * n * share for n in sent]
        byte = max(large - small, 1e-9) / (volumes[1] - volumes[0])
        found[kind] = Link(max(0.0, small - volumes[0] * byte) / steps, 1 / byte)
    return Links(**found)


# Their names from PyTorch 2.13 on, and before that.
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

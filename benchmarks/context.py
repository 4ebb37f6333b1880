"""`python -m benchmarks context`: a training step of one long sequence by one process, and by two.

Each process has one thread. The two hand their states on (`lintra.distributed`): the first is at the next
layer while the second is at the one before. Beside the seconds stand the bytes that a rank sends in a step,
for the whole sequence and for half of it.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from lintra import distributed
from lintra.attention import delta, linear, softmax
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.models import Decoder, decoder

MEASURES = ("lintra/distributed.py", "lintra/nn", "lintra/ops/linear_attention", "lintra/models")
MECHANISMS = {
    "linear": linear.Config(),
    "delta": delta.Config(),
    "softmax, window 256": softmax.Config(window=256),
}
RANKS, VOCABULARY = 2, 256
OVERHEAD = 15  # percent over half the time of one process, at most


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The network and its sequence."""

    tokens: int = 65_536
    layers: int = 8
    heads: int = 4
    width: int = 128
    rounds: int = 3

    @property
    def turns(self) -> int:
        """Return what `progress` counts: rounds of all mechanisms."""
        return self.rounds * len(MECHANISMS)


QUICK = Sizes(tokens=64, layers=1, heads=1, width=16, rounds=2)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Times every mechanism -> the table's rows and the timings of steps."""
    rows, timings, threads = [], {}, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _second_rank() as tell:
            for i, name in enumerate(MECHANISMS):
                more, found = _compare(name, sizes, tell, partial(_count, progress, i * sizes.rounds))
                rows += more
                timings |= found
    finally:
        torch.set_num_threads(threads)
    return rows, timings


def _count(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


def _compare(
    name: str, sizes: Sizes, tell: Callable[..., None], progress: Callable[[int], None]
) -> tuple[list[Row], dict[str, Timing]]:
    """Times a mechanism, alone and together with the second rank -> its rows and timings."""
    alone, together = _build(name, sizes), _build(name, sizes)
    tell("build", name, sizes)
    mesh = init_device_mesh("cpu", (RANKS,))
    distributed.context_parallel(together, mesh)
    assert together.context is not None

    def both(tokens: int) -> None:
        tell("step", tokens)
        _step(together, tokens, mesh)

    one, two = f"{name}, one process", f"{name}, two processes"
    contestants = {one: partial(_step, alone, sizes.tokens), two: partial(both, sizes.tokens)}
    found = interleaved(contestants, rounds=sizes.rounds, at_least=0, progress=progress)
    overhead = 100 * (RANKS * found[two].median / found[one].median - 1)
    rows = [Row(f"{name}: over half the time of one process", overhead, "%", at_most=OVERHEAD)]
    for tokens in (sizes.tokens // 2, sizes.tokens):
        before = together.context.ranks.bytes_sent
        both(tokens)
        sent = (together.context.ranks.bytes_sent - before) / sizes.layers
        rows.append(Row(f"{name}: sent a layer, {tokens:,} tokens", sent, "bytes"))
    return rows, found


def _build(name: str, sizes: Sizes) -> Decoder:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "layers": sizes.layers,
        "heads": sizes.heads,
        "width": sizes.width,
        "vocabulary": VOCABULARY,
    }
    return decoder.Config(attention=MECHANISMS[name], **shape).build()


def _step(model: Decoder, tokens: int, mesh: Any = None) -> None:
    """Forward and backward of a sequence, or of this rank's piece of it."""
    text = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    before = model.shift(text)
    if mesh is not None:
        before, text = distributed.shard(before, mesh), distributed.shard(text, mesh)
    model.zero_grad()
    (functional.cross_entropy(model(before).mT, text, reduction="sum") / tokens).backward()
    if mesh is not None:
        distributed.reduce_gradients(model, mesh)


@contextmanager
def _second_rank() -> Iterator[Callable[..., None]]:
    """Start a second process, joined with this one through gloo -> a function that tells it what to do."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe()
        process = context.Process(target=_follow, args=(f"{folder}/store", theirs), daemon=True)
        process.start()
        _join(f"{folder}/store", 0)
        try:
            yield lambda *what: ours.send(what)
        finally:
            ours.send(("end",))
            dist.destroy_process_group()
            process.join()


def _join(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)


def _follow(store: str, pipe: Any) -> None:
    """The second process: builds and steps as it is told."""
    torch.set_num_threads(1)
    _join(store, 1)
    model, mesh = None, None
    while (what := pipe.recv())[0] != "end":
        if what[0] == "build":
            model, mesh = _build(*what[1:]), init_device_mesh("cpu", (RANKS,))
            distributed.context_parallel(model, mesh)
        else:
            assert model is not None
            _step(model, what[1], mesh)
    dist.destroy_process_group()

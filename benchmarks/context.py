"""`python -m benchmarks context`: a training step of one long sequence by one process, and by two.

Each process has one thread. The two wait for each other's states, the first at the next layer while the
second is at the one before, or exchange them (`lintra.distributed`, methods "relay" and "scan"). Beside the
seconds stand the bytes that a rank sends in a step, for the whole sequence and for half of it. All recompute
their blocks in the backward: a layer keeps 11 to 16 kB of a token otherwise, of which attention to a window
has 2, its queries, keys, values and outputs.
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
from lintra.allocator import release_freed_memory
from lintra.attention import delta, linear, softmax
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.models import Decoder, decoder
from lintra.nn.context import Method

MEASURES = (
    "lintra/distributed.py",
    "lintra/nn",
    "lintra/ops/piece.py",
    "lintra/ops/ranks.py",
    "lintra/ops/linear_attention",
    "lintra/models",
)
MECHANISMS = {
    "linear": linear.Config(),
    "delta": delta.Config(),
    "softmax, window 256": softmax.Config(window=256),
}
METHODS: tuple[Method, ...] = ("relay", "scan")
RANKS, VOCABULARY = 2, 256
OVERHEAD = 15  # percent over half the time of one process, at most
SETTLED = 2.0  # seconds: a call that takes longer needs no warming up


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The network and its sequence."""

    tokens: int = 65_536
    layers: int = 8
    heads: int = 4
    width: int = 128
    rounds: int = 2

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
    """Times a mechanism, alone and by each method together with the second rank -> its rows and timings."""
    mesh = init_device_mesh("cpu", (RANKS,))
    together, sent = {}, {}
    for method in METHODS:
        tell("build", name, sizes, method)
        together[method] = distributed.context_parallel(_build(name, sizes), mesh, method=method)

    def both(method: Method, tokens: int) -> None:
        tell("step", method, tokens)
        ranks = together[method].context.ranks
        before = ranks.bytes_sent
        _step(together[method], tokens, mesh)
        sent[method, tokens] = (ranks.bytes_sent - before) / sizes.layers

    one = f"{name}, one process"
    contestants: dict[str, Callable[[], object]] = {one: partial(_step, _build(name, sizes), sizes.tokens)}
    contestants |= {f"{name}, {x}": partial(both, x, sizes.tokens) for x in METHODS}
    options: dict[str, Any] = {"rounds": sizes.rounds, "at_least": 0, "settle": SETTLED}
    found = interleaved(contestants, **options, progress=progress)
    rows = []
    for method in METHODS:
        both(method, sizes.tokens // 2)
        overhead = 100 * (RANKS * found[f"{name}, {method}"].median / found[one].median - 1)
        rows.append(
            Row(f"{name}, {method}: over half the time of one process", overhead, "%", at_most=OVERHEAD)
        )
        for tokens in (sizes.tokens // 2, sizes.tokens):
            label = f"{name}, {method}: sent a layer, {tokens:,} tokens"
            rows.append(Row(label, sent[method, tokens], "bytes"))
    return rows, found


def _build(name: str, sizes: Sizes) -> Decoder:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "layers": sizes.layers,
        "heads": sizes.heads,
        "width": sizes.width,
        "vocabulary": VOCABULARY,
        "checkpoint_blocks": True,
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
    release_freed_memory()  # else the pieces of one contestant lie beside those of the next


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
    models, mesh = {}, init_device_mesh("cpu", (RANKS,))
    while (what := pipe.recv())[0] != "end":
        match what:
            case "build", name, sizes, method:
                models[method] = distributed.context_parallel(_build(name, sizes), mesh, method=method)
            case "step", method, tokens:
                _step(models[method], tokens, mesh)
    dist.destroy_process_group()

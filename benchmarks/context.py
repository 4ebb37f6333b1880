"""`python -m benchmarks context`: a training step of one long sequence by one process, and by two.

Each process has one thread. The two either wait for each other's states, the first working on the next
layer while the second works on the one before, or exchange them (`lintra.distributed`, methods "relay" and
"scan"). "Apart" are two processes that each take a step of half the sequence and exchange nothing: it shows
what two cores lose to each other, which no exchange can avoid. Beside the seconds stand the bytes that a
rank sends in a step, for the whole sequence and for half of it. All recompute their blocks in the backward
pass; otherwise a layer keeps 11 to 16 kB per token, of which attention to a window has 2: its queries, keys,
values and outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from benchmarks.ranks import Ranks, started
from lintra import distributed
from lintra.allocator import release_freed_memory
from lintra.attention import delta, linear, softmax
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.models import Decoder, decoder
from lintra.nn.context_parallel import Method

MEASURES = (
    "lintra/distributed.py",
    "lintra/nn",
    "lintra/ops/sequence_shard.py",
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
OVERHEAD = 15  # percent above half the time of one process, at most
SETTLED = 2.0  # seconds: a call that takes longer needs no warm-up


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
        """Return the number of steps of `progress`: rounds of all mechanisms."""
        return self.rounds * len(MECHANISMS)


QUICK = Sizes(tokens=64, layers=1, heads=1, width=16, rounds=2)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time every mechanism -> the table's rows and the timings of steps."""
    rows, timings = [], {}
    with started(RANKS) as ranks:
        for i, name in enumerate(MECHANISMS):
            more, found = _compare(name, sizes, ranks, partial(_count, progress, i * sizes.rounds))
            rows += more
            timings |= found
    return rows, timings


def _count(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


def _compare(
    name: str, sizes: Sizes, ranks: Ranks, progress: Callable[[int], None]
) -> tuple[list[Row], dict[str, Timing]]:
    """Time a mechanism, alone and by each method together with the second rank -> its rows and timings."""
    sent = {}
    ranks.call(RANKS, _share, name, sizes)

    def both(method: Method, tokens: int) -> None:
        sent[method, tokens] = ranks.call(RANKS, _sent, method, tokens)[0] / sizes.layers

    one = f"{name}, one process"
    contestants: dict[str, Callable[[], object]] = {one: partial(_step, _build(name, sizes), sizes.tokens)}
    apart = f"{name}, two processes apart"
    contestants[apart] = partial(ranks.call, RANKS, _apart, sizes.tokens // RANKS)
    contestants |= {f"{name}, {x}": partial(both, x, sizes.tokens) for x in METHODS}
    options: dict[str, Any] = {"rounds": sizes.rounds, "at_least": 0, "settle": SETTLED}
    found = interleaved(contestants, **options, progress=progress)

    def over_half(contestant: str) -> float:
        return 100 * (RANKS * found[contestant].median / found[one].median - 1)

    over = "over half the time of one process"
    rows = [Row(f"{apart}: {over}", over_half(apart), "%")]
    for method in METHODS:
        both(method, sizes.tokens // 2)
        rows.append(Row(f"{name}, {method}: {over}", over_half(f"{name}, {method}"), "%", at_most=OVERHEAD))
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


# Held on each rank: the networks of which it computes a part, with the mesh of the ranks, and one by itself.
_shared: dict[Method, tuple[Decoder, DeviceMesh]] = {}
_alone: list[Decoder] = []


def _share(name: str, sizes: Sizes) -> None:
    """On a rank: build the network of a mechanism for each method."""
    release_freed_memory()
    mesh = init_device_mesh("cpu", (RANKS,))
    for method in METHODS:
        model = distributed.context_parallel(_build(name, sizes), mesh, method=method)
        _shared[method] = model, mesh
    _alone[:] = [_build(name, sizes)]


def _apart(tokens: int) -> None:
    """On a rank: take a step of a sequence of its own."""
    _step(_alone[0], tokens)


def _sent(method: Method, tokens: int) -> int:
    """On a rank: take a step of its shard of so many tokens -> the bytes it has sent for the layers."""
    model, mesh = _shared[method]
    assert model.context_parallel is not None
    before = model.context_parallel.ranks.bytes_sent
    _step(model, tokens, mesh)
    return model.context_parallel.ranks.bytes_sent - before


def _step(model: Decoder, tokens: int, mesh: DeviceMesh | None = None) -> None:
    """Forward and backward of a sequence, or of this rank's shard of it."""
    text = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    before = model.shift(text)
    if mesh is not None:
        before, text = distributed.shard(before, mesh), distributed.shard(text, mesh)
    model.zero_grad()
    (functional.cross_entropy(model(before).mT, text, reduction="sum") / tokens).backward()
    if mesh is not None:
        distributed.reduce_gradients(model, mesh)

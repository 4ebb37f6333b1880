"""How fast the paper's models generate in each way: tables 1, 2 and 5. See README.md beside this file."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from lintra.attention import leaves, linear, lsh, softmax
from lintra.bench.next_token import state_at
from lintra.bench.reports import Row, by_name
from lintra.bench.timing import Timing, interleaved
from lintra.generation.native_decode import NativeDecoder
from lintra.tasks import images

Call = Callable[[], object]
PARTS = 3  # of an image: a token is timed in the middle of each, and the mean stands for all tokens
# Chunks of 32, as in the paper's code; `redraw_every` matters in training alone.
LSH = {f"LSH-{rounds}": lsh.Config(rounds=rounds, chunk=32, redraw_every=None) for rounds in (1, 4)}

RECOMPUTED, CACHED, RNN, FUSED = "softmax, recomputed", "softmax, cached", "linear, unfused", "linear"
BATCHES = {
    "mnist": {RECOMPUTED: (1, 4), CACHED: (1, 16, 64), "LSH-1": (1, 16), "LSH-4": (1, 16), RNN: (1, 64)},
    "cifar10": {RECOMPUTED: (1,), CACHED: (1, 16), "LSH-1": (1, 4), "LSH-4": (1, 4), RNN: (1, 64)},
}
BATCHES["mnist"][FUSED] = (1, 16, 64, 256)
BATCHES["cifar10"][FUSED] = (1, 16, 64, 256)
PAPER = {  # images a second of tables 1 and 2, seconds for one image on a CPU of table 5
    "mnist": {RECOMPUTED: (0.45, 72.6), CACHED: (7.56, 7.4), "LSH-1": (0.68, 46.0), "LSH-4": (0.27, 112.0)},
    "cifar10": {RECOMPUTED: (0.004, 8651.4), CACHED: (0.32, 71.9), "LSH-1": (0.015, 2318.9)},
}
PAPER["cifar10"]["LSH-4"] = (0.005, 5263.7)
PAPER["mnist"][FUSED], PAPER["cifar10"][FUSED] = (142.8, 5.5), (17.85, 45.1)


class Contestant(NamedTuple):
    """One way to generate, with so many images at a time."""

    way: str
    batch: int

    def name(self, position: int) -> str:
        return f"{self.way}, {self.batch} at a time, token {position:,}"


def measure(data: str, rounds: int = 7) -> tuple[list[Row], dict[str, Timing]]:
    """Images a second, and seconds for one image, of the paper's model for these data, and the single
    timings. Ways are measured one after another, tokens of one way in turns."""
    length = images.Config(data=data).build().length
    positions = [length * (2 * i + 1) // (2 * PARTS) for i in range(PARTS)]
    found: dict[str, dict[int, float]] = {}  # way -> batch -> seconds of a batch of images
    every: dict[str, Timing] = {}
    for way, batches in BATCHES[data].items():  # a way at a time: the caches of all would not fit
        model = _model(data, way)
        for batch in batches:
            calls = dict(_calls(model, Contestant(way, batch), positions))
            timings = interleaved(calls, rounds=rounds, at_least=0.02, settle=1.0)
            tokens = sum(timing.median for timing in timings.values()) / PARTS
            found.setdefault(way, {})[batch] = length * tokens
            every |= {f"{data}: {name}": timing for name, timing in timings.items()}
    return list(_rows(data, found)), every


def _rows(data: str, found: dict[str, dict[int, float]]) -> Iterator[Row]:
    best = {}
    for way, seconds in found.items():
        batch = max(seconds, key=lambda batch: batch / seconds[batch])
        best[way] = batch / seconds[batch]
        yield Row(f"{data}: {way}, images a second", best[way], "/s")
        yield Row(f"{data}: {way}, the batch of it", batch, "images")
        yield Row(f"{data}: {way}, one image", seconds[1], "s")
    for way in found:
        if way != FUSED:
            yield Row(f"{data}: linear / {way}, images a second", best[FUSED] / best[way], "x")
            for batch in sorted(found[way].keys() & found[FUSED].keys()):
                ratio = found[way][batch] / found[FUSED][batch]
                yield Row(f"{data}: linear / {way}, {batch} at a time", ratio, "x")


def _model(data: str, way: str) -> Any:
    """The paper's model for these data, with the mechanism of a way."""
    default = softmax.Config() if way.startswith("softmax") else linear.Config()
    task = images.Config(data=data, preset="paper").build()
    return task.model(LSH.get(way, default)).build().eval()


@torch.inference_mode()
def _calls(model: Any, contestant: Contestant, positions: list[int]) -> Iterator[tuple[str, Call]]:
    """Generate the next token after each of the positions."""
    for position in positions:
        tokens = torch.randint(256, (1, position))
        last = torch.zeros(contestant.batch, 1, dtype=torch.int64)
        if contestant.way == RECOMPUTED:
            call = _recompute(model, tokens.expand(contestant.batch, -1))
        else:
            state = state_at(model, contestant.batch, position)
            step = NativeDecoder(model, state) if contestant.way == FUSED else model.extend
            call = _extend(step, last, step.state if isinstance(step, NativeDecoder) else state)
        yield contestant.name(position), call


def _extend(step: Callable[..., Any], token: torch.Tensor, state: Any) -> Call:
    return torch.inference_mode()(lambda: step(token, state))


def _recompute(model: Any, tokens: torch.Tensor) -> Call:
    return torch.inference_mode()(lambda: model(tokens))


def kept(data: str, way: str, position: int) -> str:
    """Return the name of the row for how much a way keeps of one image after so many of its tokens."""
    return f"{data}: {way}, kept after token {position:,}"


def _places(data: str) -> tuple[int, int, int]:
    length = images.Config(data=data).build().length
    return 1, length // 2, length


def state_sizes(data: str) -> list[Row]:
    """Bytes that generation keeps for one image after 1, half and all of its tokens."""
    rows = []
    for way in (FUSED, CACHED):
        model = _model(data, way)
        for position in _places(data):
            with torch.inference_mode():
                _, state = model.extend(torch.zeros(1, position, dtype=torch.int64))
            size = sum(x.nbytes for x in leaves(state))
            rows.append(Row(kept(data, way, position), size / 1024, "KiB"))
    return rows


def table(report: dict[str, Any], data: str) -> str:
    """A row for each way: images a second and seconds for one, measured here and in the paper."""
    rows = by_name(report)
    lines = [
        "| way | images/s | batch | linear / it | paper, images/s (GPU) | one image, s | paper, s (CPU) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for way in BATCHES[data]:
        rate, one = (rows[f"{data}: {way}, {what}"] for what in ("images a second", "one image"))
        batch = rows[f"{data}: {way}, the batch of it"]
        ratio = rows.get(f"{data}: linear / {way}, images a second")
        paper = PAPER[data].get(way, ("", ""))
        cells = [way, f"{rate:.3g}", f"{batch:.0f}", "" if ratio is None else f"{ratio:,.0f} x", paper[0]]
        lines.append(f"| {' | '.join(map(str, [*cells, f'{one:.3g}', paper[1]]))} |")
    return "\n".join(lines)


def batch_table(report: dict[str, Any]) -> str:
    """Return a table of the speed of linear attention relative to each way at the same batch size."""
    rows = by_name(report)
    batches = sorted({batch for data in BATCHES for batch in BATCHES[data][FUSED]})[:-1]
    heads = ["the same batch, linear / it", *(f"{batch} at a time" for batch in batches)]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for data, ways in BATCHES.items():
        for way in (way for way in ways if way != FUSED):
            ratios = (rows.get(f"{data}: linear / {way}, {batch} at a time") for batch in batches)
            cells = ("" if ratio is None else f"{ratio:,.0f} x" for ratio in ratios)
            lines.append(f"| {data}, {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def state_table(report: dict[str, Any]) -> str:
    """How much is kept for one image, early and late, in KiB."""
    rows = by_name(report)
    lines = ["| kept of one image, KiB | first token | half | all |", "| --- | --- | --- | --- |"]
    for data in BATCHES:
        for way in (FUSED, CACHED):
            cells = (f"{rows[kept(data, way, place)]:,.0f}" for place in _places(data))
            lines.append(f"| {data}, {way} | {' | '.join(cells)} |")
    return "\n".join(lines)

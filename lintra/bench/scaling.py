"""`lintra bench scaling`: time and memory of attention, forward + backward, against the length.

Figure 1 of Katharopoulos et al. 2020, arXiv:2006.16236, with every mechanism, causal where it can be. All
lengths have the same number of tokens, in fewer and longer sequences, while that leaves one; every figure is
for one sequence. Memory is the peak of a call above what a process of its own held before it. What would
take more time or memory than there is, is left out, and a row says so.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lintra import pictures
from lintra.bench import _memory, _options, _peers, _points
from lintra.bench._points import FUSED, WRITTEN_OUT, Cost, Point
from lintra.bench._report import Row
from lintra.bench._timing import Timing, finish_on, interleaved

MEASURES = ("lintra/native", "lintra/ops", "lintra/attention")
LINEAR = "linear"
WITHIN = (0.95, 1.05)  # the exponent of what grows linearly
FREE = 0.5  # the part of the free memory that a call may need: what others have freed stays with the process
LONG = 1.0  # seconds of a call that needs no call before it to settle
_TIME, _MEMORY = "time", "memory"


@dataclass(frozen=True, kw_only=True)
class Options(_options.Options):
    """How this one runs."""

    device: Literal["cpu", "cuda"] = "cpu"  # where the tensors are
    peers: bool = False  # other libraries too, as far as they are installed


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much work is timed."""

    lengths: tuple[int, ...] = tuple(2**i for i in range(9, 17))
    tokens: int | None = None  # of a call; None: 8,192 on a CPU, 65,536 on a GPU
    heads: int = 8
    dim: int = 64
    seconds: float = 15.0  # a call that is likely to take longer is left out
    fit_from: int = 2048  # tokens; shorter sequences do not count for the exponents
    rounds: int = 3
    device: Literal["cpu", "cuda"] = "cpu"
    peers: bool = False
    names: tuple[str, ...] = ()  # of the contestants; none: all

    @property
    def turns(self) -> int:
        """What `progress` counts: contestants whose memory is measured, then rounds."""
        return len(self.contestants()) + self.rounds

    def contestants(self) -> list[str]:
        """Who is measured: of other libraries, those that can be imported."""
        missing = _peers.missing() if self.peers else _peers.PEERS
        return [*(self.names or _points.ours()), *(name for name in _peers.PEERS if name not in missing)]

    def point(self, who: str, length: int) -> Point:
        tokens = self.tokens or (8192 if self.device == "cpu" else 65536)
        batch = max(1, tokens // length)
        return Point(who=who, batch=batch, tokens=length, heads=self.heads, dim=self.dim, device=self.device)


QUICK = Sizes(
    lengths=(64, 128), tokens=128, heads=2, dim=16, fit_from=1, rounds=2, names=(FUSED, "lsh-1", LINEAR)
)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Measures everything -> the table's rows and the single timings of a call, named "WHO TOKENS"."""
    if sizes.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch finds no GPU here")
    who = sizes.contestants()
    rows: list[Row] = []
    if sizes.peers and (missing := _peers.missing()):
        rows.append(Row(f"left out, cannot be imported: {', '.join(missing)}", len(missing), "peers"))
    most = int(FREE * (_memory.free() if sizes.device == "cpu" else torch.cuda.mem_get_info()[0]))
    costs: dict[str, dict[int, Cost]] = {}
    for each in who:
        costs[each], left_out = sweep(each, sizes, most)
        rows += left_out
        progress(len(costs))
    if FUSED in who and LINEAR in who:
        rows += _once(sizes, costs[FUSED], most)
    timings = interleaved(
        dict(_contestants(sizes, costs)),
        rounds=sizes.rounds,
        at_least=0,
        settle=LONG,
        progress=lambda done: progress(len(costs) + done),
        finish=finish_on(sizes.device),
    )
    for each in who:
        for n, cost in costs[each].items():
            batch = sizes.point(each, n).batch
            rows.append(
                Row(f"{each}, {n:,} tokens: {_TIME}", 1e3 * timings[f"{each} {n}"].median / batch, "ms")
            )
            rows.append(Row(f"{each}, {n:,} tokens: {_MEMORY}", cost.size / 1e6 / batch, "MB"))
    return [*rows, *_growth(rows, sizes), *_ratios(rows, sizes)], timings


def sweep(
    who: str, sizes: Sizes, most: int, cost: Callable[[Point, int], Cost] = _points.cost
) -> tuple[dict[int, Cost], list[Row]]:
    """The cost of a call at each length within `sizes.seconds` and `most` bytes; a row for each that is not.

    What it will be is told from the length before it: softmax grows with the square of the length, the memory
    of the fused one not, everything else hardly more than linearly (Long-Short more, within one doubling)."""
    costs: dict[int, Cost] = {}
    left_out: list[Row] = []
    for length in sizes.lengths:
        point = sizes.point(who, length)
        what = f"{who}, {length:,} tokens: left out"
        if costs:
            last = max(costs)
            before, sequences = costs[last], point.batch / sizes.point(who, last).batch
            seconds = before.seconds * sequences * (length / last) ** _exponent(who, _TIME)
            size = before.size * sequences * (length / last) ** _exponent(who, _MEMORY)
            if size > most:
                left_out.append(Row(f"{what}, may need {most / 1e9:.1f} GB, likely", size / 1e9, "GB"))
                continue
            if seconds > sizes.seconds:
                left_out.append(Row(f"{what}, may take {sizes.seconds:g} s, likely", seconds, "s"))
                continue
        try:
            costs[length] = cost(point, most)
        except MemoryError:
            left_out.append(Row(f"{what}, out of memory, had", most / 1e9, "GB"))
        except RuntimeError as error:
            if who not in _peers.PEERS:
                raise
            left_out.append(Row(f"{what}, fails with {error}; after", float(len(costs)), "lengths"))
    return costs, left_out


def _exponent(who: str, of: str) -> float:
    if who == WRITTEN_OUT or (who == FUSED and of == _TIME):
        return 2.0
    return 1.2  # 2.3 for twice the length


def _contestants(
    sizes: Sizes, costs: Mapping[str, Mapping[int, Cost]]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everything that could be measured, on the same queries, keys and values."""
    points = [sizes.point("", length) for length in sizes.lengths]
    drawn = _points.draw(max(points, key=lambda point: point.batch * point.tokens))
    for length in sizes.lengths:
        inputs = _points.cut(drawn, sizes.point("", length))
        for who in costs:
            if length in costs[who]:
                yield f"{who} {length}", _points.call(sizes.point(who, length), inputs)


def _once(sizes: Sizes, costs: Mapping[int, Cost], most: int) -> list[Row]:
    """A single call of softmax at the greatest length, where it was left out: what linear is held against."""
    length = max(sizes.lengths)
    if length in costs:
        return []
    point = sizes.point(FUSED, length)
    try:
        seconds = _points.cost(point, most).seconds / point.batch
    except MemoryError:
        return [Row(f"{FUSED}, {length:,} tokens, one call: out of memory, had", most / 1e9, "GB")]
    return [Row(_single(length), 1e3 * seconds, "ms")]


def _single(length: int) -> str:
    return f"{FUSED}, {length:,} tokens, one call: {_TIME}"


def _once_measured(rows: list[Row], sizes: Sizes) -> float | None:
    """What `_once` found, if it was called for."""
    return next((row.figure for row in rows if row.what == _single(max(sizes.lengths))), None)


def exponent(line: Mapping[int, float], at_least: int) -> float | None:
    """a of y = c n^a, by least squares on logarithms over n >= `at_least`; None for fewer than two points."""
    kept = {n: y for n, y in line.items() if n >= at_least and y > 0}
    if len(kept) < 2:
        return None
    return float(np.polyfit(np.log(list(kept)), np.log(list(kept.values())), 1)[0])


def _growth(rows: list[Row], sizes: Sizes) -> Iterator[Row]:
    for what in (_TIME, _MEMORY):
        for who, line in lines(rows, what).items():
            low, high = WITHIN if who == LINEAR else (None, None)
            if (found := exponent(line, sizes.fit_from)) is not None:
                yield Row(f"{who}: {what} grows with the length to the power of", found, "", low, high)


def crossover(line: Mapping[int, float], yardstick: Mapping[int, float]) -> int | None:
    """The length from which on a line is below another, of those that both have; None: there is none."""
    found = None
    for n in sorted(line.keys() & yardstick.keys(), reverse=True):
        if line[n] >= yardstick[n]:
            break
        found = n
    return found


def _ratios(rows: list[Row], sizes: Sizes) -> Iterator[Row]:
    """Against PyTorch's softmax, and of each peer against the mechanism here."""
    times, memory = lines(rows, _TIME), lines(rows, _MEMORY)
    for who, line in times.items():
        if who != FUSED and (first := crossover(line, times.get(FUSED, {}))) is not None:
            yield Row(f"{who}: faster than {FUSED} from", first, "tokens")
    for peer, mine in _peers.COUNTERPARTS.items():
        for what, found in ((_TIME, times), (_MEMORY, memory)):
            if both := found.get(peer, {}).keys() & found.get(mine, {}).keys():
                least = min(found[peer][n] / found[mine][n] for n in both)
                yield Row(f"{peer} / {mine}: {what}, least of all lengths", least, "x", 1)
    last = max(sizes.lengths)
    exact, mine = times.get(FUSED, {}).get(last, _once_measured(rows, sizes)), times.get(LINEAR, {}).get(last)
    if exact is not None and mine is not None:
        yield Row(f"{_TIME} of {FUSED} / {LINEAR}, {last:,} tokens", exact / mine, "x", 100)


def details(sizes: Sizes) -> dict[str, object]:
    """What the report says beside the figures."""
    return {"peers": _peers.versions() if sizes.peers else {}}


def picture(path: Path, rows: list[Row], timings: dict[str, Timing], sizes: Sizes) -> list[Path]:
    """Time and memory of one sequence against its length, a picture of each; linear and softmax in colour."""
    title = f"forward + backward of one sequence, {sizes.heads} heads of {sizes.dim}"
    if sizes.peers:
        title += "; dashed: other libraries"
    drawn = []
    for what, unit in ((_TIME, "ms"), (_MEMORY, "MB")):
        found = lines(rows, what)
        if what == _TIME and (last := _once_measured(rows, sizes)) is not None:
            found.setdefault(FUSED, {})[max(sizes.lengths)] = last
        before = {name: found.pop(name) for name in (LINEAR, FUSED, WRITTEN_OUT) if name in found}
        peers = {name: found.pop(name) for name in _peers.PEERS if name in found}
        drawn.append(path.with_stem(f"{path.stem}-{what}"))
        others = [found, peers]
        pictures.logarithmic(drawn[-1], before, others=others, x="tokens", y=f"{what} ({unit})", title=title)
    return drawn


def lines(rows: list[Row], what: str) -> dict[str, dict[int, float]]:
    """What the rows say of time or memory: who -> length -> how much."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        point, _, measured = row.what.rpartition(" tokens: ")
        who, _, length = point.rpartition(", ")
        if measured == what and length.replace(",", "").isdecimal():
            found.setdefault(who, {})[int(length.replace(",", ""))] = row.figure
    return found

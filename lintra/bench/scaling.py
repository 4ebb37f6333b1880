"""`lintra bench scaling`: time and memory of attention, forward + backward, against the length.

Figure 1 of Katharopoulos et al. 2020, arXiv:2006.16236, with every mechanism, causal where it can be. All
lengths have the same number of tokens, in fewer and longer sequences, while that leaves one; every figure is
for one sequence. Memory is the peak of a call above what a process of its own held before it. Points that
would take more time or memory than there is are left out, and a row says so.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lintra import pictures
from lintra.allocator import available
from lintra.bench import options, points
from lintra.bench.calls import Call, Inputs
from lintra.bench.points import FUSED, WRITTEN_OUT, Cost, Point
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, finish_on, interleaved

MEASURES = ("lintra/native", "lintra/ops", "lintra/attention")
LINEAR = "linear"
WITHIN = (0.95, 1.05)  # the exponent of what grows linearly
FREE = 0.5  # the part of the free memory that a call may need: what others freed stays with the process
LONG = 1.0  # a call this long in seconds needs no warm-up call
_TIME, _MEMORY = "time", "memory"


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of this benchmark."""

    device: Literal["cpu", "cuda"] = "cpu"  # where the tensors are


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amount of work that is timed."""

    lengths: tuple[int, ...] = tuple(2**i for i in range(9, 17))
    tokens: int | None = None  # of a call; None: 8,192 on a CPU, 65,536 on a GPU
    heads: int = 8
    dim: int = 64
    seconds: float = 15.0  # a call that is likely to take longer is left out
    fit_from: int = 2048  # tokens; shorter sequences do not count for the exponents
    rounds: int = 3
    device: Literal["cpu", "cuda"] = "cpu"
    names: tuple[str, ...] = ()  # of the contestants; none: all

    @property
    def turns(self) -> int:
        """Return what `progress` counts: contestants whose memory is measured, then rounds."""
        return len(self.contestants()) + self.rounds

    def contestants(self) -> list[str]:
        """Return the names of those that are measured, in order."""
        return list(self.names or points.ours())

    def point(self, who: str, length: int) -> Point:
        tokens = self.tokens or (8192 if self.device == "cpu" else 65536)
        batch = max(1, tokens // length)
        return Point(who=who, batch=batch, tokens=length, heads=self.heads, dim=self.dim, device=self.device)


QUICK = Sizes(
    lengths=(64, 128), tokens=128, heads=2, dim=16, fit_from=1, rounds=2, names=(FUSED, "lsh-1", LINEAR)
)


@dataclass(frozen=True, kw_only=True)
class Others:
    """Contestants from elsewhere, in the forms in which a call of them is needed."""

    names: Collection[str] = ()  # theirs; a failure of one is a row, not an error
    call: Callable[[Point, Inputs], Call] = points.call  # of theirs and of all that is here
    tell: str = points.TELL  # as `points.cost` takes it
    counterparts: Mapping[str, str] = field(default_factory=dict)  # theirs -> the mechanism here


def run(
    sizes: Sizes, progress: Callable[[int], None], others: Others | None = None
) -> tuple[list[Row], dict[str, Timing]]:
    """Measures everything -> the table's rows and the single timings of a call, named "WHO TOKENS".

    others: what `sizes.contestants()` names beyond `points.ours()`."""
    others = others or Others()
    if sizes.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch finds no GPU here")
    who = sizes.contestants()
    rows: list[Row] = []
    most = int(FREE * _free(sizes.device))
    costs: dict[str, dict[int, Cost]] = {}
    for each in who:
        costs[each], left_out = sweep(each, sizes, most, partial(points.cost, tell=others.tell), others.names)
        rows += left_out
        progress(len(costs))
    if FUSED in who and LINEAR in who:
        rows += _once(sizes, costs[FUSED], most)
    timings = interleaved(
        dict(_contestants(sizes, costs, others.call)),
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
    return [*rows, *_growth(rows, sizes), *_ratios(rows, sizes, others.counterparts)], timings


def _free(device: str) -> int:
    """Return the free bytes of a device; half of the machine's memory where the system does not say."""
    free = available(torch.device(device))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if free is None else free


def sweep(
    who: str,
    sizes: Sizes,
    most: int,
    cost: Callable[[Point, int], Cost] = points.cost,
    others: Collection[str] = (),
) -> tuple[dict[int, Cost], list[Row]]:
    """The cost of a call at each length within `sizes.seconds` and `most` bytes; a row for each that is not.

    It is estimated from the length before it: softmax grows with the square of the length, the memory
    of the fused one not, everything else hardly more than linearly (Long-Short more, within one doubling).
    A call of one of `others` that fails is a row too."""
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
            if who not in others:
                raise
            left_out.append(Row(f"{what}, fails with {error}; after", float(len(costs)), "lengths"))
    return costs, left_out


def _exponent(who: str, of: str) -> float:
    if who == WRITTEN_OUT or (who == FUSED and of == _TIME):
        return 2.0
    return 1.2  # 2.3 for twice the length


def _contestants(
    sizes: Sizes, costs: Mapping[str, Mapping[int, Cost]], call: Callable[[Point, Inputs], Call]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everything that could be measured, on the same queries, keys and values."""
    every = [sizes.point("", length) for length in sizes.lengths]
    longest = points.draw(max(every, key=lambda point: point.batch * point.tokens))
    for length in sizes.lengths:
        inputs = points.cut(longest, sizes.point("", length))
        for who in costs:
            if length in costs[who]:
                yield f"{who} {length}", call(sizes.point(who, length), inputs)


def _once(sizes: Sizes, costs: Mapping[int, Cost], most: int) -> list[Row]:
    """A single call of softmax at the greatest length, where it was left out: linear is compared with
    it."""
    length = max(sizes.lengths)
    if length in costs:
        return []
    point = sizes.point(FUSED, length)
    try:
        seconds = points.cost(point, most).seconds / point.batch
    except MemoryError:
        return [Row(f"{FUSED}, {length:,} tokens, one call: out of memory, had", most / 1e9, "GB")]
    return [Row(_single(length), 1e3 * seconds, "ms")]


def _single(length: int) -> str:
    return f"{FUSED}, {length:,} tokens, one call: {_TIME}"


def _once_measured(rows: list[Row], sizes: Sizes) -> float | None:
    """Return what `_once` found, if it was called for."""
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
    """The length from which one line is below another, among their common lengths; None if there is none."""
    found = None
    for n in sorted(line.keys() & yardstick.keys(), reverse=True):
        if line[n] >= yardstick[n]:
            break
        found = n
    return found


def _ratios(rows: list[Row], sizes: Sizes, counterparts: Mapping[str, str]) -> Iterator[Row]:
    """Against PyTorch's softmax, and of each contestant from elsewhere against the mechanism here."""
    times, sizes_in_memory = lines(rows, _TIME), lines(rows, _MEMORY)
    for who, line in times.items():
        if who != FUSED and (first := crossover(line, times.get(FUSED, {}))) is not None:
            yield Row(f"{who}: faster than {FUSED} from", first, "tokens")
    for peer, mine in counterparts.items():
        for what, found in ((_TIME, times), (_MEMORY, sizes_in_memory)):
            # A call as short as a test's may need no memory beyond what the process has.
            if both := [n for n in found.get(peer, {}) if found.get(mine, {}).get(n, 0.0) > 0]:
                least = min(found[peer][n] / found[mine][n] for n in both)
                yield Row(f"{peer} / {mine}: {what}, least of all lengths", least, "x", 1)
    last = max(sizes.lengths)
    exact, mine = times.get(FUSED, {}).get(last, _once_measured(rows, sizes)), times.get(LINEAR, {}).get(last)
    if exact is not None and mine is not None:
        yield Row(f"{_TIME} of {FUSED} / {LINEAR}, {last:,} tokens", exact / mine, "x", 100)


def picture(
    path: Path,
    rows: list[Row],
    timings: dict[str, Timing],
    sizes: Sizes,
    others: Collection[str] = (),
) -> list[Path]:
    """Time and memory of one sequence against its length, a picture of each; linear and softmax are in every
    panel, `others` in one of their own."""
    title = f"forward + backward of one sequence, {sizes.heads} heads of {sizes.dim}"
    saved = []
    for what, unit in ((_TIME, "ms"), (_MEMORY, "MB")):
        found = lines(rows, what)
        if what == _TIME and (last := _once_measured(rows, sizes)) is not None:
            found.setdefault(FUSED, {})[max(sizes.lengths)] = last
        before = {name: found.pop(name) for name in (LINEAR, FUSED) if name in found}
        elsewhere = {name: found.pop(name) for name in others if name in found}
        groups = {**pictures.families(found), "other libraries": elsewhere}
        saved.append(path.with_stem(f"{path.stem}-{what}"))
        pictures.logarithmic(saved[-1], before, others=groups, x="tokens", y=f"{what} ({unit})", title=title)
    return saved


def lines(rows: list[Row], what: str) -> dict[str, dict[int, float]]:
    """Return what the rows say of time or memory: who -> length -> how much."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        point, _, measured = row.what.rpartition(" tokens: ")
        who, _, length = point.rpartition(", ")
        if measured == what and length.replace(",", "").isdecimal():
            found.setdefault(who, {})[int(length.replace(",", ""))] = row.figure
    return found

"""Timing that is robust on a busy machine: all contestants in turn, many times, each time in another
order."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """The seconds of one call, once for every round."""

    seconds: tuple[float, ...]
    calls: int  # averaged in each of them

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def as_json(self) -> dict[str, object]:
        low, median, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return {
            "median": median,
            "quartiles": [low, high],
            "calls": self.calls,
            "seconds": list(self.seconds),
        }


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    at_least: float = 0.02,
    settle: float = math.inf,
    progress: Callable[[int], None] = lambda done: None,
    finish: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Run every contestant once in each of `rounds` rounds, in random order, and return a Timing for each.

    A contestant that takes less than `at_least` seconds is called several times in a row and the mean is
    taken. Each is called twice beforehand, to warm up and to see how long it takes, and once untimed before
    each of its turns; one whose first call takes `settle` seconds is spared all but that call: a call
    that long hardly depends on what ran before it. `finish` waits for what calls have only begun, before the
    clock is read. At least 2 rounds.
    """
    slow = {name for name, each in contestants.items() if _seconds(each, 1, finish) >= settle}
    calls = {
        name: 1 if name in slow else _calls(each, at_least, finish) for name, each in contestants.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order, shuffle = list(contestants), random.Random(0).shuffle
    for done in range(rounds):
        shuffle(order)
        for name in order:
            if name not in slow:
                contestants[name]()  # not timed: its memory, and the caches, are as the one before left them
            seconds[name].append(_seconds(contestants[name], calls[name], finish))
        progress(done + 1)
    return {name: Timing(tuple(seconds[name]), calls[name]) for name in contestants}


def finish_on(device: str) -> Callable[[], object]:
    """Return a function that waits for calls that a device has only begun."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def _calls(contestant: Callable[[], object], at_least: float, finish: Callable[[], object]) -> int:
    return max(1, round(at_least / max(_seconds(contestant, 1, finish), 1e-7)))


def _seconds(contestant: Callable[[], object], calls: int, finish: Callable[[], object]) -> float:
    finish()
    start = time.perf_counter()
    for _ in range(calls):
        contestant()
    finish()
    return (time.perf_counter() - start) / calls

"""Error rates of transcripts: edit distances and confidence intervals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Edits:
    """Edits that turn a reference of `length` symbols into a hypothesis. Those of several utterances add
    up."""

    substitutions: int = 0
    insertions: int = 0
    deletions: int = 0
    length: int = 0

    @classmethod
    def between(cls, reference: Sequence[Any], hypothesis: Sequence[Any]) -> "Edits":
        """The fewest edits; among equally few, those with the most substitutions.

        Levenshtein 1966, Soviet Physics Doklady 10(8), row by row: memory is that of one row.
        """
        number: dict[Any, int] = {}
        r, h = ([number.setdefault(x, len(number)) for x in text] for text in (reference, hypothesis))
        # One number for two that are minimised in this order: edits, and how many of them change the length.
        edit = len(r) + len(h) + 1
        shift = edit + 1
        steps = shift * np.arange(len(h) + 1)
        heard, row = np.array(h, int), steps
        for symbol in r:
            best = row + shift
            best[1:] = np.minimum(best[1:], row[:-1] + edit * (heard != symbol))
            row = np.minimum.accumulate(best - steps) + steps  # insertions, all of a row at once
        total, shifts = divmod(int(row[-1]), edit)
        insertions = (shifts + len(h) - len(r)) // 2
        return cls(total - shifts, insertions, shifts - insertions, len(r))

    def __add__(self, other: "Edits") -> "Edits":
        return Edits(
            self.substitutions + other.substitutions,
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.length + other.length,
        )

    @property
    def total(self) -> int:
        """Return the number of edits."""
        return self.substitutions + self.insertions + self.deletions

    @property
    def rate(self) -> float:
        """Edits per symbol of the reference, no unit; of an empty one 0 if it is right, else infinite."""
        return _rate(self.total, self.length)


def character_edits(reference: str, hypothesis: str) -> Edits:
    """Count edits between two texts by characters, of which a space is one."""
    return Edits.between(reference, hypothesis)


def word_edits(reference: str, hypothesis: str) -> Edits:
    """Count edits between two texts by words, which white space separates."""
    return Edits.between(reference.split(), hypothesis.split())


def bootstrap(
    edits: Iterable[Edits], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The interval in which the error rate of utterances like these lies, at the given level.

    Percentiles of the rates of `resamples` samples of as many utterances, drawn with replacement: an
    utterance is drawn whole, since its errors depend on each other. Bisani and Ney 2004, ICASSP. Raises
    ValueError without an utterance, for a level outside (0, 1) and resamples below 1.
    """
    counts = np.array([(each.total, each.length) for each in edits], int).reshape(-1, 2)
    if not len(counts):
        raise ValueError("edits must be of at least one utterance, got none")
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    generator = np.random.default_rng(seed)
    sums = (counts[generator.integers(len(counts), size=len(counts))].sum(0) for _ in range(resamples))
    rates = [_rate(*map(int, each)) for each in sums]
    # Percentiles are chosen among the rates: an infinite one cannot be interpolated.
    low, high = np.quantile(rates, [(1 - level) / 2, (1 + level) / 2], method="closest_observation")
    return float(low), float(high)


def _rate(errors: int, length: int) -> float:
    if not length:
        return float("inf") if errors else 0.0
    return errors / length

"""Seasons: how many rows of a series lie between one season and the next, estimated, and series made up."""

from collections.abc import Sequence

import numpy as np

_WEAKEST = 0.2  # autocorrelation of a season, and how far it must rise to it
_ALIKE = 0.9  # of the highest autocorrelation: multiples of a season reach as high
_LONGEST = 20_000  # rows that are read


def season_of(series: Sequence[np.ndarray], most: int) -> int:
    """Return the season of series [n] of values, at most so many rows; 1 where there is none.

    It is the first high peak of the autocorrelation, the mean of all series, of what a line fit leaves."""
    found = [x for values in series if (x := _autocorrelation(values[-_LONGEST:], most)) is not None]
    if not found:
        return 1
    together = np.mean([x[: min(map(len, found))] for x in found], 0)
    lowest = np.minimum.accumulate(together)
    peaks = [
        lag
        for lag in range(2, len(together) - 1)
        if together[lag - 1] < together[lag] >= together[lag + 1]
        and together[lag] >= _WEAKEST
        and together[lag] - lowest[lag] >= _WEAKEST
    ]
    if not peaks:
        return 1
    highest = max(together[lag] for lag in peaks)
    return next(lag for lag in peaks if together[lag] >= _ALIKE * highest)


def seasonal_series(rows: int, season: int, seed: int) -> np.ndarray:
    """Return a made-up series [rows]: a level, a trend, a season of two waves that grows with the level, and
    noise that remembers the row before it."""
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, rows], np.uint64)))
    place = np.arange(rows)
    level = draw.uniform(20, 200) * (1 + draw.uniform(-0.3, 0.6) * place / rows)
    phases, sizes = draw.uniform(0, 2 * np.pi, 2), np.array([0.35, 0.15]) * draw.uniform(0.6, 1.2, 2)
    waves = sum(
        size * np.sin(2 * np.pi * k * place / season + phase)
        for k, size, phase in zip((1, 2), sizes, phases, strict=True)
    )
    noise = 0.05 * draw.normal(size=rows)
    for i in range(1, rows):
        noise[i] += 0.6 * noise[i - 1]
    return level * (1 + waves + noise)


def _autocorrelation(values: np.ndarray, most: int) -> np.ndarray | None:
    """Return the autocorrelation at lags 0 .. most + 1; None of too few rows or of a straight line."""
    rows = len(values)
    most = min(most + 1, rows // 2)
    place = np.arange(rows) - (rows - 1) / 2
    left = values - values.mean()
    if most < 3:
        return None
    left = left - place * (left @ place) / (place @ place)
    if left.std() <= 1e-9 * np.abs(values).max():
        return None
    spectrum = np.abs(np.fft.rfft(left, 2 * rows)) ** 2
    products = np.fft.irfft(spectrum)[: most + 1]
    # Of fewer rows, less: a long lag must not look weaker than it is.
    return products / products[0] * rows / (rows - np.arange(most + 1))

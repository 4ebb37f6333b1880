"""Windows of series: pieces of a context and what follows it, held out by time."""

from collections.abc import Sequence

import numpy as np
import torch

from lintra.tasks._synthetic import generator
from lintra.tasks.base import Batch, DataError, Samples
from lintra.tasks.datasets.time_series import Series

_CROPS = 1_000_000  # in an epoch


def held_out(rows: int, horizon: int) -> int:
    """Return how many rows at the end of a series are tested on, and as many before them validated on."""
    return max(horizon, rows // 10)


def rows_needed(context: int, horizon: int) -> int:
    """Return the fewest rows from which on every series has a window to train on beside those held out."""
    window = context + horizon
    # Of every ten rows a tenth for testing and one for validation leave eight.
    return max(window + 2 * horizon, window + (window - 1) // 8 * 2)


def check_rows(series: Sequence[Series], context: int, horizon: int, where: str) -> None:
    """Raise DataError unless each series is long enough to be trained and tested on."""
    needed = rows_needed(context, horizon)
    for each in series:
        if len(each.values) < needed:
            raise DataError(
                f"{where}: the series {each.name!r} has {len(each.values):,} rows, and a context of "
                f"{context:,} and a horizon of {horizon:,} need {needed:,}: take more rows, or train with "
                "a smaller context or horizon"
            )


class Windows(Samples):
    """Samples {"values": [t] float64, "counted": [t] bool, "series", "first": int64}; t = context + horizon.

    counted: the rows whose predictions are scored. series, first: where the window is from.
    """

    def __init__(self, series: Sequence[Series], context: int, horizon: int, counted_from: int):
        self.series, self.context, self.horizon = series, context, horizon
        self.counted = torch.arange(context + horizon) >= counted_from

    def place(self, index: int) -> tuple[int, int]:
        """Return the number of a sample's series, and the row that it begins with."""
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        places = [self.place(range(len(self))[i]) for i in indices]
        rows = self.context + self.horizon
        values = np.stack([self.series[which].values[first : first + rows] for which, first in places])
        number, first = torch.tensor(places).T.contiguous()
        counted = self.counted.expand(len(places), -1).clone()
        return {"values": torch.from_numpy(values), "counted": counted, "series": number, "first": first}


class RandomWindows(Windows):
    """Windows anywhere in the training rows; each follows from `seed` and its number."""

    def __init__(self, series: Sequence[Series], context: int, horizon: int, seed: int):
        super().__init__(series, context, horizon, context // 2)
        self.seed = seed
        ends = [len(x.values) - 2 * held_out(len(x.values), horizon) for x in series]
        self.before = np.cumsum([0] + [end - context - horizon + 1 for end in ends])

    def __len__(self) -> int:
        return _CROPS

    def place(self, index: int) -> tuple[int, int]:
        window = int(generator(self.seed, index).integers(self.before[-1]))
        series = int(np.searchsorted(self.before, window, side="right")) - 1
        return series, window - int(self.before[series])


class HeldOutWindows(Windows):
    """Windows whose horizons lie one after the other in a held-out part; their contexts reach before it.

    part: 1 for the last part of each series, 2 for the one before it.
    """

    def __init__(self, series: Sequence[Series], context: int, horizon: int, part: int):
        super().__init__(series, context, horizon, context)
        places = []
        for number, each in enumerate(series):
            held = held_out(len(each.values), horizon)
            end = len(each.values) - (part - 1) * held
            firsts = [end - (i + 1) * horizon - context for i in range(held // horizon)]
            places += [(number, first) for first in reversed(firsts)]
        # In a random order, on which the fingerprints of runs depend.
        self.places = [places[i] for i in np.random.default_rng(0).permutation(len(places))]

    def __len__(self) -> int:
        return len(self.places)

    def place(self, index: int) -> tuple[int, int]:
        return self.places[index]

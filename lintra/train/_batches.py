"""Which samples make up the batch of a step: a pure function of (seed, step), so nothing need be saved."""

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler


def seed_of(*numbers: int) -> int:
    """One well-mixed 63-bit seed out of several non-negative numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


class StepSampler(Sampler[list[int]]):
    """The sample numbers of every step from `start` on, without end.

    Epoch after epoch of `samples` numbers, each in the order of a permutation drawn from (seed, epoch), is
    laid out in one line and cut into batches of `batch`; a batch may reach into the next epoch. Of each
    batch, the process `rank` of `world` gets its contiguous share. Raises ValueError if there are no
    samples or `world` does not divide `batch`.
    """

    def __init__(self, samples: int, batch: int, *, seed: int, start: int = 0, rank: int = 0, world: int = 1):
        if samples < 1:
            raise ValueError("there must be at least 1 sample to train on, got 0")
        if batch < 1 or batch % world:
            raise ValueError(f"batch must be a positive multiple of the {world} devices, got {batch}")
        self.samples, self.batch, self.seed, self.start = samples, batch, seed, start
        self.rank, self.share = rank, batch // world
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.of_step, itertools.count(self.start))

    def of_step(self, step: int) -> list[int]:
        """This process's sample numbers at `step` (from 0)."""
        first = step * self.batch + self.rank * self.share
        places = (divmod(place, self.samples) for place in range(first, first + self.share))
        return [int(self._order(epoch)[i]) for epoch, i in places]

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.samples)

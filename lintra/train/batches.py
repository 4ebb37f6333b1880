"""Batches of samples: a pure function of (seed, step), so that nothing need be saved."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import isqrt

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from lintra.tasks import Batch

BUCKET = 512  # samples of a shuffled epoch that are sorted by length together
SHUFFLED = 2**20  # samples whose order is drawn at once and kept, as 8 MB an epoch
ROUNDS = 6  # of a permutation that is not kept; at least four are needed to mix both halves well
_WORD = 2**64 - 1


def seed_of(*numbers: int) -> int:
    """Return one well-mixed 63-bit seed from several non-negative numbers; zeros after them may not change
    it."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


class Permutation:
    """A permutation of 0 .. n - 1 that follows from a key. Each place of it is computed by itself, and
    nothing is kept, however large n is.

    A Feistel network (Luby and Rackoff 1988, SIAM Journal on Computing 17(2), section 3) on the two digits of
    a number to the base ceil(sqrt(n)); what comes out at n or more goes in again (cycle walking: Black and
    Rogaway 2002, CT-RSA, section 3). Its rounds mix as SplitMix64 does (Steele et al. 2014, OOPSLA). A
    shuffle, not a cipher.
    """

    def __init__(self, n: int, *key: int):
        self.n, self._base = n, isqrt(max(0, n - 1)) + 1
        self._keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).tolist()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.n:
            raise IndexError(f"place must lie in 0 .. {self.n - 1}, got {place}")
        while (place := self._once(place)) >= self.n:
            pass
        return place

    def _once(self, number: int) -> int:
        left, right = divmod(number, self._base)
        for key in self._keys:
            left, right = right, (left + _mixed(right + key)) % self._base
        return left * self._base + right


def _mixed(x: int) -> int:
    x &= _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


class StepSampler(Sampler[list[int]]):
    """The sample numbers of every step from `start` on, without end.

    Epoch after epoch of `samples` numbers, each in the order of a permutation sampled from (seed, epoch), is
    laid out in one line and cut into batches of `batch`; a batch may reach into the next epoch. Of each
    batch, the process `rank` of `world` gets its contiguous share. The order of more than SHUFFLED samples is
    a `Permutation`, for which memory does not grow. Raises ValueError if there are no samples or `world`
    does not divide `batch`.
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

    def _permutation(self, epoch: int) -> np.ndarray | Permutation:
        if self.samples > SHUFFLED:
            return Permutation(self.samples, self.seed, epoch)
        return np.random.default_rng((self.seed, epoch)).permutation(self.samples)


class LengthSampler(Sampler[list[int]]):
    """Sampler of batches of samples of different lengths: every step takes at most `tokens`, padding
    included, but for a sample that has more by itself.

    Each epoch is a permutation sampled from (seed, epoch), sorted by length inside buckets of it and cut into
    batches of similar lengths, in an order sampled likewise. The epochs are laid out in one line, and every
    process takes one batch a step from it, with its share of the tokens. The place of a step is found by
    counting the batches of all epochs before it, which takes milliseconds an epoch of 10,000 samples. Raises
    ValueError if there are no samples or fewer tokens than processes.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        tokens: int,
        *,
        seed: int,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
    ):
        if not len(lengths):
            raise ValueError("there must be at least 1 sample to train on, got 0")
        if tokens < world:
            raise ValueError(f"a batch must hold at least 1 token for each of {world} devices, got {tokens}")
        self.lengths, self.tokens, self.seed, self.start = np.asarray(lengths), tokens // world, seed, start
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[list[int]]:
        line = itertools.chain.from_iterable(map(self.epoch, itertools.count()))
        return itertools.islice(line, self.start * self.world + self.rank, None, self.world)

    def epoch(self, number: int) -> list[list[int]]:
        """The batches of an epoch (from 0), those of all processes, in their order."""
        draw = np.random.default_rng((self.seed, number))
        order = draw.permutation(len(self.lengths))
        batches = []
        for first in range(0, len(order), BUCKET):
            bucket = order[first : first + BUCKET]
            near = of_similar_length(self.lengths[bucket], self.tokens)
            batches += [bucket[places].tolist() for places in near]
        return [batches[i] for i in draw.permutation(len(batches))]


def share(batches: Sequence[list[int]], rank: int, world: int) -> tuple[list[list[int]], int]:
    """The batches of one process, and how many of them, the first ones, count.

    Every process takes equally many, since all must take their steps together: one that has no batch left
    repeats another's.
    """
    own = list(batches[rank::world])
    most = -(-len(batches) // world)
    return [*own, *batches[: most - len(own)]], len(own)


def parts(batch: Batch, count: int, weigh: Callable[[Batch], Tensor]) -> list[tuple[Batch, Tensor]]:
    """Cut a batch into `count` batches of about as many samples, each with its weight.

    Every process must take equally many: where there are fewer samples, the last one is repeated, with a
    weight of 0."""
    samples = len(next(iter(batch.values())))
    if count == 1:
        return [(batch, weigh(batch))]
    bounds = [place * samples // min(count, samples) for place in range(min(count, samples) + 1)]
    cut = [{name: x[a:b] for name, x in batch.items()} for a, b in itertools.pairwise(bounds)]
    weighed = [(each, weigh(each)) for each in cut]
    last, weight = weighed[-1]
    return [*weighed, *[(last, torch.zeros_like(weight))] * (count - len(weighed))]


def of_similar_length(lengths: Sequence[int] | np.ndarray, tokens: int) -> list[list[int]]:
    """The places 0 .. n-1 of `lengths` [n], sorted by them and cut into batches that take at most `tokens`
    with their padding; a longer sample is a batch of its own.
    """
    batches: list[list[int]] = []
    for place in np.argsort(lengths, kind="stable").tolist():
        # Sorted, the latest is the longest.
        if batches and (len(batches[-1]) + 1) * lengths[place] <= tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches

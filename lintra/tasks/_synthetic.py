"""Samples made up on the spot: each follows from a seed and its number, so that no order matters."""

from typing import Any, ClassVar

import numpy as np

from lintra.config import fields
from lintra.tasks.base import Samples, Task

FIRST_VALIDATION = 2**32  # samples are numbered: training from 0, validation from here


def generator(seed: int, number: int) -> np.random.Generator:
    """The source of randomness of one sample."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))


class NumberedSamples(Samples):
    """Samples of a task's `config` with these numbers."""

    def __init__(self, config: Any, numbers: range):
        self.config = config
        self.numbers = numbers

    @classmethod
    def train(cls, config: Any):
        return cls(config, range(config.train_samples))

    @classmethod
    def validate(cls, config: Any):
        return cls(config, range(FIRST_VALIDATION, FIRST_VALIDATION + config.validate_samples))

    def __len__(self) -> int:
        return len(self.numbers)


class NumberedTask(Task):
    """A task on numbered samples, whose configuration says how many there are of each split."""

    samples: ClassVar[type[NumberedSamples]]
    validates_all = True

    def __init__(self, config: Any):
        self.config = config

    @property
    def train(self) -> NumberedSamples:
        return self.samples.train(self.config)

    @property
    def validate(self) -> NumberedSamples:
        return self.samples.validate(self.config)


def check(config: Any) -> None:
    """Raise ValueError where a task's configuration has numbers of samples or a seed out of range."""
    if not 1 <= config.train_samples <= FIRST_VALIDATION:
        raise ValueError(f"train_samples must lie in 1 .. {FIRST_VALIDATION}, got {config.train_samples}")
    fields.at_least(config, validate_samples=1)
    fields.seed(config, "data_seed")

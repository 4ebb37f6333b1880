"""Associative recall: which value belongs to this key?

A sequence is `key value key value ... key value ...`: each of the `pairs` keys once with its value, then all
of them again in another order, and the loss counts the values of the second time. A state of constant size
holds only so many pairs; softmax looks them up. Arora et al. 2023, arXiv:2312.04927, section 3.

Before it can look up anything, a model has to learn that a value belongs to the key in front of it. With
`joined` each pair is one symbol the first time, and only the lookup is left: Schlag et al. 2021,
arXiv:2102.11174, section 6.1.

With `length` the second time is spread over a sequence of that many tokens, as in the multi-query associative
recall of Arora et al.: a key stands s slots of two tokens behind the pairs with a probability that falls as
s^(gap_power - 1), and a filler stands where no pair does. Theirs has random tokens there and in place of the
answers, and draws values without replacement from thousands: here a guess of the commonest values is right
more often than one in `values`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.models import decoder
from lintra.tasks._synthetic import NumberedSamples, NumberedTask, check, generator
from lintra.tasks.base import AccuracyTask, Batch, TaskConfig


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Recall which value belongs to a key (synthetic)."""

    pairs: int = 16  # keys with a value in one sequence
    joined: bool = False  # a pair is one symbol
    keys: int = 64  # different keys, of which a sequence has some
    values: int = 64  # different values
    length: int | None = None  # tokens, with filler; None: none
    gap_power: float = 0.01  # of length: 0 soon .. 1 anywhere
    train_samples: int = 1_000_000  # sequences in an epoch
    validate_samples: int = 1_000  # sequences to validate on
    data_seed: int = 0  # another seed, other sequences

    def __post_init__(self):
        fields.check(self)
        if not 1 <= self.pairs <= self.keys:
            raise ValueError(f"pairs must lie in 1 .. keys={self.keys}, got {self.pairs}")
        fields.at_least(self, values=1)
        if self.length is not None and self.length < self.packed_length:
            raise ValueError(
                f"length must be at least {self.packed_length}, for {self.pairs} pairs twice, "
                f"got {self.length}"
            )
        if not 0 < self.gap_power <= 1:
            raise ValueError(f"gap_power must be above 0 and at most 1, got {self.gap_power}")
        check(self)

    @property
    def packed_length(self) -> int:
        """Tokens of the pairs, the first time and again."""
        return (3 if self.joined else 4) * self.pairs

    def training_preset(self) -> dict[str, Any]:
        return {"steps": 4_000, "batch": 64, "lr": 2e-3, "schedule": "cosine", "warmup": 100}

    def build(self) -> "Recall":
        return Recall(self)


class RecallSamples(NumberedSamples):
    """Samples {"tokens": [t] int64, "counted": [t] bool}: keys, then values, then pairs, then the filler."""

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = [self._row(self.numbers[index]) for index in indices]
        return {
            "tokens": torch.from_numpy(np.stack([tokens for tokens, _ in rows])),
            "counted": torch.from_numpy(np.stack([counted for _, counted in rows])),
        }

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of one sample and which of them count."""
        config = self.config
        draw = generator(config.data_seed, number)
        keys = draw.permutation(config.keys)[: config.pairs]
        values = draw.integers(config.values, size=config.pairs)
        pairs = np.stack((keys, config.keys + values), 1)
        shown = config.keys + config.values * (1 + keys) + values if config.joined else pairs.reshape(-1)
        again = draw.permutation(pairs)
        if config.length is None:
            places = np.arange(config.pairs)
            length = config.packed_length
        else:
            length = config.length
            odds = np.arange(1, (length - len(shown)) // 2 + 1) ** (config.gap_power - 1.0)
            places = draw.choice(len(odds), config.pairs, replace=False, p=odds / odds.sum())
        tokens = np.full(length, vocabulary(config) - 1)
        tokens[: len(shown)] = shown
        at = len(shown) + 2 * places
        tokens[at], tokens[at + 1] = again.T
        counted = np.zeros(length, dtype=bool)
        counted[at + 1] = True
        return tokens, counted


def vocabulary(config: Config) -> int:
    """The number of symbols: keys, values, pairs if they are joined, and a filler if there is a length."""
    joined = config.keys * config.values if config.joined else 0
    return config.keys + config.values + joined + (config.length is not None)


class Recall(NumberedTask, AccuracyTask):
    name = "recall"
    samples = RecallSamples

    @property
    def length(self) -> int:
        return self.config.packed_length if self.config.length is None else self.config.length

    def model(self, attention: AttentionPattern) -> decoder.Config:
        """2 layers, 2 heads of 32: finding a key takes one layer to join pairs and one to look them up."""
        return decoder.Config(
            vocabulary=vocabulary(self.config),
            attention=attention,
            layers=2,
            heads=2,
            width=64,
            mlp_ratio=4,
            output=decoder.Logits(),
        )

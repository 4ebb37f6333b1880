"""Associative recall: which value stood beside this key?

A sequence is `key value key value ... key value ...`: each of the `pairs` keys once with its value, then all
of them again in another order, and the loss counts the values of the second time. A state of constant size
holds so many pairs and no more; softmax looks them up. Arora et al. 2023, arXiv:2312.04927, section 3.

Before it can look up anything a model has to find that a value belongs to the key in front of it. With
`joined` the first time is one symbol a pair, and only the lookup is left: Schlag et al. 2021,
arXiv:2102.11174, section 6.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.models import decoder
from lintra.tasks._numbered import NumberedSamples, check, generator
from lintra.tasks.base import AccuracyTask, Batch, TaskConfig


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Recall which value stood beside a key (synthetic)."""

    pairs: int = 16  # keys with a value in one sequence
    joined: bool = False  # a pair is one symbol
    keys: int = 64  # different keys, of which a sequence has some
    values: int = 64  # different values
    train_samples: int = 1_000_000  # sequences in an epoch
    validate_samples: int = 1_000  # sequences to validate on
    data_seed: int = 0  # another seed, other sequences

    def __post_init__(self):
        fields.check(self)
        if not 1 <= self.pairs <= self.keys:
            raise ValueError(f"pairs must lie in 1 .. keys={self.keys}, got {self.pairs}")
        fields.at_least(self, values=1)
        check(self.train_samples, self.validate_samples, self.data_seed)

    def training_preset(self) -> dict[str, Any]:
        return {"steps": 4_000, "batch": 64, "lr": 2e-3, "schedule": "cosine", "warmup": 100}

    def build(self) -> "Recall":
        return Recall(self)


class RecallSamples(NumberedSamples):
    """Samples {"tokens": [t] int64, "counted": [t] bool}: keys, then values, then pairs."""

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = [self._tokens(self.numbers[index]) for index in indices]
        tokens = torch.from_numpy(np.stack(rows))
        counted = torch.zeros(tokens.shape, dtype=torch.bool)
        counted[:, -2 * self.config.pairs + 1 :: 2] = True
        return {"tokens": tokens, "counted": counted}

    def _tokens(self, number: int) -> np.ndarray:
        config = self.config
        draw = generator(config.data_seed, number)
        keys = draw.permutation(config.keys)[: config.pairs]
        values = draw.integers(config.values, size=config.pairs)
        pairs = np.stack((keys, config.keys + values), 1)
        shown = config.keys + config.values * (1 + keys) + values if config.joined else pairs.reshape(-1)
        return np.concatenate((shown, draw.permutation(pairs).reshape(-1)))


class Recall(AccuracyTask):
    name = "recall"
    validates_all = True

    def __init__(self, config: Config):
        self.config = config

    @property
    def length(self) -> int:
        return (3 if self.config.joined else 4) * self.config.pairs

    @property
    def train(self) -> RecallSamples:
        return RecallSamples.train(self.config)

    @property
    def validate(self) -> RecallSamples:
        return RecallSamples.validate(self.config)

    def model(self, attention: AttentionPattern) -> decoder.Config:
        """2 layers, 2 heads of 32: finding a key takes one layer to join pairs and one to look them up."""
        keys, values = self.config.keys, self.config.values
        return decoder.Config(
            vocabulary=keys + values + (keys * values if self.config.joined else 0),
            attention=attention,
            layers=2,
            heads=2,
            width=64,
            mlp_ratio=4,
            output=decoder.Logits(),
        )

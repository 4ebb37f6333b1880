"""Selective copying: repeat the symbols scattered among noise.

A sequence is `symbols` scattered among noise, a separator, and these symbols again in their order; the loss
counts only the second time. Unlike in the copy task the distance to what is copied differs from symbol to
symbol, so that a model has to select by content: Gu and Dao 2023, arXiv:2312.00752, section 3.1 and figure 2.
The second time, symbols are read as they are predicted; in the paper they are hidden.
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

NOISE, SEPARATOR = 0, 1  # the symbols are numbered from 2


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Copy the symbols among noise (synthetic)."""

    symbols: int = 14  # how many different symbols
    copied: int = 16  # symbols of one sequence
    length: int = 256  # tokens of the part with noise
    train_samples: int = 1_000_000  # sequences in an epoch
    validate_samples: int = 1_000  # sequences to validate on
    data_seed: int = 0  # another seed, other sequences

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, symbols=1, copied=1)
        if self.length < self.copied:
            raise ValueError(f"length must be at least copied={self.copied}, got {self.length}")
        check(self)

    def training_preset(self) -> dict[str, Any]:
        return {"steps": 4_000, "batch": 64, "lr": 2e-3, "schedule": "cosine", "warmup": 100}

    def build(self) -> "SelectiveCopying":
        return SelectiveCopying(self)


class SelectiveCopyingSamples(NumberedSamples):
    """Samples {"tokens": [t] int64, "counted": [t] bool}; each follows from data_seed and its number."""

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        config = self.config
        tokens = np.full((len(indices), config.length + 1 + config.copied), NOISE)
        for row, index in enumerate(indices):
            draw = generator(config.data_seed, self.numbers[index])
            places = np.sort(draw.permutation(config.length)[: config.copied])
            said = draw.integers(2, config.symbols + 2, config.copied)
            tokens[row, places] = said
            tokens[row, config.length + 1 :] = said
        tokens[:, config.length] = SEPARATOR
        counted = np.zeros(tokens.shape, dtype=bool)
        counted[:, config.length + 1 :] = True
        return {"tokens": torch.from_numpy(tokens), "counted": torch.from_numpy(counted)}


class SelectiveCopying(NumberedTask, AccuracyTask):
    name = "selective_copying"
    samples = SelectiveCopyingSamples

    @property
    def length(self) -> int:
        return self.config.length + 1 + self.config.copied

    def model(self, attention: AttentionPattern) -> decoder.Config:
        """2 layers, 2 heads of 32."""
        return decoder.Config(
            vocabulary=self.config.symbols + 2,
            attention=attention,
            layers=2,
            heads=2,
            width=64,
            mlp_ratio=4,
            output=decoder.Logits(),
        )

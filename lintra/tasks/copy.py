"""The copy task: repeat a sequence of symbols.

A sequence is `separator, s, separator, s`: s has a random length and random symbols, the loss counts
only its second appearance. Katharopoulos et al. 2020, arXiv:2006.16236, section 4.1 and figure 2.
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

SEPARATOR = 0  # the symbols are 1 .. n; the separator also fills what is left after the second s


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Copy a random sequence of symbols (the paper's)."""

    symbols: int = 10  # how many different symbols
    length: int = 128  # tokens of a whole sequence; s has length/4 up to (length-1)/2, this excluded
    train_samples: int = 1_000_000  # sequences in an epoch
    validate_samples: int = 1_000  # sequences to validate on
    data_seed: int = 0  # another seed gives other sequences

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, symbols=1)
        if self.length < 8:
            raise ValueError(f"length must be at least 8 tokens, got {self.length}")
        check(self)

    def training_preset(self) -> dict[str, Any]:
        """The paper's settings."""
        return {"steps": 10_000, "batch": 64, "lr": 1e-3, "schedule": "step", "drop_at": 3_000}

    def build(self) -> "Copy":
        return Copy(self)


class CopySamples(NumberedSamples):
    """Samples {"tokens": [t] int64, "counted": [t] bool}; each follows from data_seed and its number."""

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        tokens = np.full((len(indices), self.config.length), SEPARATOR)
        counts = np.zeros(tokens.shape, dtype=bool)
        for row, index in enumerate(indices):
            s = self._symbols(self.numbers[index])
            second = len(s) + 2
            tokens[row, 1 : second - 1] = s
            tokens[row, second : second + len(s)] = s
            counts[row, second : second + len(s)] = True
        return {"tokens": torch.from_numpy(tokens), "counted": torch.from_numpy(counts)}

    def _symbols(self, number: int) -> np.ndarray:
        """Draw the symbols of one sample, as many as chance says."""
        draw = generator(self.config.data_seed, number)
        size = draw.integers(self.config.length // 4, (self.config.length - 1) // 2)
        return draw.integers(1, self.config.symbols + 1, size)


class Copy(NumberedTask, AccuracyTask):
    name = "copy"
    samples = CopySamples

    @property
    def length(self) -> int:
        return self.config.length

    def model(self, attention: AttentionPattern) -> decoder.Config:
        """Return the paper's network: 4 layers, 8 heads of 32, feed-forward 4x."""
        return decoder.Config(
            vocabulary=self.config.symbols + 1,
            attention=attention,
            layers=4,
            heads=8,
            width=256,
            mlp_ratio=4,
            norm="post",
            position="concatenated",
            output=decoder.Logits(),
            dropout=0.1,
        )

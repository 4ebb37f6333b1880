"""Write text byte by byte: learn from any text file, or from all files of a folder.

The files of a folder, those in its folders too, are read in the order of their names, except hidden ones. The
first nine tenths of the bytes are for training, the last tenth for validation.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.models import decoder
from lintra.tasks._numbered import generator
from lintra.tasks.base import Batch, BitsTask, DataError, Samples, TaskConfig
from lintra.tasks.datasets import text_files

_CROPS = 1_000_000  # in an epoch


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Write text byte by byte (your own: --data PATH)."""

    PATHS: ClassVar = ("data",)

    data: str | None = None  # a text file (.gz, .xz too) or a folder of them
    length: int = 256  # bytes of a sequence
    data_seed: int = 0  # another seed, other pieces of the text

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, length=1)
        if not 0 <= self.data_seed < 2**64:
            raise ValueError(f"data_seed must lie in 0 .. 2^64 - 1, got {self.data_seed}")

    def training_preset(self) -> dict[str, Any]:
        """Settings for about an hour on two cores."""
        return {
            "steps": 5_000,
            "batch": 16,
            "lr": 2e-3,
            "weight_decay": 0.1,
            "schedule": "cosine",
            "warmup": 100,
        }

    def with_data(self, data: str) -> "Config":
        return replace(self, data=data)

    def build(self) -> "Text":
        return Text(self)


class Crops(Samples):
    """Pieces {"tokens": [length] int64} of a text; each follows from data_seed and its number."""

    def __init__(self, text: np.ndarray, config: Config):
        self.text, self.config = text, config

    def __len__(self) -> int:
        return _CROPS

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return _pieces(self.text, [self._first(index) for index in indices], self.config.length)

    def _first(self, index: int) -> int:
        """Return where a piece begins."""
        draw = generator(self.config.data_seed, range(_CROPS)[index])
        return int(draw.integers(len(self.text) - self.config.length + 1))


class Consecutive(Samples):
    """A text cut into pieces {"tokens": [length] int64}; what is left at its end is left out."""

    def __init__(self, text: np.ndarray, length: int):
        self.text, self.length = text, length

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return _pieces(self.text, [range(len(self))[i] * self.length for i in indices], self.length)


class Text(BitsTask):
    name = "text"
    bits = "bits_per_byte"

    def __init__(self, config: Config):
        self.config = config

    @property
    def length(self) -> int:
        return self.config.length

    @cached_property
    def train(self) -> Crops:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Crops(self._parts[0], self.config)

    @cached_property
    def validate(self) -> Consecutive:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Consecutive(self._parts[1], self.config.length)

    @cached_property
    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes for training and those for validation. Raises DataError."""
        path = text_files.named("data", self.config.data, "a text file or a folder of them")
        files = _files(path) if path.is_dir() else [path]
        text = np.frombuffer(b"".join(text_files.content(file) for file in files), np.uint8)
        cut = len(text) - len(text) // 10
        if (most := len(text) - cut) < self.config.length:
            shorter = f", or a --length of at most {most:,}" if most else ""
            raise DataError(
                f"{path} holds {len(text):,} bytes: the tenth for validation is less than one sequence. Take "
                f"{10 * self.config.length:,} bytes or more{shorter}"
            )
        return text[:cut], text[cut:]

    def model(self, attention: AttentionPattern) -> decoder.Config:
        """Small enough for two cores: 4 layers, 4 heads of 32."""
        return decoder.Config(
            vocabulary=text_files.BYTES,
            attention=attention,
            layers=4,
            heads=4,
            width=128,
            mlp_ratio=4,
            position="sinusoidal",
            output=decoder.Logits(),
            dropout=0.1,
        )

    def to_text(self, tokens: Tensor) -> list[str]:
        """Bytes [b t] -> what they say; what is no UTF-8 is shown as U+FFFD."""
        return [bytes(row).decode("utf-8", errors="replace") for row in tokens.tolist()]

    def to_tokens(self, text: str) -> Tensor:
        """The inverse for one text -> [1 t]."""
        return torch.tensor([list(text.encode("utf-8"))], dtype=torch.int64)


def _files(folder: Path) -> list[Path]:
    """All files below a folder that are not hidden, in the order of their names. Raises DataError."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place) / name for name in names if not name.startswith(".")]
    if not found:
        raise DataError(f"{folder} holds no files: name a text file or a folder of them with --data PATH")
    return sorted(found)


def _pieces(text: np.ndarray, first: Sequence[int], length: int) -> Batch:
    return {"tokens": torch.from_numpy(np.stack([text[i : i + length] for i in first])).long()}

"""Write text byte by byte, or by subword tokens: learn from any text file, or from all files of a folder.

The files of a folder, those in its folders too, are read in the order of their names, except hidden ones. The
first nine tenths of the bytes are for training, the last tenth for validation, whether they are read as bytes
or tokens, so that bits per byte can be compared. For tokens they are the bits of a token times the tokens of
a byte of the held-out text (Gao et al. 2020, arXiv:2101.00027, section 3.1).

A corpus of any size comes as a folder of shards, which `lintra prepare text` writes. It is mapped into memory
and packed: a sequence holds whole and begun documents one after the other, none of which sees another.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.io.files import expanded
from lintra.models import Decoder, decoder
from lintra.tasks._synthetic import generator
from lintra.tasks._text import COPIES, TextTask
from lintra.tasks.base import Batch, BitsTask, DataError, Samples, TaskConfig, elsewhere
from lintra.tasks.datasets import subwords, text_files, token_shards
from lintra.tasks.datasets.packed import Packed
from lintra.tokenizer import Tokenizer

_CROPS = 1_000_000  # in an epoch
_TRIED = 10_000  # tokens that are decoded, to check that the text comes back


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Write text, by bytes or tokens (your own: --data PATH)."""

    PATHS: ClassVar = ("data", "test")
    SEARCHED: ClassVar = None
    COPIES: ClassVar = COPIES

    data: str | None = None  # a text file (.gz, .xz), a folder of them, or of shards
    test: str | None = None  # a text to test on; else the held-out part
    tokenizer: str | None = None  # a tokenizer.json; else that of shards
    vocabulary: int | None = None  # number of tokens, for shards without a tokenizer
    length: int = 256  # bytes of a sequence, or tokens
    batch_tokens: int | None = None  # in a step, instead of --batch; a multiple of length
    data_seed: int = 0  # of the pieces of a text (of shards: --seed)

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, length=1, batch_tokens=1, vocabulary=1)
        if self.batch_tokens is not None and self.batch_tokens % self.length:
            raise ValueError(
                f"batch_tokens must be a multiple of length={self.length}, got {self.batch_tokens}"
            )
        if self.tokenizer is None and self.data is not None:  # so that a run keeps what its shards say
            folder = expanded(self.data)
            object.__setattr__(self, "tokenizer", _shards_tokenizer(folder))
            if self.vocabulary is None:
                object.__setattr__(self, "vocabulary", token_shards.vocabulary_of(folder))
        if self.tokenizer is not None and self.vocabulary is not None:
            raise ValueError(f"vocabulary is that of {self.tokenizer}: leave it out, got {self.vocabulary}")
        fields.seed(self, "data_seed")

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
        """This configuration with the text at `data` to test on; unchanged where it learned from that text.
        A folder of shards, of which a part is held out, takes the place of its data."""
        if token_shards.is_shards(place := expanded(data)):
            same = self.data is not None and expanded(self.data).resolve() == place.resolve()
            return replace(self, data=self.data if same else data, test=None)
        return replace(self, test=elsewhere(self.data, data))

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
    """A text cut into pieces {"tokens": [length] int64}; an incomplete last piece is left out. With
    `bytes_per_symbol`, each piece carries that figure of the whole text, too."""

    def __init__(self, text: np.ndarray, length: int, bytes_per_symbol: float | None = None):
        self.text, self.length, self.bytes_per_symbol = text, length, bytes_per_symbol

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        pieces = _pieces(self.text, [range(len(self))[i] * self.length for i in indices], self.length)
        if self.bytes_per_symbol is not None:
            pieces["bytes_per_symbol"] = torch.full((len(indices),), self.bytes_per_symbol)
        return pieces


class Parts(NamedTuple):
    """A text in symbols, bytes or tokens."""

    train: Samples
    validate: Samples
    bytes_per_symbol: float  # of what is held out
    exact: bool = True  # whether the symbols say all that the text does
    summary: str | None = None  # a line on the data, where nothing else reports them


class Text(TextTask, BitsTask):
    name = "text"
    bits = "bits_per_byte"

    def __init__(self, config: Config):
        self.config = config
        if config.batch_tokens is not None:
            self.batch = config.batch_tokens // config.length

    @property
    def vocabulary(self) -> int:
        return super().vocabulary if self.config.vocabulary is None else self.config.vocabulary

    @property
    def unit(self) -> str:
        return super().unit if self.config.vocabulary is None else "tokens"

    @property
    def length(self) -> int:
        return self.config.length

    @property
    def train(self) -> Samples:
        return self._parts.train

    @property
    def validate(self) -> Samples:
        return self._parts.validate

    @cached_property
    def test(self) -> Samples:  # pyright: ignore[reportIncompatibleMethodOverride]
        """All of the text to test on, or what is held out. Raises DataError."""
        if self.config.test is None:
            return self.validate
        whole = text_files.read_all(self._test_place(), utf8=self.tokenizer is not None)
        symbols = self._symbols(memoryview(whole))
        if len(symbols) < self.length:
            raise DataError(
                f"{self.config.test} holds {len(symbols):,} {self.unit}, less than one sequence of "
                f"{self.length:,}"
            )
        return Consecutive(symbols, self.length, len(whole) / len(symbols))

    @property
    def judged_by(self) -> Literal["test", "validate"]:
        return "validate" if self.config.test is None else "test"

    def _test_place(self) -> Path:
        """The file or folder to test on. Raises DataError."""
        if self.config.vocabulary is not None:
            raise DataError(
                f"{self.config.test} is text, and the tokens that were learned are numbers: test on shards"
            )
        return text_files.named("test", self.config.test, "a text file or a folder of them")

    def _symbols(self, text: memoryview) -> np.ndarray:
        """A text in bytes or tokens."""
        if self.tokenizer is None:
            return np.frombuffer(text, np.uint8)
        return subwords.encoded(text, self.tokenizer, self.watch)

    @cached_property
    def _parts(self) -> Parts:
        """The samples to learn from and those to validate on. Raises DataError; Error for the tokenizer."""
        folder = text_files.named("data", self.config.data, "a text file or a folder of them")
        if self.config.test is not None:
            self._test_place()
        if token_shards.is_shards(folder):
            return self._shards(folder)
        if self.config.vocabulary is not None:
            raise DataError(f"vocabulary is for shards of tokens, and {folder} is text: leave it out")
        return self._text()

    def _text(self) -> Parts:
        tokenizer, length = self.tokenizer, self.config.length
        path, *parts = text_files.split(self.config.data, utf8=tokenizer is not None)
        train, validate = map(self._symbols, parts)
        if (most := min(len(train), len(validate))) < length:
            shorter = f", or a --length of at most {most:,}" if most else ""
            raise DataError(
                f"{path} holds {len(train) + len(validate):,} {self.unit}: the tenth for validation is less "
                f"than one sequence. Take {10 * length:,} {self.unit} or more{shorter}"
            )
        size = len(parts[1]) / len(validate)
        exact = tokenizer is None or _exact(tokenizer, validate, parts[1])
        return Parts(Crops(train, self.config), Consecutive(validate, length), size, exact)

    def _shards(self, folder: Path) -> Parts:
        shards, length = token_shards.Shards(folder), self.config.length
        shards.check_tokenizer(self.tokenizer)
        if shards.vocabulary != self.vocabulary:
            raise DataError(
                f"the shards in {folder} are of {shards.vocabulary:,} tokens, not {self.vocabulary:,}: leave "
                "--vocabulary out"
            )
        size = shards.bytes_per_token
        train, validate = shards.train, shards.validate
        summary = (
            f"{folder}: {train.documents:,} documents of {len(train):,} {self.unit} to learn from, "
            f"{validate.documents:,} of {len(validate):,} held out"
        )
        samples = (Packed(train, length), Packed(validate, length, spread=True))
        return Parts(*samples, size, shards.exact, summary)

    def notices(self, folder: Path) -> list[str]:
        found = [] if self._parts.summary is None else [self._parts.summary]
        if self.tokenizer is None:
            return found
        size = self._parts.bytes_per_symbol
        found += [f"tokenizer: {self.vocabulary:,} tokens, {size:.2f} bytes each in what is held out"]
        if not self._parts.exact:
            found.append(
                "The tokenizer does not keep all of the text: compare bits/byte with those of the same "
                "tokenizer only"
            )
        return found

    def per_sample(self, model: Decoder, batch: Batch) -> dict[str, Tensor]:
        found = super().per_sample(model, batch)
        if self.config.vocabulary is not None:
            return {"bits_per_token": found.pop(self.bits), **found}
        if self.tokenizer is None:
            return found
        each = found.pop(self.bits)
        size = batch.get("bytes_per_symbol")
        size = self._parts.bytes_per_symbol if size is None else size.to(each)
        return {self.bits: each / size, "bits_per_token": each, **found}

    def check(self, model: decoder.Config) -> None:
        super().check(model)
        packed = self.config.data is not None and token_shards.is_shards(expanded(self.config.data))
        if packed and not model.start:
            raise DataError(
                "the first token of each document is predicted from the start symbol: build the decoder with "
                "start=True"
            )

    def model(self, attention: AttentionPattern) -> decoder.Config:
        """Return a network small enough for two cores: 4 layers, 4 heads of 32."""
        return decoder.Config(
            vocabulary=self.vocabulary,
            attention=attention,
            layers=4,
            heads=4,
            width=128,
            mlp_ratio=4,
            position="sinusoidal",
            output=decoder.Logits(),
            dropout=0.1,
        )

    def decode(self, symbols: Sequence[int]) -> str:
        """Return symbols as text; a part of a character is shown as U+FFFD, tokens without a tokenizer by
        their numbers."""
        if self.config.vocabulary is not None:
            return " ".join(map(str, symbols))
        if self.tokenizer is None:
            return bytes(symbols).decode("utf-8", errors="replace")
        return self.tokenizer.decode(symbols)

    def to_tokens(self, text: str) -> Tensor:
        """Return the symbols of a text, the inverse of `decode`, as [1 t]."""
        if self.config.vocabulary is not None:
            symbols = _numbers(text, self.config.vocabulary)
        else:
            symbols = list(text.encode("utf-8")) if self.tokenizer is None else self.tokenizer.encode(text)
        return torch.tensor([symbols], dtype=torch.int64)


def _shards_tokenizer(folder: Path) -> str | None:
    """Return the tokenizer in a folder of shards; None where there is none, or another folder."""
    file = folder / token_shards.TOKENIZER
    return str(file) if os.path.isfile(file) and token_shards.is_shards(folder) else None


def _numbers(text: str, vocabulary: int) -> list[int]:
    """Return tokens that are given by their numbers. Raises DataError for others."""
    for each in text.split():
        if not each.isdecimal() or int(each) >= vocabulary:
            raise DataError(f"tokens must be numbers below {vocabulary:,}, with spaces between, got {each!r}")
    return list(map(int, text.split()))


def _exact(tokenizer: Tokenizer, tokens: np.ndarray, text: memoryview) -> bool:
    """Return whether the first tokens of a text decode to it; the last character may be cut."""
    said = (
        tokenizer.decode(tokens[:_TRIED].tolist()).encode().removesuffix("\N{REPLACEMENT CHARACTER}".encode())
    )
    return text[: len(said)] == said


def _pieces(text: np.ndarray, first: Sequence[int], length: int) -> Batch:
    return {"tokens": torch.from_numpy(np.stack([text[i : i + length] for i in first]).astype(np.int64))}

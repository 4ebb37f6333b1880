"""Shards: a folder of files of tokens, which training maps into memory and never reads as a whole.

    index.json         format, vocabulary, dtype, and the shards of "train" and "validate" in their order
    tokenizer.json     the tokenizer, if there is one
    NAME.tokens        the tokens of a shard, one document after the other, little-endian unsigned integers
    NAME.ends          where its documents end, counted in tokens of the shard: little-endian int64

docs/data.md describes the format for other programs.
"""

import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lintra.config import fields
from lintra.io.files import Error, has_tokens, read_json
from lintra.tasks.base import DataError
from lintra.tasks.datasets.text_files import BYTES
from lintra.tokenizer import Tokenizer

FORMAT = 1
INDEX, TOKENIZER = "index.json", "tokenizer.json"
SPLITS = ("train", "validate")
ENDS = np.dtype("<i8")
_DTYPES = ("uint8", "uint16", "uint32")
_FIELDS = {
    "format": int,
    "vocabulary": int,
    "dtype": str,
    "tokenizer": str | None,
    **dict.fromkeys(SPLITS, list),
}
_MAPPED = 4_096  # files at a time: systems allow some ten thousand
_READ = 2**24  # bytes of a file that is checked, at once


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard's entry in the index."""

    name: str  # of its files, without suffix
    tokens: int
    documents: int
    bytes: int | None = None  # of the text that the tokens are of; None: not known
    crc32: dict | None = None  # of each file, eight hexadecimal digits; None: not known

    def __post_init__(self):
        fields.check(self)
        fields.not_negative(self, "tokens", "documents")
        _plain("name", self.name)

    @classmethod
    def of(cls, entry: Any) -> "Shard":
        """Return the shard of an entry; other fields are ignored. Raises TypeError, ValueError."""
        fields.check_one("a shard", dict, entry)
        return cls(**{name: entry.get(name) for name in cls.__dataclass_fields__})


class Line:
    """The tokens of a split, one shard after the other."""

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: np.dtype, vocabulary: int):
        self.folder, self.shards, self.dtype, self.vocabulary = folder, shards, dtype, vocabulary
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64)
        self._documents = np.cumsum([0, *(shard.documents for shard in shards)], dtype=np.int64)
        self._map = lru_cache(_MAPPED)(self._mapped)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def documents(self) -> int:
        """The number of documents."""
        return int(self._documents[-1])

    def read(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens from `first` up to `last`, and for each the number of its document, both int64.
        Raises DataError for damaged files."""
        tokens, documents = np.empty((2, last - first), np.int64)
        number = int(np.searchsorted(self._starts, first, side="right")) - 1
        place = first
        while place < last:
            start, end = (int(x) for x in self._starts[number : number + 2])
            stop = min(last, end)
            part = slice(place - first, stop - first)
            tokens[part], documents[part] = self._read(number, place - start, stop - start)
            documents[part] += self._documents[number]
            place, number = stop, number + 1
        return tokens, documents

    def _read(self, number: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a shard, and the documents that they are of, counted in the shard."""
        if first == last:
            return np.empty((2, 0), np.int64)[0], np.empty(0, np.int64)
        file, all_ends = self._map(number, "tokens"), self._map(number, "ends")
        tokens = np.asarray(file[first:last])
        begins, finishes = (int(np.searchsorted(all_ends, x, side="right")) for x in (first, last - 1))
        ends = np.asarray(all_ends[begins : finishes + 1])
        if not len(ends) or ends[0] <= first or (np.diff(ends) < 0).any() or ends[-1] < last:
            raise self._damaged(number, "ends", "its numbers do not rise to the number of tokens")
        if tokens.max() >= self.vocabulary:
            raise self._damaged(number, "tokens", f"it has token {tokens.max():,} of {self.vocabulary:,}")
        return tokens, begins + np.searchsorted(ends, np.arange(first, last), side="right")

    def _mapped(self, number: int, kind: str) -> np.ndarray:
        """Return the numbers in a file of a shard, mapped into memory. Raises DataError."""
        file, dtype, count = self._file(number, kind)
        try:
            return np.memmap(file, dtype, mode="r", shape=(count,))
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read: {error}") from error

    def _file(self, number: int, kind: str) -> tuple[Path, np.dtype, int]:
        """Return a file of a shard, and its numbers."""
        shard = self.shards[number]
        file = self.folder / f"{shard.name}.{kind}"
        return (file, self.dtype, shard.tokens) if kind == "tokens" else (file, ENDS, shard.documents)

    def _damaged(self, number: int, kind: str, what: str) -> DataError:
        file = self._file(number, kind)[0]
        return DataError(f"{file} is damaged: {what}. Copy it again from where it was made")

    def check_sizes(self) -> None:
        """Raise DataError where a file is missing, or has more or fewer bytes than the index says."""
        for number in range(len(self.shards)):
            for kind in ("tokens", "ends"):
                file, dtype, count = self._file(number, kind)
                try:
                    found = file.stat().st_size
                except OSError as error:
                    raise DataError(
                        f"{file} is missing, a shard of {self.folder / INDEX}: copy it from where it was made"
                    ) from error
                if found != count * dtype.itemsize:
                    what = f"it has {found:,} bytes, and the index says {count * dtype.itemsize:,}"
                    raise self._damaged(number, kind, what)

    def check_all(self) -> Iterator[int]:
        """Read every file, yielding the number of bytes read each time. Raises DataError where one has
        another CRC-32 than the index says, or impossible numbers."""
        self.check_sizes()
        for number, shard in enumerate(self.shards):
            for kind in ("tokens", "ends"):
                found, latest = 0, 0
                file, dtype, _ = self._file(number, kind)
                with open(file, "rb") as content:
                    while block := content.read(_READ):
                        found = zlib.crc32(block, found)
                        numbers = np.frombuffer(block, dtype)
                        if kind == "tokens" and numbers.max() >= self.vocabulary:
                            what = f"it has token {numbers.max():,} of {self.vocabulary:,}"
                            raise self._damaged(number, kind, what)
                        if kind == "ends" and (np.diff(numbers, prepend=latest) < 0).any():
                            raise self._damaged(number, kind, "its numbers do not rise")
                        latest = int(numbers[-1])
                        yield len(block)
                if kind == "ends" and latest != shard.tokens:
                    raise self._damaged(number, kind, "it does not end with the number of tokens")
                if shard.crc32 is not None and f"{found:08x}" != (said := shard.crc32.get(kind)):
                    raise self._damaged(number, kind, f"its CRC-32 is {found:08x}, and the index says {said}")


class Shards:
    """A folder of shards. Raises DataError where its index or the size of a file is wrong."""

    def __init__(self, folder: Path):
        self.folder = folder
        content = _index(folder / INDEX)
        self.vocabulary: int = content["vocabulary"]
        self.tokenizer = folder / content["tokenizer"] if content["tokenizer"] else None
        self.are_bytes = self.tokenizer is None and self.vocabulary == BYTES
        self.exact: bool = content.get("exact", True)
        dtype = np.dtype(content["dtype"]).newbyteorder("<")
        self.train, self.validate = (Line(folder, content[split], dtype, self.vocabulary) for split in SPLITS)
        for line in (self.train, self.validate):
            line.check_sizes()
        if not len(self.train) or not len(self.validate):
            lacking = "train" if not len(self.train) else "validate"
            raise DataError(f"{folder / INDEX} has no tokens to {lacking} on: prepare more text")

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text to a token, in the held-out part; 1 for tokens without a tokenizer, which have no
        text. Raises DataError where they are not known."""
        if self.tokenizer is None:
            return 1.0
        sizes = [shard.bytes for shard in self.validate.shards if shard.bytes is not None]
        if len(sizes) < len(self.validate.shards):
            raise DataError(
                f"{self.folder / INDEX} does not say of each shard in 'validate' how many bytes of text "
                "it is: bits per byte need it"
            )
        return sum(sizes) / len(self.validate)

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Raise DataError unless this is the tokenizer of the shards; None: they have none."""
        if (tokenizer is None) != (self.tokenizer is None):
            without = "bytes" if self.are_bytes else "tokens without a tokenizer"
            what = f"tokens of {self.tokenizer}, not bytes: prepare shards of bytes"
            if tokenizer is not None:
                what = f"{without}, not tokens of {tokenizer.name}: leave --tokenizer out, or prepare others"
            raise DataError(f"the shards in {self.folder} are {what}")
        if tokenizer is None or self.tokenizer is None:
            return
        own = Tokenizer.read(self.tokenizer)
        if own.vocabulary != self.vocabulary:
            raise DataError(
                f"{self.tokenizer} has {own.vocabulary:,} tokens, and {self.folder / INDEX} says "
                f"{self.vocabulary:,}: put there the one that the shards were made with"
            )
        if own.sum != tokenizer.sum:
            raise DataError(
                f"{tokenizer.name} is not the tokenizer of the shards in {self.folder}: leave --tokenizer "
                "out, or prepare shards with it"
            )

    def check(self, report: Callable[[int], object] = lambda done: None) -> None:
        """Read every file, and raise DataError for one that is not as it was written. report: is called with
        the bytes that are read."""
        done = 0
        for line in (self.train, self.validate):
            for size in line.check_all():
                report(done := done + size)

    @property
    def size(self) -> int:
        """Bytes of all files that `check` reads."""
        lines = (self.train, self.validate)
        return sum(len(x) * x.dtype.itemsize + x.documents * ENDS.itemsize for x in lines)


def is_shards(folder: Path) -> bool:
    """Return whether there is a folder of shards at a path: one whose index.json has a vocabulary, or is
    missing beside shards, or cannot be read, in which case `Shards` says why. False for a path that this user
    may not look at."""
    if not os.path.isfile(folder / INDEX):
        return has_tokens(folder)
    try:
        content = read_json(folder / INDEX)
    except Error:
        return True
    return isinstance(content, dict) and "vocabulary" in content


def vocabulary_of(folder: Path) -> int | None:
    """Return how many tokens there are in a folder of shards without a tokenizer; None for bytes, shards with
    a tokenizer, and other folders."""
    try:
        content = _index(folder / INDEX) if is_shards(folder) else {}
    except ValueError:  # `Shards` says what is wrong
        return None
    unnamed = content.get("tokenizer", "") is None and content["vocabulary"] != BYTES
    return content["vocabulary"] if unnamed else None


def dtype_of(vocabulary: int) -> np.dtype:
    """Return the smallest type that holds the tokens of a vocabulary."""
    name = next(x for x in _DTYPES if vocabulary <= int(np.iinfo(x).max) + 1)
    return np.dtype(name).newbyteorder("<")


def _index(file: Path) -> dict[str, Any]:
    """Return what an index says, with a `Shard` for each shard. Raises DataError, and Error for no JSON."""
    if not file.is_file():
        raise DataError(f"{file} is missing: copy it again, or write the shards anew by lintra prepare text")
    content = read_json(file)
    if not isinstance(content, dict):
        raise DataError(f"{file} is not an index of shards: it is not an object")
    version = content.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise DataError(f"{file} has format {version}, and this lintra reads {FORMAT}: update lintra")
    content: dict[str, Any] = {**dict.fromkeys(_FIELDS), **content}
    try:
        for name, kind in _FIELDS.items():
            fields.check_one(name, kind, content[name])
        if version != FORMAT:
            raise ValueError(f"format must be {FORMAT}, got {version}")
        if content["dtype"] not in _DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(_DTYPES)}, got {fields.shown(content['dtype'])}"
            )
        if not 1 <= content["vocabulary"] <= int(np.iinfo(content["dtype"]).max) + 1:
            raise ValueError(f"vocabulary must fit into {content['dtype']}, got {content['vocabulary']}")
        if content["tokenizer"] is not None:
            _plain("tokenizer", content["tokenizer"])
        found: dict[str, Any] = {split: [Shard.of(each) for each in content[split]] for split in SPLITS}
        names = [shard.name for split in SPLITS for shard in found[split]]
        if len(set(names)) < len(names):
            raise ValueError("each shard must have a name of its own")
    except (TypeError, ValueError) as error:
        raise DataError(f"{file} is not an index of shards: {error}") from error
    return {**content, **found}


def _plain(name: str, value: str) -> None:
    """Raise ValueError unless a value is the name of a file in the folder."""
    if not re.fullmatch(r"[\w-][\w.-]*", value):
        raise ValueError(f"{name} must be letters, digits and any of _ . -, got {fields.shown(value)}")

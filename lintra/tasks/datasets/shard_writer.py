"""Shards (lintra/tasks/datasets/token_shards.py) written from a stream of documents."""

import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lintra.io.files import Error, remove_abandoned, write_atomically
from lintra.tasks.base import DataError
from lintra.tasks.datasets.documents import Document
from lintra.tasks.datasets.text_files import BYTES
from lintra.tasks.datasets.token_shards import ENDS, FORMAT, INDEX, SPLITS, TOKENIZER, Shard, dtype_of
from lintra.tokenizer import Tokenizer, pieces

SHARD_TOKENS = 2**26
_TOGETHER = 2**21  # bytes of documents that are encoded at once, on all threads
_COMPARED = 64  # documents that are decoded, to check that the text comes back


@dataclass
class Written:
    """Numbers of what was written."""

    shards: dict[str, list[Shard]] = field(default_factory=dict)  # of each split
    empty: int = 0  # documents without text, left out
    exact: bool = True  # whether the tokens say all that the text does

    def total(self, split: str, name: str) -> int:
        """Return the sum of a field over the shards of a split."""
        return sum(getattr(shard, name) for shard in self.shards[split])


def write_shards(
    out: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer | None,
    *,
    held_out: float = 0.01,
    shard_tokens: int = SHARD_TOKENS,
    end: int | None = None,
) -> Written:
    """Write a folder of shards, whole or not at all; in memory are some documents at a time.

    tokenizer: None for bytes. held_out: the part of the documents to validate on; a document's split follows
    from its text alone, so that copies of it are in the same one. shard_tokens: most tokens in a shard,
    unless one document has more. end: a token after each document that ends. Raises DataError where a split
    stays empty, Error where the folder exists already or cannot be written, and what reading raises.
    """
    if out.exists():
        raise Error(f"{out} exists: name another folder, or remove it first")
    remove_abandoned(out)
    vocabulary = BYTES if tokenizer is None else tokenizer.vocabulary
    written = Written()

    def write(folder: Path) -> None:
        folder.mkdir()
        writers = {split: _SplitWriter(folder, split, dtype_of(vocabulary), shard_tokens) for split in SPLITS}
        try:
            compared = 0
            for document, tokens in _encoded(documents, tokenizer):
                if not len(tokens):
                    written.empty += 1
                    continue
                if tokenizer is not None and compared < _COMPARED:
                    written.exact &= tokenizer.decode(tokens.tolist()).encode() == document.text
                    compared += 1
                split = "validate" if _place(document.text) < held_out else "train"
                if end is not None and document.ends:
                    tokens = np.append(tokens, end)
                writers[split].add(tokens, len(document.text))
        finally:
            for writer in writers.values():
                writer.close()
        written.shards = {split: writer.shards for split, writer in writers.items()}
        _refuse_empty(written, held_out)
        index = {
            "format": FORMAT,
            "vocabulary": vocabulary,
            "dtype": dtype_of(vocabulary).name,
            "tokenizer": None if tokenizer is None else TOKENIZER,
            "exact": written.exact,
            **{split: [asdict(shard) for shard in shards] for split, shards in written.shards.items()},
        }
        if tokenizer is not None:
            (folder / TOKENIZER).write_bytes(tokenizer.content)
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")

    write_atomically(out, write)
    return written


class _SplitWriter:
    """Write the documents of a split into shards of a folder, each closed before the next one is begun."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards: list[Shard] = []
        self._files: dict[str, BinaryIO] = {}

    def add(self, tokens: np.ndarray, size: int) -> None:
        """Write a document of so many bytes."""
        if self._files and self._tokens + len(tokens) > self.shard_tokens:
            self.close()
        if not self._files:
            self._name = f"{self.split}-{len(self.shards):05d}"
            files = {kind: self.folder / f"{self._name}.{kind}" for kind in ("tokens", "ends")}
            self._files = {kind: file.open("xb") for kind, file in files.items()}
            self._sums = dict.fromkeys(self._files, 0)
            self._tokens = self._documents = self._bytes = 0
        self._tokens += len(tokens)
        self._documents += 1
        self._bytes += size
        self._write("tokens", tokens.astype(self.dtype).tobytes())
        self._write("ends", np.array([self._tokens], ENDS).tobytes())

    def _write(self, kind: str, content: bytes) -> None:
        self._files[kind].write(content)
        self._sums[kind] = zlib.crc32(content, self._sums[kind])

    def close(self) -> None:
        """End the shard that is being written, if there is one."""
        if not self._files:
            return
        for file in self._files.values():
            file.close()
        self._files = {}
        shard = Shard(
            name=self._name,
            tokens=self._tokens,
            documents=self._documents,
            bytes=self._bytes,
            crc32={kind: f"{x:08x}" for kind, x in self._sums.items()},
        )
        self.shards.append(shard)


def _encoded(
    documents: Iterable[Document], tokenizer: Tokenizer | None
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yield each document with its tokens. Raises Error, with the place, for one that cannot be encoded."""
    if tokenizer is None:
        for document in documents:
            yield document, np.frombuffer(document.text, np.uint8)
        return
    for group in _groups(documents):
        parts = [list(pieces(document.text)) for document in group]
        try:
            found = iter(tokenizer.encode_all(list(itertools.chain.from_iterable(parts))))
        except Error:
            _name_the_place(group, tokenizer)
            raise
        for document, own in zip(group, parts, strict=True):
            yield document, np.concatenate([np.empty(0, tokenizer.dtype), *itertools.islice(found, len(own))])


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents that are encoded together."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.text) + 1  # so that empty ones make no endless list
        if size >= _TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group


def _name_the_place(group: list[Document], tokenizer: Tokenizer) -> None:
    """Raise Error with the place of the first document that cannot be encoded."""
    for document in group:
        try:
            tokenizer.encode(document.text.decode())
        except Error as error:
            raise Error(f"{document.place}: {error}") from error


def _place(text: bytes) -> float:
    """Return a number in [0, 1) that follows from a text, evenly spread over texts."""
    return int.from_bytes(blake2b(text, digest_size=7).digest(), "big") / 2**56


def _refuse_empty(written: Written, held_out: float) -> None:
    """Raise DataError where there is nothing to learn from, or nothing to validate on."""
    learned, judged = (written.total(split, "documents") for split in SPLITS)
    if not learned + judged:
        more = f", all {written.empty:,} documents are empty" if written.empty else ""
        raise DataError(f"there is no text to prepare{more}: name files with text in them")
    if not learned or not judged:
        which = "held out to validate on" if not judged else "left to learn from"
        how = f"--validate {held_out:g} is too {'little' if not judged else 'much'} of so few"
        raise DataError(
            f"of {learned + judged:,} documents none is {which}: {how}; or cut them into shorter ones with "
            "--document-bytes"
        )

"""Documents of text files and JSON lines, one after the other, however large the files are.

A line of a file *.jsonl or *.ndjson is a document, any other file is one. What is longer is cut
into documents at line ends. Files whose names end in .gz or .xz are decompressed on the way.
"""

import codecs
import io
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lintra.tasks.base import DataError
from lintra.tasks.datasets.data_files import JSON_LINES, opened, suffix
from lintra.tokenizer import cut

LONGEST = 2**20  # bytes of a document, about
LONGEST_LINE = 2**28  # bytes of a line of JSON, which is read as a whole


class Document(NamedTuple):
    """Text in UTF-8; any bytes where bytes are learned."""

    text: bytes
    place: str  # its place, for errors
    ends: bool = True  # False: the document it was cut from continues in the next one


def documents(
    files: Sequence[Path],
    *,
    field: str = "text",
    longest: int = LONGEST,
    utf8: bool = True,
    report: Callable[[int], object] = lambda done: None,
) -> Iterator[Document]:
    """Yield the documents of files in their order, empty ones too; a few are in memory at a time.

    field: the text in a line of JSON. longest: a document of more than twice as many bytes is cut after so
    many, at the next end of a line or, where there is none, between words or characters. utf8: refuse other
    bytes. report: is called with the bytes of the files that are read. Raises DataError with the file and
    the line.
    """
    done = 0
    for path in files:
        with opened(path) as (content, raw):
            if suffix(path) in JSON_LINES:
                found = _lines(path, content, field, longest)
            else:
                found = _texts(path, content, longest, utf8)
            for document in found:
                report(done + raw.tell())
                yield document
        done += path.stat().st_size
        report(done)


def _texts(path: Path, content: BinaryIO, longest: int, utf8: bool) -> Iterator[Document]:
    """Yield a text file, cut where it is long. Raises DataError for a file that is not text."""
    line, empty = 1, True
    for text, ends in _cut(content, longest):
        if empty:
            text = text.removeprefix(codecs.BOM_UTF8)
        if (where := text.find(b"\0")) >= 0:
            at = line + text.count(b"\n", 0, where)
            raise DataError(f"{path}, line {at:,} is not text: it has a byte 0. Name text files only")
        if utf8:
            check_utf8(path, line, text)
        yield Document(text, f"{path}, line {line:,}", ends)
        line, empty = line + text.count(b"\n"), False
    if empty:
        yield Document(b"", str(path))


def check_utf8(path: Path, line: int, text: bytes) -> None:
    """Raise DataError unless a text that begins in this line is in UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        at = line + text.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {at:,} is not in UTF-8: it has the byte {text[error.start]}"
        ) from error


def _lines(path: Path, content: BinaryIO, field: str, longest: int) -> Iterator[Document]:
    """Yield the text in each line of JSON, cut where it is long. Raises DataError."""
    for number in count(1):
        place = f"{path}, line {number:,}"
        line = content.readline(LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > LONGEST_LINE:
            raise DataError(f"{place} has more than {LONGEST_LINE:,} bytes: cut it into shorter documents")
        if not line.strip():
            continue
        check_utf8(path, number, line)
        text = _text_of(line, field, place)
        if len(text) <= 2 * longest:
            yield Document(text, place)
        else:
            yield from (Document(part, place, ends) for part, ends in _cut(io.BytesIO(text), longest))


def _text_of(line: bytes, field: str, place: str) -> bytes:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{place} must be an object {{...}}, got {line[:60].decode(errors='replace').strip()}"
        )
    if not isinstance(text := content.get(field), str):
        having = ", ".join(content) or "nothing"
        raise DataError(f"{place} has no text in {field!r}: it has {having}. Name the field with --field")
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # halves of characters, which JSON can write
        raise DataError(f"{place}: {field} must be Unicode text, it has {text[error.start]!r}") from error


def _cut(content: BinaryIO, longest: int) -> Iterator[tuple[bytes, bool]]:
    """Yield what is read in pieces of `longest` bytes or a little more, twice as many at most, and of each
    whether it is the last."""
    kept = b""
    while block := content.read(longest):
        kept += block
        while len(kept) > 2 * longest:
            place = max(cut(kept, longest, 2 * longest), longest)  # of other bytes than characters, anywhere
            yield kept[:place], False
            kept = kept[place:]
    if kept:
        yield kept, True

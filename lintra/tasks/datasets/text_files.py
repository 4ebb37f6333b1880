"""Text as bytes: reading and checking a user's files."""

import codecs
from pathlib import Path
from typing import NamedTuple

from lintra.io.files import expanded
from lintra.tasks.base import DataError
from lintra.tasks.datasets.data_files import unpack, walk
from lintra.tokenizer import character_start

BYTES = 256  # symbols


class Split(NamedTuple):
    """A text to learn from, its last tenth held out."""

    path: Path  # the file or folder it comes from
    train: memoryview
    validate: memoryview


def split(data: str | None, *, utf8: bool = False) -> Split:
    """Return the text of a file or folder, its last tenth apart.

    utf8: cut it between two characters. Raises DataError, and then also where a file is not in UTF-8.
    """
    path = named("data", data, "a text file or a folder of them")
    text = read_all(path, utf8=utf8)
    cut = len(text) - len(text) // 10
    cut = character_start(text, cut) if utf8 else cut
    view = memoryview(text)  # so that a part is not a copy
    return Split(path, view[:cut], view[cut:])


def read_all(path: Path, *, utf8: bool = False) -> bytes:
    """Return the text of a file, or of all files of a folder in the order of their names, each on lines of
    its own; some may be empty. Raises DataError; with utf8, also where one is not in UTF-8."""
    parts, files = [], files_of(path)
    for file in files:
        parts.append(content(file, may_be_empty=len(files) > 1))
        if utf8:
            decoded(parts[-1], file)
    if not any(parts):
        raise DataError(f"{path} holds no text: all of its {len(files):,} files are empty")
    ended = [part + b"\n" if part and not part.endswith(b"\n") else part for part in parts[:-1]]
    return b"".join((*ended, parts[-1]))


def named(flag: str, path: str | None, what: str) -> Path:
    """The path a user gave. Raises DataError where there is none, or it does not exist."""
    if path is None:
        raise DataError(f"which text? Name {what} with --{flag} PATH")
    place = expanded(path)
    if not place.exists():
        raise DataError(f"{flag} {path} does not exist: name {what}")
    return place


def content(path: Path, *, may_be_empty: bool = False) -> bytes:
    """The bytes of a text file without a byte order mark, decompressed if its name ends in .gz or .xz. Raises
    DataError."""
    found = unpack(path).removeprefix(codecs.BOM_UTF8)
    if not found and not may_be_empty:
        raise DataError(f"{path} is empty")
    if (where := found.find(b"\0")) >= 0:
        if found.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(f"{path} is in UTF-16: save it as UTF-8")
        raise DataError(f"{path} is not text: byte {where + 1:,} is 0. Name text files only")
    return found


def decoded(content: bytes, path: Path) -> str:
    """The text of a file in UTF-8. Raises DataError with the place of a byte that is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not in UTF-8: byte {error.start + 1:,} is {content[error.start]}. Save it as UTF-8"
        ) from error


def files_of(path: Path) -> list[Path]:
    """Return a file itself, or those that `walk` finds below a folder in the order of their names. Raises
    DataError."""
    if not path.is_dir():
        return [path]
    found = list(walk(path))
    if not found:
        raise DataError(f"{path} holds no files: name a text file or a folder of them")
    return sorted(found)

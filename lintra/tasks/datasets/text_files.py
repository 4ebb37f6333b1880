"""Text as bytes: what a user's files hold, and what may be wrong with them."""

from pathlib import Path

from lintra.tasks.base import DataError
from lintra.tasks.datasets.data_files import unpack

BYTES = 256  # symbols


def named(flag: str, path: str | None, what: str) -> Path:
    """The path a user gave. Raises DataError where there is none, or nothing is there."""
    if path is None:
        raise DataError(f"which text? Name {what} with --{flag} PATH")
    place = Path(path).expanduser()
    if not place.exists():
        raise DataError(f"{flag} {path} does not exist: name {what} with --{flag} PATH")
    return place


def content(path: Path) -> bytes:
    """The bytes of a text file, decompressed if its name ends in .gz or .xz. Raises DataError."""
    found = unpack(path)
    if not found:
        raise DataError(f"{path} is empty")
    if (where := found.find(b"\0")) >= 0:
        raise DataError(f"{path} is no text: byte {where + 1:,} is 0. Name text files only")
    return found


def decoded(content: bytes, path: Path) -> str:
    """The text of a file in UTF-8. Raises DataError with the place of a byte that is none."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not in UTF-8: byte {error.start + 1:,} is {content[error.start]}"
        ) from error

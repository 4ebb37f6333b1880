"""The lines of a text file given by a user."""

from collections.abc import Iterator
from pathlib import Path

from lintra.audio.errors import SpeechError
from lintra.io.files import refuse_irregular


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of each line that is not blank, without its end; the first is number 1.

    A byte order mark and the line ends of Windows are no part of a line. Raises SpeechError for a file that
    cannot be read or is not UTF-8.
    """
    refuse_irregular(path, SpeechError)
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                if line := _decoded(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, path, number):
                    yield number, line
    except OSError as error:
        raise SpeechError(f"{path} cannot be read: {error.strerror}") from error


def _decoded(raw: bytes, path: Path, number: int) -> str:
    try:
        return raw.decode().strip()
    except UnicodeDecodeError as error:
        raise SpeechError(f"{path}, line {number:,} is not UTF-8 text (byte {error.start + 1})") from error

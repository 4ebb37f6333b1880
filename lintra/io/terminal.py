"""What a terminal takes besides printed lines: bars, and words of a signal handler."""

import contextlib
import os
from typing import TextIO

_SHOW_CURSOR = b"\x1b[?25h"  # which a bar hides


def draws_bars(stream: TextIO) -> bool:
    """Return whether a bar can be drawn again and again in one line of a stream: on a terminal that is not a
    dumb one, whatever FORCE_COLOR says of colours."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def announce(line: str) -> None:
    """Write a line to standard error at once, as a signal handler may, which must not wait for a lock."""
    begin = _SHOW_CURSOR + b"\n" if os.isatty(2) else b""
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, begin + f"lintra: {line}\n".encode())

"""Words of a signal handler on a terminal."""

import contextlib
import os

_SHOW_CURSOR = b"\x1b[?25h"  # which a bar hides


def announce(line: str) -> None:
    """Write a line to standard error at once, as a signal handler may, which must not wait for a lock."""
    begin = _SHOW_CURSOR + b"\n" if os.isatty(2) else b""
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, begin + f"lintra: {line}\n".encode())

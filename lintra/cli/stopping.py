"""Ctrl-C and SIGTERM at work that is worth keeping as far as it is."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Stopping:
    """Signal that asked to stop, if any, and the exit code that says so."""

    signum: int | None = None

    def __call__(self) -> bool:
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        return 0 if self.signum is None else 128 + self.signum


@contextlib.contextmanager
def stopping() -> Iterator[Stopping]:
    """Inside, the first SIGINT or SIGTERM is only noted; the second one does what it did before.

    In another thread than the main one, which alone is sent signals, nothing is noted.
    """
    noted = Stopping()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(signum: int, _: Any) -> None:
        noted.signum = signum
        restore()

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    try:
        yield noted
    finally:
        restore()


def cut_short(part: str) -> str:
    """Say what is to be known of scores of a part only."""
    return f"Stopped: these are scores of {part}, which may be easier or harder than the others"

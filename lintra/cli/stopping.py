"""Ctrl-C and SIGTERM during work whose partial result is worth keeping."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from lintra.io.terminal import announce


class StopRequested(Exception):
    """Waiting ended because of a signal that asks to stop."""


class Stopping:
    """Signal that asked to stop, if any, and the exit code that says so."""

    signum: int | None = None
    raises = False  # StopRequested, at once

    def __call__(self) -> bool:
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        return 0 if self.signum is None else 128 + self.signum

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let the signal raise StopRequested inside, or at once if it came earlier: for calls that may wait
        without end."""
        self.raises = True
        try:
            if self():
                raise StopRequested
            yield
        finally:
            self.raises = False


@contextlib.contextmanager
def stopping(after: str = "") -> Iterator[Stopping]:
    """Only note the first SIGINT or SIGTERM inside; the second one has its usual effect.

    after: what is finished first, such as "batch", which a line then says; without it nothing is said.
    Outside the main thread, which alone receives signals, nothing is noted.
    """
    noted = Stopping()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def note(signum: int, _: Any) -> None:
        noted.signum = signum
        restore()
        if noted.raises:
            raise StopRequested
        if after:
            announce(f"stopping after this {after}; the same signal again ends at once")

    try:
        for signum in before:
            signal.signal(signum, note)
        yield noted
    finally:
        restore()


def cut_short(part: str) -> str:
    """Return the warning to print beside the scores of an interrupted evaluation."""
    return f"Stopped: these are scores of {part}, which may be easier or harder than the others"

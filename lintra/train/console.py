"""The console of a command that shows how far it is."""

import os

from rich.console import Console


class LastingConsole(Console):
    """Console that lets a program continue when its output can no longer be written: nobody reads it, as
    behind `| head`, its terminal is gone, or the disk of its log is full."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # for what is still to be flushed


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that prints texts as they are, in lines of any length."""
    return LastingConsole(
        stderr=stderr, quiet=quiet, soft_wrap=True, highlight=False, markup=False, emoji=False
    )


def draws_bars(shown: Console) -> bool:
    """Return whether a bar can be drawn again and again in one line: on a terminal that is not a dumb one,
    and not in a file, whatever FORCE_COLOR says of colours."""
    return shown.is_terminal and shown.file.isatty() and not shown.is_dumb_terminal

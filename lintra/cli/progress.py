"""Progress of a command: a bar on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lintra.train.clock import SECONDS_PER_LINE, clock
from lintra.train.console import console, draws_bars


@contextlib.contextmanager
def progress(what: str, total: int, unit: str, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Give a function to call with how many of the `total`, assumed to be equally long, are done; it shows
    them on stderr, so that stdout has results alone. quiet: nothing is shown."""
    shown = console(stderr=True, quiet=quiet)
    if not draws_bars(shown):
        yield _lines(shown, what, total, unit)
        return
    columns = BarColumn(bar_width=24), TextColumn("{task.description}")
    with Progress(*columns, console=shown, transient=True) as bar:
        task, start = bar.add_task(what, total=total), time.monotonic()

        def show(done: int) -> None:
            bar.update(task, completed=done, description=_text(what, done, total, unit, start))

        yield show


def _lines(shown: Console, what: str, total: int, unit: str) -> Callable[[int], None]:
    """Show progress as lines; none for short work."""
    start = spoken = time.monotonic()

    def show(done: int) -> None:
        nonlocal spoken
        if done < total and time.monotonic() - spoken >= SECONDS_PER_LINE:
            spoken = time.monotonic()
            shown.print(_text(what, done, total, unit, start))

    return show


def _text(what: str, done: int, total: int, unit: str, start: float) -> str:
    rate = done / max(time.monotonic() - start, 1e-9)
    speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"
    left = clock((total - done) / max(rate, 1e-9))
    return f"{what} {done:,}/{total:,} {unit}  {speed} {unit}/s  {left} left"

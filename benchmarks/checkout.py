"""Programs that run in a checkout of lintra, this one or an older one, and answer over pipes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lintra.bench import options

ROOT = Path(__file__).parents[1]
OLD = ", before"  # appended to the name of what is measured in the older checkout


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of a benchmark that can also measure an older lintra."""

    against: str | None = None  # a checkout of an older lintra, with its own .venv

    def __post_init__(self):
        super().__post_init__()
        if self.against is not None and not _python(Path(self.against)).exists():
            raise ValueError(f"against must be a checkout with its own .venv/bin/python, got {self.against}")


def checkouts(against: str | None) -> dict[str, tuple[Path, str]]:
    """Return the folder and the Python of this checkout, named "", and of the older one, named OLD."""
    found = {"": (ROOT, sys.executable)}
    if against:
        folder = Path(against).absolute()
        found[OLD] = (folder, str(_python(folder)))
    return found


@contextmanager
def serving(folder: Path, python: str, program: Path, *arguments: object) -> Iterator[Callable[[str], Any]]:
    """Run a program with the lintra of a checkout -> a function that sends it a line and returns its answer.

    `server(*arguments)` of the program returns the function that answers a line, with what JSON can hold.
    Raises RuntimeError where the program ends instead."""
    code = f"""
import json, runpy, sys
sys.path.insert(0, {str(folder)!r})
answer = runpy.run_path({str(program)!r})["server"](*{arguments!r})
for line in sys.stdin:
    print(json.dumps(answer(line.rstrip())), flush=True)
"""
    process = subprocess.Popen(
        [python, "-c", code],
        cwd=folder,
        env={name: x for name, x in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None

    def ask(line: str) -> Any:
        with suppress(BrokenPipeError):  # the process has ended, and answers nothing
            requests.write(line + "\n")
            requests.flush()
        answer = answers.readline()
        if not answer:
            raise RuntimeError(f"the measurement in {folder} failed: what it printed stands above")
        return json.loads(answer)

    try:
        yield ask
    finally:
        with suppress(BrokenPipeError):
            requests.close()
        process.wait()
        answers.close()


def _python(folder: Path) -> Path:
    return folder / ".venv" / "bin" / "python"

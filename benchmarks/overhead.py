"""`python -m benchmarks overhead`: the Python around a kernel, and how the library hangs together.

Counted are the frames between `model(tokens)` and the call of the native library, lintra's own calls per
layer (the difference between a forward of 8 layers and one of 4), imports of private modules and names from
outside the package that owns them, and lines of code. Timed is one token of the paper's model, for one
sequence, not fused. With --against, a checkout of an older lintra that has its own .venv, all of this is
measured there too, and the steps of both run in turns.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.checkout import OLD, Options, checkouts, serving
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved

__all__ = ["MEASURES", "QUICK", "Options", "Sizes", "run"]
MEASURES = ("lintra",)
PROBE = Path(__file__).with_name("probe.py")
FOLDERS = ("lintra", "tests", "experiments", "benchmarks", "docs")
STEP = "eager decode step"
TARGETS = {  # targets: at most this
    "frames": 20,
    "frames of ours": 8,
    "calls a layer, no gradients": 60,
    STEP: 4.8,
    "private imports across packages, lintra": 0,
    "private imports across packages, experiments": 0,
    "private imports across packages, benchmarks": 0,
    "private imports across packages, docs": 0,
    "library Python": 22_500,
}
RATIO = 4.8 / 5.7  # target: the time of a step over that of 0.1, at most


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    against: str | None = None
    layers: int = 8
    width: int = 256
    steps: int = 20  # of a turn
    rounds: int = 25


QUICK = Sizes(layers=1, width=32, steps=1, rounds=2)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Count and time everything -> the table's rows and the timings of a turn of `sizes.steps` steps."""
    trees = checkouts(sizes.against)
    with ExitStack() as stack:
        ask = {
            name: stack.enter_context(serving(*tree, PROBE, sizes.layers, sizes.width))
            for name, tree in trees.items()
        }
        counted = {name: each("counts") for name, each in ask.items()}
        contestants = {STEP + name: partial(each, f"step {sizes.steps}") for name, each in ask.items()}
        timings = interleaved(contestants, rounds=sizes.rounds, at_least=0, progress=progress)
    rows = []
    for name, (folder, _) in trees.items():
        figures = [(what, figure, "") for what, figure in counted[name].items()]
        figures.append((STEP, 1e3 * timings[STEP + name].median / sizes.steps, "ms"))
        for part in FOLDERS:
            number = len(private_imports(folder, part))
            figures.append((f"private imports across packages, {part}", number, ""))
        figures.append(("library Python", lines(folder, "testing"), "lines"))
        figures.append(("library Python without compat", lines(folder, "testing", "compat"), "lines"))
        rows += [
            Row(what + name, figure, unit, at_most=TARGETS.get(what) if name == "" else None)
            for what, figure, unit in figures
        ]
    if sizes.against:
        ratio = timings[STEP].median / timings[STEP + OLD].median
        rows.append(Row(f"{STEP} / before", ratio, "x", at_most=RATIO))
    return rows, timings


def private_imports(root: Path, part: str) -> list[str]:
    """Return the private imports across packages in a folder of a checkout, each as "FILE: NAME".

    These name a module, class or function of lintra with a leading underscore, in a file outside the package
    that the name belongs to. Imports inside programs in strings are not seen."""
    found = []
    for file in sorted((root / part).rglob("*.py")):
        path = file.relative_to(root)
        for name in _imported(file):
            words = name.split(".")
            private = next((i for i, x in enumerate(words) if x.startswith("_") and x[:2] != "__"), None)
            if words[0] == "lintra" and private is not None and not _inside(path, words[:private]):
                found.append(f"{path}: {name}")
    return found


def _imported(file: Path) -> Iterator[str]:
    """The dotted names that a file imports; several names from one private module count as one import."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if any(word.startswith("_") for word in node.module.split(".")):
                yield node.module
            else:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _inside(path: Path, owner: list[str]) -> bool:
    """Return whether a file is in the package, or is the module, that owns a name."""
    return path.parts[: len(owner)] == tuple(owner) or path.with_suffix("").parts == tuple(owner)


def lines(root: Path, *without: str) -> int:
    """Return the number of lines of lintra's Python in a checkout, without the named folders."""
    package = root / "lintra"
    files = (file for file in package.rglob("*.py") if file.relative_to(package).parts[0] not in without)
    return sum(len(file.read_text().splitlines()) for file in files)

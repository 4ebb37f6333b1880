"""`python -m benchmarks journeys`: how long it takes to get from a user's own data to a result.

Each journey is a list of commands, run one after the other in an empty folder that holds nothing but the
user's files, which are made from what comes with the repository. If a command fails, the benchmark ends with
its output. Journeys run once, because minutes, not milliseconds, are of interest.
"""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from PIL import Image

from lintra.bench.reports import Row
from lintra.bench.timing import Timing
from lintra.tasks.digits import Config as Digits

MEASURES = ("lintra/cli", "lintra/train", "lintra/tasks")
ROOT = Path(__file__).parents[1]
RECORDINGS = ROOT / "tests" / "speech" / "data"
JOURNEYS = {
    "researcher": (
        "lintra list",
        "python examples/train_hybrid.py --dir hybrid",
        "lintra generate --model hybrid --length 100 --prompt The",
    ),
    "images": (
        "lintra train image-folder --data pictures --size 8 --dir run --max-minutes 2",
        "lintra evaluate --model run --pictures seen",
        "lintra generate --model run --samples 16 --out drawn.png",
    ),
    "tables": (
        "lintra train text-classification --data reviews.csv --label-column opinion --text-column review "
        "--dir run --steps 300",
        "lintra evaluate --model run --predictions scores.jsonl",
        "lintra predict --model run new.txt",
    ),
    "texts": (
        "lintra prepare tokenizer --data texts --vocabulary 512",
        "lintra train text --data texts --tokenizer tokenizer.json --dir run --max-minutes 3",
        "lintra generate --model run --length 50 --prompt Attention",
    ),
    "series": (
        "lintra train series --data sales.csv --time-column day --dir run",
        "lintra evaluate --model run",
        "lintra predict --model run sales.csv",
    ),
    "speech": (
        "lintra transcribe 0_nicolas_2.wav 3_theo_0.wav 7_jackson_1.wav --json",
        "lintra transcribe 0_nicolas_2.wav --stream --srt",
        "lintra evaluate --model spoken-digits --data manifest.jsonl --hypotheses heard.jsonl",
    ),
    "programs": (
        "lintra export --to onnx --model mnist-small --out digits",
        "python examples/draw_onnx.py digits-onnx.json 784 28",
        "lintra export --to onnx --opset 27 --model spoken-digits --out words",
        "lintra export --to runtime --model mnist-small --out digits.lrt",
    ),
}
SAID = {"0": "zero", "3": "three", "7": "seven"}  # what a recording says, by the first letter of its name
ADJECTIVES = {"good": ("fine", "lovely", "quick"), "bad": ("dull", "broken", "slow")}
THINGS = ("book", "lamp", "chair", "film", "soup")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Steps that a journey trains; None: as many as the command does by default."""

    steps: int | None = None
    journeys: tuple[str, ...] = tuple(JOURNEYS)

    @property
    def turns(self) -> int:
        """Return the number of steps of `progress`: journeys."""
        return len(self.journeys)


QUICK = Sizes(steps=2)


def commands(name: str, sizes: Sizes) -> list[str]:
    """Return the commands of a journey, as a user types them in the repository."""
    if sizes.steps is None:
        return list(JOURNEYS[name])
    short = {"lintra train": f" --steps {sizes.steps}", "python examples/train": " --quick"}
    found = []
    for command in JOURNEYS[name]:
        more = next((flag for start, flag in short.items() if command.startswith(start)), "")
        found.append((re.sub(r" --(steps|max-minutes) \d+", "", command) if more else command) + more)
    return found


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Run every journey once -> the seconds of its commands and their sum; there are no repeated timings."""
    rows = []
    for done, name in enumerate(sizes.journeys, 1):
        with tempfile.TemporaryDirectory() as folder:
            _prepare(name, Path(folder))
            found = [
                Row(f"{name}: {command}", _timed(command, Path(folder)), "s")
                for command in commands(name, sizes)
            ]
        rows += [*found, Row(name, sum(row.figure for row in found) / 60, "minutes")]
        progress(done)
    return rows, {}


def table(report: dict[str, Any]) -> str:
    """Return a report as a table in Markdown: a row for each journey, with its commands and minutes."""
    lines, typed = ["| journey | commands | minutes |", "| --- | --- | --- |"], []
    for row in report["rows"]:
        name, _, command = row["what"].partition(": ")
        if command:
            typed.append(f"`{command}`")
        else:
            lines.append(f"| {name} | {'<br>'.join(typed)} | {row['figure']:.1f} |")
            typed = []
    return "\n".join(lines)


def _timed(command: str, folder: Path) -> float:
    """Run a command in a folder -> its seconds. Raises RuntimeError with its output if it fails."""
    program, *words = shlex.split(command)
    start = {"lintra": [sys.executable, "-m", "lintra.cli"], "python": [sys.executable]}[program]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    before = time.monotonic()
    done = subprocess.run([*start, *words], cwd=folder, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stderr.decode(errors='replace')}")
    return time.monotonic() - before


def _prepare(name: str, folder: Path) -> None:
    """Put the files that a journey's user has into a folder."""
    makers = {"images": _images, "tables": _reviews, "texts": _texts, "series": _sales, "speech": _speech}
    if name in makers:
        makers[name](folder)


def _images(folder: Path) -> None:
    (folder / "pictures").mkdir()
    for i, image in enumerate(Digits().build().images("train")[:500]):
        Image.fromarray(image.squeeze(-1)).save(folder / "pictures" / f"{i:03}.png")


def _reviews(folder: Path) -> None:
    with (folder / "reviews.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["review", "opinion"])
        for i in range(1000):
            opinion = ("good", "bad")[i % 2]
            words = ADJECTIVES[opinion][i // 2 % 3], THINGS[i // 6 % 5], ADJECTIVES[opinion][i // 30 % 3]
            writer.writerow([f"A {words[0]} {words[1]}, really {words[2]}, number {i}.", opinion])
    (folder / "new.txt").write_text("A lovely lamp, really fine.")


def _texts(folder: Path) -> None:
    (folder / "texts").mkdir()
    for file in (ROOT / "docs").glob("*.md"):
        shutil.copy(file, folder / "texts" / file.name)


def _sales(folder: Path) -> None:
    rows = [f"{date(2020, 1, 1) + timedelta(i)},{100 + i / 20 + 30 * (i % 7 > 4):.1f}" for i in range(1500)]
    (folder / "sales.csv").write_text("\n".join(["day,sold", *rows]) + "\n")


def _speech(folder: Path) -> None:
    lines = []
    for file in sorted(RECORDINGS.glob("*.wav")):
        shutil.copy(file, folder)
        lines.append(json.dumps({"audio": file.name, "text": SAID[file.name[0]]}))
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n")

"""Draws the charts on the pages again from the figures in the repository; nothing is measured.

python docs/charts.py
"""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import model, predictions, roofline, scaling
from experiments.compare import search, tables
from lintra.bench import mechanisms
from lintra.bench.reports import Row
from lintra.bench.timing import Timing

ROOT = Path(__file__).parents[1]
BENCHES = {
    "benchmarks/results/mechanisms-intel-xeon.json": mechanisms,
    "benchmarks/results/predictions.json": predictions,
    "benchmarks/results/roofline-intel-xeon.json": roofline,
    "experiments/scaling/attention.json": scaling,
    "experiments/scaling/model.json": model,
}


def draw(file: Path, bench: ModuleType) -> None:
    """Draw the pictures of a benchmark, beside its file."""
    report = _read(file)
    rows = [Row(**{name: row[name] for name in Row.__dataclass_fields__}) for row in report["rows"]]
    timings = {
        name: Timing(tuple(each["seconds"]), each["calls"])
        for name, each in report["timings_in_seconds"].items()
    }
    bench.picture(file.with_suffix(".png"), rows, timings, _sizes(bench.Sizes, report["sizes"]))


def _sizes(kind: type, content: dict[str, Any]) -> Any:
    """The dataclass that was saved, with the dataclasses in it."""
    hints = get_type_hints(kind)
    return kind(**{x: _sizes(hints[x], y) if isinstance(y, dict) else y for x, y in content.items()})


def _read(file: Path) -> Any:
    return json.loads(file.read_text())


if __name__ == "__main__":
    for name, bench in BENCHES.items():
        draw(ROOT / name, bench)
    copy, images, recall, speech = (
        ROOT / "experiments" / name for name in ("copy", "images", "recall", "speech")
    )
    tables.draw(search.read_outcomes())
    runpy.run_path(str(copy / "run.py"))["draw"]()
    runpy.run_path(str(images / "run.py"))["hours"].draw(_read(images / "hours.json"))
    recalled = _read(recall / "results.json")["scores"]
    program = runpy.run_path(str(recall / "run.py"))
    program["draw"](recalled, program["NAMES"])
    runpy.run_path(str(speech / "run.py"))["draw"](_read(speech / "results.json"))

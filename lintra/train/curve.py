"""The logs of a run, read back as curves, however often the run was resumed."""

import csv
from collections.abc import Iterator
from pathlib import Path

Curve = dict[int, float]  # value by step, in the order of the steps
MINUTES = "minutes"  # since training began or was resumed


def curves(run: Path) -> dict[str, Curve]:
    """Every logged quantity by its name, e.g. "train_loss" and "validate_loss" in nats per symbol, and the
    minutes of training until then.

    A resumed run writes a further file and repeats the steps after its checkpoint: the later file counts,
    except for the minutes, which add up.
    """
    found: dict[str, Curve] = {}
    logs = (run / "logs" / "csv").glob("version_*/metrics.csv")
    files = sorted((x for x in logs if _version(x).isdigit()), key=lambda x: int(_version(x)))
    before = 0.0
    for file in files:
        latest = 0.0
        for step, values in _rows(file):
            latest = values.get(MINUTES, latest)
            for name, value in values.items():
                found.setdefault(name, {})[step] = before + value if name == MINUTES else value
        before += latest
    return {name: dict(sorted(curve.items())) for name, curve in found.items()}


def _rows(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps of a log with their values, without a line that was cut when the run was killed."""
    with file.open(newline="") as lines:
        # Without its end, a last number may have lost digits and still be one.
        for row in csv.DictReader(line for line in lines if line.endswith(("\r", "\n"))):
            try:
                step = int(row.pop("step"))
                yield step, {name: float(value) for name, value in row.items() if value and name != "epoch"}
            except (KeyError, TypeError, ValueError):
                continue


def _version(file: Path) -> str:
    return file.parent.name.removeprefix("version_")

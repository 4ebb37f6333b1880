"""The logs of a run, read back as curves, however often the run was resumed."""

import csv
from pathlib import Path

Curve = dict[int, float]  # value by step, in the order of the steps
MINUTES = "minutes"  # since training began or was resumed


def curves(run: Path) -> dict[str, Curve]:
    """Every logged quantity by its name, e.g. "train_loss" and "validate_loss" in nats per symbol, and the
    minutes of training until then.

    A resumed run writes a further file and repeats the steps after its checkpoint: the later file counts, but
    for the minutes, which add up.
    """
    found: dict[str, Curve] = {}
    files = sorted((run / "logs" / "csv").glob("version_*/metrics.csv"), key=_version)
    before = 0.0
    for file in files:
        latest = 0.0
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                for name, value in row.items():
                    if value and name not in ("step", "epoch"):
                        if name == MINUTES:
                            latest = float(value)
                        number = before + latest if name == MINUTES else float(value)
                        found.setdefault(name, {})[int(row["step"])] = number
        before += latest
    return {name: dict(sorted(curve.items())) for name, curve in found.items()}


def _version(file: Path) -> int:
    return int(file.parent.name.removeprefix("version_"))

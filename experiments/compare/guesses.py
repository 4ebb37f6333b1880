"""Scores guesses that look up nothing: baselines of recall and of selective copying.

    python -m experiments.compare.guesses

A sequence shows its values, and each answer once it has been asked for. A guess of the value that has been
shown most often, or shown most often without being an answer so far, is right more often than chance, which
is one in the number of values.
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.compare.problems import BY_NAME, Problem
from experiments.compare.search import TEST_SAMPLES
from lintra.bench import reports
from lintra.bench.reports import Row
from lintra.tasks import recall

FOUND = Path(__file__).parent / "guesses.json"
COMMAND = "python -m experiments.compare.guesses"
PROBLEMS = ("mqar-64-16-64", "mqar-256-64-128", "copying")


def guessed(tokens: np.ndarray, counted: np.ndarray, values: range) -> tuple[int, int]:
    """Count the answers that are the commonest value shown, and those that are the commonest one left."""
    asked = np.flatnonzero(counted)
    before = tokens[: asked[0]]
    shown = np.bincount(before[(before >= values.start) & (before < values.stop)], minlength=values.stop)
    left, right = shown.copy(), [0, 0]
    for answer in tokens[asked]:
        right[0] += answer == shown.argmax()
        right[1] += answer == left.argmax()
        left[answer] -= 1
    return right[0], right[1]


def values_of(config: Any) -> range:
    """The symbols that a problem asks for."""
    if isinstance(config, recall.Config):
        return range(config.keys, config.keys + config.values)
    return range(2, 2 + config.symbols)


def scores(problem: Problem) -> tuple[float, float]:
    """The accuracies of both guesses on a problem's test sequences, in percent."""
    test = problem.judge(None).test
    batch = test.__getitems__(range(min(TEST_SAMPLES, len(test))))
    tokens, counted = batch["tokens"].numpy(), batch["counted"].numpy()
    rows = zip(tokens, counted, strict=True)
    found = [guessed(*row, values_of(problem.settings)) for row in rows]
    often, rest = 100 * np.array(found).sum(0) / counted.sum()
    return float(often), float(rest)


def main() -> None:
    rows = []
    for name in PROBLEMS:
        often, rest = scores(BY_NAME[name])
        rows.append(Row(f"{name}, the commonest value", often, "%"))
        rows.append(Row(f"{name}, the commonest value not yet answered with", rest, "%"))
    reports.write(FOUND, rows, {}, command=COMMAND)
    for row in rows:
        print(f"{row.what}: {row.figure:.1f} %")


if __name__ == "__main__":
    main()

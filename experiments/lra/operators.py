"""Guesses the value of an expression by its first operator alone: a baseline of the task `listops`.

    python -m experiments.lra.operators

The guess for each operator is the commonest value of training expressions that begin with it. It is scored on
the expressions that mechanisms are validated and tested on, and on others that are as long as the arena's.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from experiments.compare import baselines
from experiments.compare.search import TEST_SAMPLES, VALIDATION_SAMPLES
from experiments.lra.problems import ARENA
from lintra.tasks import listops
from lintra.tasks.base import Samples

FOUND = Path(__file__).parent / "operators.json"
COMMAND = "python -m experiments.lra.operators"
LEARNED = 10_000  # training expressions
NAMES = list(listops.OPERATORS)


def pairs(samples: Samples, count: int) -> list[tuple[str, int]]:
    """The first operator and the value of each of the first samples."""
    batch = samples.__getitems__(range(count))
    first = (batch["tokens"][:, 0] - listops.DIGITS).tolist()
    return [(NAMES[i], value) for i, value in zip(first, batch["label"].tolist(), strict=True)]


def guesses(learned: list[tuple[str, int]]) -> dict[str, int]:
    """The commonest value of expressions that begin with each operator."""
    values = {name: Counter(value for first, value in learned if first == name) for name in NAMES}
    return {name: counted.most_common(1)[0][0] for name, counted in values.items()}


def right(guess: dict[str, int], scored: list[tuple[str, int]]) -> float:
    """The share of expressions whose value is guessed correctly."""
    return sum(guess[first] == value for first, value in scored) / len(scored)


def main() -> None:
    problem = ARENA.by_name["listops"]
    own, arena = problem.task(None).build(), listops.Config().build()
    scores: dict[str, Any] = {}
    guess = guesses(pairs(own.train, LEARNED))
    validated, tested = pairs(own.validate, VALIDATION_SAMPLES), pairs(problem.judge(None).test, TEST_SAMPLES)
    scores[problem.title] = {
        "guess": guess,
        "validation": right(guess, validated),
        "test": right(guess, tested),
    }
    guess = guesses(pairs(arena.train, LEARNED))
    scores["ListOps of 501 to 1,999 tokens"] = {
        "guess": guess,
        "validation": right(guess, pairs(arena.validate, TEST_SAMPLES)),
    }
    found = {problem.name: {"a guess from the first operator": scores[problem.title]["test"]}}
    baselines.publish(FOUND, found, command=COMMAND, scores=scores, learned=LEARNED)


if __name__ == "__main__":
    main()

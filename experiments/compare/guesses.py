"""Scores guesses that look up nothing: baselines of recall, of selective copying and of words of S5.

    python -m experiments.compare.guesses

A sequence shows its values, and each answer once it has been asked for. A guess of the value that has been
shown most often, or of the one with the most occurrences left, where each answer takes one away, is right
more often than chance, which is one in the number of values. A word of S5 is followed for a few letters, and
from there on its state is guessed.
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.compare import baselines
from experiments.compare.problems import BY_NAME, Problem
from experiments.compare.search import TEST_SAMPLES
from lintra.tasks import recall, state_tracking

FOUND = Path(__file__).parent / "guesses.json"
COMMAND = "python -m experiments.compare.guesses"
PROBLEMS = ("mqar-64-16-64", "mqar-256-64-128", "copying")
GUESSES = ("a guess of the commonest value", "a guess of the commonest value left")
FOLLOWED = (0, 3, 4)  # letters of a word


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
    """The accuracies of both guesses on a problem's test sequences."""
    test = problem.judge(None).test
    batch = test.__getitems__(range(min(TEST_SAMPLES, len(test))))
    tokens, counted = batch["tokens"].numpy(), batch["counted"].numpy()
    rows = zip(tokens, counted, strict=True)
    found = [guessed(*row, values_of(problem.settings)) for row in rows]
    often, rest = np.array(found).sum(0) / counted.sum()
    return float(often), float(rest)


def words_followed(config: state_tracking.Config, known: int) -> float:
    """The share of states that are right, of all words, if the first `known` letters of each are followed and
    every state after them is guessed: the likeliest one, given what is known."""
    after = state_tracking.products(config.points)
    letters = state_tracking.letters(config.points, config.swaps)
    chance = np.zeros(len(after))  # of what letters after the known ones do
    chance[0] = 1  # nothing: permutations are numbered from the identity
    right = float(known)
    for _ in range(known, config.length):
        chance = np.bincount(
            after[:, letters].ravel(), np.repeat(chance / len(letters), len(letters)), minlength=len(after)
        )
        right += chance.max()
    return right / config.length


def main() -> None:
    found = {name: dict(zip(GUESSES, scores(BY_NAME[name]), strict=True)) for name in PROBLEMS}
    found["parity"] = {"any guess": words_followed(BY_NAME["parity"].settings, 0)}
    words = BY_NAME["s5"].settings
    found["s5"] = {
        f"a guess after {known} swaps" if known else "a guess at every place": words_followed(words, known)
        for known in FOLLOWED
    }
    baselines.publish(FOUND, found, command=COMMAND)


if __name__ == "__main__":
    main()

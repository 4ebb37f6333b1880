"""The guesses without a network that scores are read beside: on cases counted by hand."""

import numpy as np
import pytest
import torch

from experiments.compare import guesses
from experiments.lra import frequencies, operators
from lintra.tasks import state_tracking

REVIEWS = {"train": 400, "validate": 100, "test": 300}


def test_recall_is_guessed_from_the_values_shown():
    """Shown 4, 4 and 5; asked for 4, 4 and 5: the commonest value is right twice, what is left thrice."""
    tokens = np.array([0, 4, 1, 4, 2, 5, 0, 4, 1, 4, 2, 5])
    counted = np.zeros(12, bool)
    counted[[7, 9, 11]] = True
    assert guesses.guessed(tokens, counted, range(4, 6)) == (2, 3)
    tokens[[7, 9, 11]] = 5, 4, 4  # of 4 twice and 5 once, then of 4 twice, then of 4 once
    assert guesses.guessed(tokens, counted, range(4, 6)) == (2, 2)


def test_words_are_guessed_from_their_first_letters():
    """Of parity, no later letter tells anything: half of the states after the known ones are right."""
    parity = state_tracking.Config(points=2, length=8)
    assert guesses.words_followed(parity, 2) == pytest.approx((2 + 6 / 2) / 8)
    assert guesses.words_followed(parity, 8) == 1
    word = state_tracking.Config(points=5, swaps=True, length=1)
    assert guesses.words_followed(word, 0) == pytest.approx(1 / 11)


def test_listops_is_guessed_from_the_first_operator():
    learned = [(name, 3) for name in operators.NAMES] + [("MIN", 0)] * 2 + [("MAX", 9)] * 2
    guess = operators.guesses(learned)
    assert guess == dict.fromkeys(operators.NAMES, 3) | {"MIN": 0, "MAX": 9}
    assert operators.right(guess, [("MIN", 0), ("MIN", 1), ("MAX", 9), ("MED", 3)]) == 0.75
    first, value = operators.pairs(operators.listops.Config(shortest=5, longest=20).build().train, 1)[0]
    assert first in operators.NAMES
    assert value in range(10)


def test_bytes_and_pairs_are_counted():
    texts = [torch.tensor([65, 65, 66]), torch.tensor([7])]
    single = frequencies.singles(texts)
    assert torch.equal(single.sum(1), torch.ones(2))
    assert (single[0, 65], single[0, 66], single[1, 7]) == (2 / 3, torch.tensor(1 / 3), 1)
    common = torch.arange(64, 64 + frequencies.PAIRED)
    paired = frequencies.pairs([torch.tensor([65, 65, 66, 0, 1])], common)[0].unflatten(0, (64, 64))
    assert paired.nonzero().tolist() == [[1, 1], [1, 2], [2, 63], [63, 63]]
    assert torch.equal(paired[paired > 0], torch.full((4,), 0.25))


def test_what_a_frequency_tells_is_learned():
    """Texts with more of the first of two bytes are positive; penalties are chosen by validation."""
    generator = torch.Generator().manual_seed(0)
    x = {name: torch.rand(n, 2, generator=generator) for name, n in REVIEWS.items()}
    labels = {name: (of[:, 0] > of[:, 1]).float() for name, of in x.items()}
    found = frequencies.measure(x, labels)
    assert found["test"] > 0.95
    assert found["validation"] == max(found["searched"].values())
    assert found["reviews"] == REVIEWS
    labels["test"] = 1 - labels["test"]
    assert frequencies.measure(x, labels)["test"] < 0.05

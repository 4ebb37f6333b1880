"""ListOps: every label is the value of its expression, by an evaluator that follows the text."""

import statistics
from collections import Counter

import pytest
import torch

from lintra.tasks import listops

SMALL = listops.Config(shortest=10, longest=60, depth=4, train_samples=300, validate_samples=30)
RULES = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(statistics.median(x)), "[SM": lambda x: sum(x) % 10}


def evaluate(text):
    """The value of an expression, by recursion over its words, and its depth."""
    words = iter(text.split())

    def value(word):
        if word not in RULES:
            return int(word), 1
        arguments = []
        while (following := next(words)) != "]":
            arguments.append(value(following))
        assert 2 <= len(arguments) <= 10
        return RULES[word]([x for x, _ in arguments]), 1 + max(depth for _, depth in arguments)

    found = value(next(words))
    assert next(words, None) is None
    return found


@pytest.mark.parametrize("config", [SMALL, listops.Config(train_samples=10)])
def test_labels_are_the_values(config):
    samples = config.build().train
    batch = samples.__getitems__(range(len(samples)))
    depths = []
    for tokens, mask, label in zip(batch["tokens"], batch["mask"], batch["label"].tolist(), strict=True):
        assert config.shortest < mask.sum() < config.longest
        value, depth = evaluate(listops.written(tokens[mask].tolist()))
        assert value == label
        depths.append(depth)
    assert max(depths) == config.depth


def test_known_expressions():
    assert evaluate("[MAX 2 9 [MIN 4 7 ] 0 ]") == (9, 3)
    assert evaluate("[MED 4 5 ]") == (4, 2)
    assert listops.written([11, 2, 9, 10, 4, 7, 14, 0, 14]) == "[MAX 2 9 [MIN 4 7 ] 0 ]"


def test_every_operator_and_value_occurs():
    batch = SMALL.build().train.__getitems__(range(300))
    assert set(batch["label"].tolist()) == set(range(10))
    operators = Counter(batch["tokens"][batch["mask"]].tolist())
    assert all(operators[listops.DIGITS + i] > 100 for i in range(4))


def test_samples_follow_from_seed_and_number():
    train, validate = SMALL.build().train, SMALL.build().validate
    batch = train.__getitems__(range(300))
    one = train[17]
    assert torch.equal(one["tokens"], batch["tokens"][17][batch["mask"][17]])
    both = {tuple(x["tokens"].tolist()) for x in (train[i] for i in range(30))}
    assert not both & {tuple(validate[i]["tokens"].tolist()) for i in range(30)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 1}, "depth must be at least 2, got 1"),
        ({"arguments": 1}, "arguments must be at least 2, got 1"),
        ({"longest": 501}, "longest must be at least 5 and shortest=500"),
        ({"depth": 3, "arguments": 3}, "shortest must be below 17, the tokens of the longest expression"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        listops.Config(**options)


def test_lengths_that_never_come_are_an_error():
    config = listops.Config(shortest=1_100, longest=2_000, depth=4)  # nearly all operators have ten arguments
    with pytest.raises(ValueError, match="none has more than 1100 and fewer than 2000 tokens: change"):
        listops.draw(config, _Never())


class _Never:
    """Random numbers with which all arguments are digits."""

    def random(self, count):
        return torch.full((count,), 0.5).numpy()

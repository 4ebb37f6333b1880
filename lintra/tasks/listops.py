"""ListOps: the value of a nested expression of digits.

[MAX 2 9 [MIN 4 7 ] 0 ] is 9. Operators are MIN, MAX, MED, the median rounded down, and SM, the sum modulo 10,
of 2 to 10 arguments, each a digit or an expression (Nangia and Bowman 2018, arXiv:1804.06028). A tree is
drawn as the Long Range Arena draws its own (Tay et al. 2021, arXiv:2011.04006, section 2.2.1): an argument is
an expression with probability 1/4, none deeper than `depth`, and one that has `shortest` tokens or fewer, or
`longest` or more, is drawn again. The root is always an expression.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.models import encoder
from lintra.nn.mask import padded
from lintra.tasks._classification import ClassificationTask
from lintra.tasks._synthetic import NumberedSamples, NumberedTask, check, generator
from lintra.tasks.base import Batch, TaskConfig

DIGITS = 10  # the tokens below are these
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(np.median(values)),
    "SM": lambda values: sum(values) % DIGITS,
}
END = DIGITS + len(OPERATORS)  # the token of ]; operators are those between
VOCABULARY = END + 1
NESTED = 0.25  # probability that an argument is an expression
_FUNCTIONS = tuple(OPERATORS.values())
_AT_ONCE = 1024  # random numbers drawn together
_TRIES = 20_000  # drawings until one has a requested length


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Evaluate nested expressions (of the LRA)."""

    shortest: int = 500  # tokens of an expression: more than this
    longest: int = 2_000  # and fewer than this
    depth: int = 10  # arguments of the root have depth 2
    arguments: int = 10  # of an operator, at most
    train_samples: int = 96_000  # expressions in an epoch
    validate_samples: int = 2_000  # expressions to validate on
    data_seed: int = 0  # another seed, other expressions

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, shortest=0, depth=2, arguments=2)
        if self.longest < max(self.shortest + 2, 5):
            raise ValueError(
                f"longest must be at least 5 and shortest={self.shortest} + 2, got {self.longest}"
            )
        if self.shortest >= (most := longest_expression(self.depth, self.arguments)):
            raise ValueError(
                f"shortest must be below {most:,}, the tokens of the longest expression of depth "
                f"{self.depth} and {self.arguments} arguments, got {self.shortest}"
            )
        check(self)

    def training_preset(self) -> dict[str, Any]:
        """The batch and steps of the Long Range Arena."""
        return {
            "steps": 5_000,
            "batch": 32,
            "lr": 1e-3,
            "weight_decay": 0.1,
            "schedule": "cosine",
            "warmup": 1_000,
        }

    def build(self) -> "ListOps":
        return ListOps(self)


def longest_expression(depth: int, arguments: int) -> int:
    """Return the tokens of an expression whose operators all have `arguments`, down to `depth`."""
    size = 1
    for _ in range(depth - 1):
        size = 2 + arguments * size
    return size


class _Numbers:
    """Uniform random numbers below 1, one at a time."""

    def __init__(self, source: np.random.Generator):
        self.source = source
        self.drawn: Iterator[float] = iter(())

    def __call__(self, below: int) -> int:
        """Return an integer below."""
        return int(self.uniform() * below)

    def uniform(self) -> float:
        for x in self.drawn:
            return x
        self.drawn = iter(self.source.random(_AT_ONCE).tolist())
        return next(self.drawn)


def draw(config: Config, source: np.random.Generator) -> tuple[list[int], int]:
    """Return the tokens of an expression and its value. Raises ValueError where none is of the lengths."""
    numbers = _Numbers(source)
    for _ in range(_TRIES):
        tokens, value = _expression(config, numbers)
        if config.shortest < len(tokens) < config.longest:
            return tokens, value
    raise ValueError(
        f"of {_TRIES:,} expressions none has more than {config.shortest} and fewer than {config.longest} "
        "tokens: change shortest, longest, depth or arguments"
    )


def _expression(config: Config, numbers: _Numbers) -> tuple[list[int], int]:
    """Draw one expression of any length; one is abandoned as soon as it is too long."""
    tokens: list[int] = []
    # Of each open expression: its operator, how many arguments are to come, the values of those before.
    open_ones: list[tuple[int, int, list[int]]] = []
    nested = True
    while True:
        if nested:
            operator = numbers(len(OPERATORS))
            tokens.append(DIGITS + operator)
            open_ones.append((operator, 2 + numbers(config.arguments - 1), []))
        else:
            digit = numbers(DIGITS)
            tokens.append(digit)
            open_ones[-1][2].append(digit)
        while len(open_ones[-1][2]) == open_ones[-1][1]:
            operator, _, values = open_ones.pop()
            tokens.append(END)
            value = _FUNCTIONS[operator](values)
            if not open_ones:
                return tokens, value
            open_ones[-1][2].append(value)
        if len(tokens) >= config.longest:
            return tokens, 0
        nested = len(open_ones) < config.depth - 1 and numbers.uniform() < NESTED


class ListOpsSamples(NumberedSamples):
    """Samples {"tokens": [t] int64, "mask": [t] bool, "label": int64}; a batch is as long as its longest."""

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        config = self.config
        drawn = [draw(config, generator(config.data_seed, self.numbers[i])) for i in indices]
        tokens, mask = padded([torch.tensor(tokens) for tokens, _ in drawn])
        return {"tokens": tokens, "mask": mask, "label": torch.tensor([value for _, value in drawn])}


class ListOps(NumberedTask, ClassificationTask):
    """Ten classes, the values."""

    name = "listops"
    loss_unit = "nats an expression"
    samples = ListOpsSamples

    @property
    def length(self) -> int:
        return self.config.longest - 1

    def model(self, attention: AttentionPattern) -> encoder.Config:
        """Return a network small enough for two cores: 2 layers, 4 heads of 32, the mean over all tokens."""
        return encoder.Config(
            vocabulary=VOCABULARY,
            attention=attention,
            layers=2,
            heads=4,
            width=128,
            mlp_ratio=4,
            position="sinusoidal",
            pool="mean",
            outputs=DIGITS,
            dropout=0.1,
        )


def written(tokens: Sequence[int]) -> str:
    """Return the expression as a person writes it."""
    names = [*map(str, range(DIGITS)), *(f"[{name}" for name in OPERATORS), "]"]
    return " ".join(names[token] for token in tokens)

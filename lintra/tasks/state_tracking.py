"""State tracking: what is the product of the permutations read so far?

Every symbol is a permutation of n points, and at each the answer is the product of all up to there, the
latest one applied last: the word problem of the symmetric group S_n. Of 2 points it is parity, the sum of
bits modulo two, which a recurrence whose transitions have positive eigenvalues only cannot compute at every
length (Grazzi et al. 2024, arXiv:2411.12537, theorem 1); of 5 points it is S5, whose word problem is complete
for NC1 (Merrill et al. 2024, arXiv:2404.08819).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.models import Decoder, decoder
from lintra.tasks._synthetic import NumberedSamples, NumberedTask, check, generator
from lintra.tasks.base import Batch, TaskConfig

MOST_POINTS = 5  # 120 permutations


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Track a product of permutations: parity, S5 (synthetic)."""

    points: int = 2  # of S_n: 2 is parity, 5 is S5
    swaps: bool = False  # read only permutations that move two points or none
    length: int = 64  # permutations of a sequence
    train_samples: int = 1_000_000  # sequences in an epoch
    validate_samples: int = 1_000  # sequences to validate on
    data_seed: int = 0  # another seed, other sequences

    def __post_init__(self):
        fields.check(self)
        if not 2 <= self.points <= MOST_POINTS:
            raise ValueError(f"points must lie in 2 .. {MOST_POINTS}, got {self.points}")
        fields.at_least(self, length=1)
        check(self)

    def training_preset(self) -> dict[str, Any]:
        return {"steps": 2_000, "batch": 64, "lr": 3e-3, "schedule": "cosine", "warmup": 50}

    def build(self) -> "StateTracking":
        return StateTracking(self)


@lru_cache
def permutations(points: int) -> np.ndarray:
    """The permutations of 0 .. points-1 in lexicographic order, [n! points]; a symbol is a row's number."""
    return np.array(list(itertools.permutations(range(points))))


@lru_cache
def products(points: int) -> np.ndarray:
    """The symbol of "first a, then b" at [a, b], [n! n!]."""
    all_of = permutations(points)
    number = {tuple(row): i for i, row in enumerate(all_of.tolist())}
    after = all_of[:, all_of].transpose(1, 0, 2)  # [a b points]: b of a of each point
    flat = after.reshape(-1, points).tolist()
    return np.array([number[tuple(row)] for row in flat]).reshape(len(all_of), len(all_of))


@lru_cache
def letters(points: int, swaps: bool) -> np.ndarray:
    """The symbols that a sequence is drawn from, [m]."""
    moved = (permutations(points) != np.arange(points)).sum(1)
    return np.flatnonzero(moved <= 2) if swaps else np.arange(len(moved))


class StateSamples(NumberedSamples):
    """Samples {"tokens": [t] int64, "states": [t] int64}: permutations and their products so far."""

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        config = self.config
        table, drawn = products(config.points), letters(config.points, config.swaps)
        rows = [
            generator(config.data_seed, self.numbers[index]).integers(len(drawn), size=config.length)
            for index in indices
        ]
        tokens = drawn[np.stack(rows)]
        states = tokens.copy()
        for place in range(1, config.length):
            states[:, place] = table[states[:, place - 1], tokens[:, place]]
        return {"tokens": torch.from_numpy(tokens), "states": torch.from_numpy(states)}


class StateTracking(NumberedTask):
    """The state after every symbol, predicted at the symbol's own place: the answers are never shown."""

    name = "state_tracking"
    samples = StateSamples

    @property
    def length(self) -> int:
        return self.config.length

    def model(self, attention: AttentionPattern) -> decoder.Config:
        """2 layers, 2 heads of 32, no positions."""
        return decoder.Config(
            vocabulary=math.factorial(self.config.points),
            attention=attention,
            layers=2,
            heads=2,
            width=64,
            mlp_ratio=4,
            position="none",
            start=False,
            output=decoder.Logits(),
        )

    def loss(self, model: Decoder, batch: Batch) -> Tensor:
        return -model.output.log_prob(model(batch["tokens"]), batch["states"]).mean()

    def weight(self, batch: Batch) -> Tensor:
        return torch.tensor(batch["states"].numel(), device=batch["states"].device)

    @torch.no_grad()
    def per_sample(self, model: Decoder, batch: Batch) -> dict[str, Tensor]:
        """The loss in nats and the right answers, over all places, and how many of these there are."""
        states, params = batch["states"], model(batch["tokens"])
        log_prob = model.output.log_prob(params, states)
        right = model.output.log_probs(params).argmax(-1) == states
        return {
            "loss": -log_prob.sum(1),
            "accuracy": right.to(log_prob.dtype).sum(1),
            "weight": torch.full_like(states[:, 0], states.shape[1]),
        }

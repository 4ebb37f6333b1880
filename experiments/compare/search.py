"""Successive halving over learning rates. Each training has a file; with a file, it is never repeated.

Jamieson and Talwalkar 2016, arXiv:1502.07943, figure 1. All rates are trained with a part of the steps, the
better half of them with twice as many, and so on. The best rate with half of the steps is trained with all
steps, with other seeds than those of the search. Each rung is trained from the beginning, with a schedule of
its own length, because what counts is what a rate reaches at the end of a schedule, not half way through one.
"""

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from experiments.compare.contestants import Contestant
from experiments.compare.problems import COMPARISON, Preset, Problem, Study
from experiments.trials import Trial, ranked
from lintra import attention, train
from lintra.bench import reports
from lintra.models import Decoder
from lintra.train.curve import MINUTES
from lintra.train.learner import Diverged

SEARCHED = 0  # the seed of the search
SEEDS = (1, 2, 3)  # the seeds of the trainings that are tested
VALIDATION_SAMPLES, TEST_SAMPLES = 1_000, 2_000  # samples, or all of them if there are fewer


@dataclasses.dataclass(frozen=True)
class Attempt(Trial):
    """One contestant on one problem at one rate, number of steps and seed, and the outcome."""

    command: str = COMPARISON.command
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # what it is, for its file
    problem: Problem | None = None
    data: Path | None = None
    final: bool = False  # whether it is scored on the test set

    def scored(self) -> float | None:
        """The validation score: NaN if it diverged, None before it is trained."""
        found = self.concluded()
        if found is None:
            return None
        return math.nan if found["diverged"] else found["validation"]

    def _train(self) -> None:
        """Train to the end or until it diverges, and write the outcome. Raises checkpoint.Error."""
        began = time.monotonic()
        found: dict[str, Any] = {"diverged": False, "validation": None, "test": None}
        try:
            run = self._begun() or train.Run.create(
                self.folder, task=self.task, model=self.model, train=self.training
            )
            train.fit(run)
            found["validation"] = self._scored_on(self.task.build(), "validate", VALIDATION_SAMPLES)
            if self.final:
                assert self.problem is not None
                found["test"] = self._scored_on(self.problem.judge(self.data), "test", TEST_SAMPLES)
        except Diverged as error:
            found |= {"diverged": True, "why": str(error)}
        # A resumed training includes the minutes before it was stopped; its log has no seconds of scoring.
        logged = 60 * max(train.curves(self.folder).get(MINUTES, {}).values(), default=0.0)
        assert self.kept is not None
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        network = self.model.build()
        reports.save(
            self.kept,
            command=self.command,
            settings=self.settings(),
            **self.facts,
            **found,
            seconds=max(logged, time.monotonic() - began),
            parameters=sum(x.numel() for x in network.parameters()),
            state_bytes=state_bytes(network, self.task.build().length),
        )
        shutil.rmtree(self.folder, ignore_errors=True)


@torch.no_grad()
def state_bytes(network: Any, length: int) -> int | None:
    """Return the bytes of the state that a decoder keeps after so many tokens; None for an encoder, and for a
    decoder whose attention has no recurrent form."""
    if not isinstance(network, Decoder) or not all(x.attn.attention.can.recurrent for x in network.blocks):
        return None
    tokens = torch.zeros(1, length, dtype=torch.int64)
    _, state = network.eval().extend(tokens)
    kept = attention.leaves([layer.attention for layer in state.layers])
    return sum(x.numel() * x.element_size() for x in kept)


@dataclasses.dataclass(frozen=True)
class Contest:
    """One contestant on one problem: a search for its rate, and the trainings that are tested."""

    problem: Problem
    contestant: Contestant
    preset: Preset = "small"
    data: Path | None = None
    study: Study = COMPARISON

    @property
    def steps(self) -> int:
        return self.problem.steps[self.preset]

    def attempt(self, rate: float, steps: int, seed: int) -> Attempt:
        problem = self.problem
        name = f"{problem.name}.{self.contestant.name}.{rate:g}.{steps}.{seed}"
        return Attempt(
            name=name,
            folder=self.study.folder / "runs" / name,
            task=problem.task(self.data),
            model=self.contestant.model(problem),
            training=train.Config(
                steps=steps,
                batch=problem.batch,
                lr=rate,
                schedule="cosine",
                warmup=max(1, steps // 20),
                optimizer="adamw",
                weight_decay=0.1,
                precision="32",
                save_every=100,
                validate_every=10**6,
                seed=seed,
            ),
            score=problem.score,
            kept=self.study.outcomes / f"{name}.json",
            command=self.study.command,
            facts={
                "problem": problem.name,
                "contestant": self.contestant.name,
                "preset": self.preset,
                "rate": rate,
                "steps": steps,
                "seed": seed,
                "final": seed != SEARCHED,
            },
            problem=problem,
            data=self.data,
            final=seed != SEARCHED,
        )

    def ready(self) -> list[Attempt]:
        """The trainings that can begin now: the rest of a rung, then the seeds at the best rate."""
        rates = self.problem.rates
        for rung in range(self.problem.halvings, 0, -1):
            attempts = {rate: self.attempt(rate, self.steps // 2**rung, SEARCHED) for rate in rates}
            scores = {rate: one.scored() for rate, one in attempts.items()}
            if missing := [one for rate, one in attempts.items() if scores[rate] is None]:
                return missing
            left = better_half(scores, lower_is_better=self.problem.lower_is_better)
            rates = left if rung > 1 else left[:1]
        finals = [self.attempt(rate, self.steps, seed) for rate in rates for seed in SEEDS]
        return [one for one in finals if one.scored() is None]


def better_half(scores: dict[float, float | None], *, lower_is_better: bool) -> list[float]:
    """The rates with the better scores, half of them rounded up, the best first; none that diverged."""
    return ranked(scores, lower_is_better=lower_is_better)[: math.ceil(len(scores) / 2)]


def read_outcomes(study: Study = COMPARISON) -> list[dict[str, Any]]:
    """The outcomes of all trainings, in the order of their file names."""
    return [json.loads(file.read_text()) for file in sorted(study.outcomes.glob("*.json"))]

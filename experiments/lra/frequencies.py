"""Tell reviews apart by the frequencies of their bytes, without their order: a baseline of the task `text`.

    python -m experiments.lra.frequencies --data DIR

A logistic regression on how often each byte, or each pair of neighbouring bytes, occurs in the first 1,000
bytes of a review. The weight of its penalty is chosen on the reviews held out of the training file; then the
test file is scored once.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.compare import baselines
from experiments.compare.search import TEST_SAMPLES
from experiments.lra.problems import ARENA

HERE = Path(__file__).parent
FOUND = HERE / "frequencies.json"
COMMAND = "python -m experiments.lra.frequencies --data DIR"
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PAIRED = 63  # the commonest bytes, which have pairs of their own; all others are one


def singles(texts: list[Tensor]) -> Tensor:
    """The frequency of each byte, [n 256]."""
    return torch.stack([torch.bincount(x, minlength=256) / max(1, len(x)) for x in texts])


def pairs(texts: list[Tensor], common: Tensor) -> Tensor:
    """The frequency of each pair of neighbours among bytes [PAIRED] and others, [n (PAIRED + 1)^2]."""
    number = torch.full((256,), PAIRED)
    number[common] = torch.arange(PAIRED)
    first = (PAIRED + 1) * number
    counted = (torch.bincount(first[x[:-1]] + number[x[1:]], minlength=(PAIRED + 1) ** 2) for x in texts)
    return torch.stack([row / max(1, len(x) - 1) for row, x in zip(counted, texts, strict=True)])


def regression(x: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """The weights [i+1], the constant last, that minimise logistic loss plus penalty |w|^2."""
    weights = torch.zeros(x.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=300, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = F.binary_cross_entropy_with_logits(x @ weights[:-1] + weights[-1], labels)
        found = found + penalty * weights[:-1].square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    return weights.detach()


def right(x: Tensor, labels: Tensor, weights: Tensor) -> float:
    """The share of reviews that are classified correctly."""
    return ((x @ weights[:-1] + weights[-1] > 0) == labels.bool()).double().mean().item()


def measure(x: dict[str, Tensor], labels: dict[str, Tensor]) -> dict[str, Any]:
    """The penalty that is best in validation, and the shares classified correctly there, in the test file,
    and among those of its reviews that mechanisms are tested on."""
    mean, spread = x["train"].mean(0), x["train"].std(0).clamp(min=1e-6)
    x = {name: (of - mean) / spread for name, of in x.items()}
    found = {penalty: regression(x["train"], labels["train"], penalty) for penalty in PENALTIES}
    validated = {penalty: right(x["validate"], labels["validate"], w) for penalty, w in found.items()}
    best = max(validated, key=validated.__getitem__)
    return {
        "penalty": best,
        "validation": validated[best],
        "test": right(x["test"], labels["test"], found[best]),
        "tested": right(x["test"][:TEST_SAMPLES], labels["test"][:TEST_SAMPLES], found[best]),
        "searched": {f"{penalty:g}": share for penalty, share in validated.items()},
        "reviews": {name: len(of) for name, of in labels.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Reviews told apart by the frequencies of their bytes.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the texts that README.md names")
    options = parser.parse_args()
    ARENA.by_name["text"].check(options.data)
    task = ARENA.by_name["text"].task(options.data).build()
    splits: dict[str, Any] = {name: getattr(task, name) for name in ("train", "validate", "test")}
    labels = {name: split.labels.float() for name, split in splits.items()}
    texts = {name: task.encode(split.texts) for name, split in splits.items()}
    common = torch.bincount(torch.cat(texts["train"]), minlength=256).argsort(descending=True)[:PAIRED]
    scores = {
        "bytes": measure({name: singles(of) for name, of in texts.items()}, labels),
        "pairs of bytes": measure({name: pairs(of, common) for name, of in texts.items()}, labels),
    }
    found = {"text": {f"the frequencies of {name}": each["tested"] for name, each in scores.items()}}
    baselines.publish(FOUND, found, command=COMMAND, scores=scores)


if __name__ == "__main__":
    main()

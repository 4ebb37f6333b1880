"""Associative recall with every recurrence, each with the learning rate that suits it: see README.md.

    python experiments/recall/run.py          train what is not trained yet, then write and draw the results
    python experiments/recall/run.py --list   what there is to train and what is done

A run is a folder of `lintra train`; killed at any moment, the same command resumes it.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lintra import attention, checkpoint, evaluate, pictures, train
from lintra.allocator import keep_freed_memory
from lintra.bench import reports
from lintra.tasks import recall

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from trials import Trial, add_options, tell, train_all  # noqa: E402 (from the folder above)

PAIRS = (8, 32)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = (0, 1, 2)  # the rate is chosen with the first
STEPS = 1_000
NAMES = ("softmax", "linear", "retention", "ssd", "gated", "deltanet", "delta", "kda")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # the mechanism behind a name, and its options
    **{name: (name, {}) for name in NAMES},
    **{name: (name, {"conv": None}) for name in ("ssd", "delta", "kda")},
    "deltanet": ("delta", {"conv": None, "decay": False}),
}
TESTED = 2**20  # the seed of test data: nothing was trained on it or chosen by it


@dataclasses.dataclass(frozen=True)
class Run:
    """One mechanism on one number of pairs, with one learning rate and one seed."""

    pairs: int
    name: str
    rate: float
    seed: int

    def task(self, seed: int = 0) -> recall.Config:
        return recall.Config(pairs=self.pairs, joined=True, keys=32, values=16, data_seed=seed)

    def model(self) -> Any:
        kind, options = KINDS[self.name]
        config = attention.load(kind).Config(**options)
        return dataclasses.replace(self.task().build().model(config), position="none")

    def trial(self) -> Trial:
        training = {"steps": STEPS, "batch": 32, "schedule": "cosine", "warmup": 50, "optimizer": "adamw"}
        settings = {"precision": "32", "save_every": 250, "validate_every": 10**6, "weight_decay": 0.1}
        return Trial(
            name=f"{self.pairs} pairs, {self.name}, rate {self.rate}, seed {self.seed}",
            folder=HERE / "runs" / f"{self.pairs}-{self.name}-{self.rate}-{self.seed}",
            task=self.task(),
            model=self.model(),
            training=train.Config(**training, **settings, lr=self.rate, seed=self.seed),
            score="accuracy",
            samples=1_000,
            split="validate",
        )

    def tested(self) -> float:
        """The share of values recalled in sequences that were never looked at before."""
        task, model = self.task(TESTED).build(), checkpoint.load(self.trial().folder)
        return evaluate.scores(model, task, range(1_000), batch=50, split="validate")["accuracy"].mean


def tuning(names: list[str]) -> Iterator[Run]:
    for pairs in reversed(PAIRS):
        for name in names:
            for rate in RATES:
                yield Run(pairs, name, rate, SEEDS[0])


def best(pairs: int, name: str) -> float | None:
    """The learning rate with the highest validation score; None while one is missing."""
    scores = {rate: Run(pairs, name, rate, SEEDS[0]).trial().scored() for rate in RATES}
    known = {rate: score for rate, score in scores.items() if score is not None}
    return max(known, key=lambda rate: known[rate]) if len(known) == len(RATES) else None


def repeated(names: list[str]) -> Iterator[Run]:
    """The other seeds, with the rate that was chosen."""
    for pairs in reversed(PAIRS):
        for name in names:
            rate = best(pairs, name)
            for seed in SEEDS[1:] if rate is not None else ():
                yield Run(pairs, name, rate, seed)


def state_bytes(run: Run) -> int:
    """The bytes of float32 that a sequence of the task leaves behind; of softmax, its keys and values."""
    built = run.model().build()
    layers = built.start(1).layers
    tokens = run.task().build().length
    grown = sum(4 * 2 * tokens * run.model().width for _ in layers) if run.name == "softmax" else 0
    return grown + sum(x.numel() * x.element_size() for x in attention.leaves([s.attention for s in layers]))


def results(names: list[str]) -> dict[str, Any]:
    """Of every mechanism and number of pairs: all validation scores, the test scores of the chosen rate."""
    found: dict[str, Any] = {}
    for pairs in PAIRS:
        for name in names:
            rate = best(pairs, name)
            if rate is None:
                continue
            runs = [Run(pairs, name, rate, seed) for seed in SEEDS]
            done = [run for run in runs if run.trial().scored() is not None]
            validated = {str(x): Run(pairs, name, x, SEEDS[0]).trial().scored() for x in RATES}
            found[f"{pairs} {name}"] = {
                "validated": validated,
                "rate": rate,
                "tested": [run.tested() for run in done],
                "state_bytes": state_bytes(runs[0]),
            }
    return found


def draw(found: dict[str, Any], names: list[str]) -> None:
    """Recall against the number of pairs, a line for each mechanism."""
    lines = {
        name: {
            pairs: 100 * statistics.mean(found[f"{pairs} {name}"]["tested"])
            for pairs in PAIRS
            if f"{pairs} {name}" in found
        }
        for name in names
    }
    before = {name: lines.pop(name) for name in ("linear", "softmax") if name in lines}
    pictures.percentages(
        HERE / "recall.png",
        before,
        others=pictures.families(lines),
        x="pairs in the sequence",
        y="recalled (%)",
        title="associative recall, a learning rate for each",
    )


def table(found: dict[str, Any]) -> str:
    """A row for each mechanism: recalled values and their spread over seeds, the rate, the state."""
    heads = ["mechanism", *(f"{pairs} pairs, %" for pairs in PAIRS), "rates", "state, KB"]
    lines = [heads, ["---"] * len(heads)]
    for name in NAMES:
        rows = [found.get(f"{pairs} {name}") for pairs in PAIRS]
        if not any(rows):
            continue
        cells = ["" if row is None else spread([100 * x for x in row["tested"]]) for row in rows]
        rates = ", ".join("" if row is None else f"{row['rate']:g}" for row in rows)
        state = max(row["state_bytes"] for row in rows if row is not None)
        lines.append([name, *cells, rates, f"{state / 1e3:,.0f}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def spread(values: list[float]) -> str:
    """The mean, and how far the seeds are apart."""
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", choices=NAMES, help="these mechanisms, without a file of results"
    )
    add_options(parser, minutes=240.0)
    options = parser.parse_args()
    names = options.only or list(NAMES)
    if options.list:
        tell([run.trial() for run in (*tuning(names), *repeated(names))])
        return
    keep_freed_memory()
    for runs in (tuning, repeated):
        train_all([run.trial() for run in runs(names)], workers=options.workers, minutes=options.minutes)
    found = results(names)
    print(table(found))
    if options.only:
        return
    reports.save(HERE / "results.json", command="python experiments/recall/run.py", scores=found)
    draw(json.loads((HERE / "results.json").read_text())["scores"], names)


if __name__ == "__main__":
    main()

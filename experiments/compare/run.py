"""Same model, same budget, every mechanism: see README.md beside this file.

    python experiments/compare/run.py --data DIR     train what is not trained yet, then measure and draw
    python experiments/compare/run.py --data DIR --list   what there is to train and what is done

A run is a folder of `lintra train`; killed at any moment, the same command resumes it.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lintra import attention, pictures, train
from lintra.allocator import keep_freed_memory
from lintra.bench import reports
from lintra.bench.memory import peak_of
from lintra.bench.reports import Row, by_name
from lintra.bench.timing import interleaved
from lintra.tasks import recall, text, text_classification

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from trials import Trial, add_options, tell, train_all, updates  # noqa: E402 (from the folder above)

PAIRS = (4, 8, 16, 32)
SEEDS = (0,)
TIMED = ("shakespeare", "classification")

# What fits sequences of 128 to 1,024 tokens; everything else is each mechanism's default.
OPTIONS: dict[str, dict[str, Any]] = {
    "aft": {"window": 64, "max_length": 1_024},
    "bigbird": {"block": 16},
    "clustered": {"clusters": 64, "redraw_every": None},
    "linformer": {"rank": 128},
    "longformer": {"window": 64},
    "longshort": {"window": 64, "rank": 32},
    "lsh": {"chunk": 32, "rounds": 4, "redraw_every": None},
    "nystromformer": {"landmarks": 32},
    "performer": {"redraw_every": 100},
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One column of the table."""

    name: str
    task: Any  # the task's Config
    score: str  # what the task's score calls it
    causal: bool
    training: dict[str, Any]
    model: dict[str, Any]
    options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # mechanism -> its own


def problems(data: Path) -> list[Problem]:
    long = {"batch": 8, "schedule": "cosine", "warmup": 20, "weight_decay": 0.05}
    return [
        *(
            Problem(
                f"recall-{pairs}",
                recall.Config(pairs=pairs, joined=True, keys=32, values=16),
                "accuracy",
                True,
                {"batch": 32, "lr": 5e-3, "schedule": "cosine", "warmup": 50, "steps": 1_000},
                # Which pair stands where, and beside which, is of no matter.
                {"position": "none"},
                {"delta": {"conv": None}},
            )
            for pairs in PAIRS
        ),
        Problem(
            "shakespeare",
            text.Config(data=str(data / "tinyshakespeare.txt"), length=512),
            "bits_per_byte",
            True,
            {**long, "lr": 4e-3, "steps": 300},
            {"layers": 2, "heads": 4, "width": 128},
        ),
        Problem(
            "classification",
            text_classification.Config(
                data=str(data / "imdb_train.tsv.xz"),
                test=str(data / "imdb_test.tsv.xz"),
                length=1024,
                classes=("0", "1"),
                validate_on="test",  # nothing is held out: no setting is chosen in training
            ),
            "accuracy",
            False,
            # Few numbers to learn, from many texts.
            {**long, "batch": 16, "lr": 1e-2, "optimizer": "adamw", "steps": 1_200},
            {"layers": 1, "heads": 2, "width": 32, "dropout": 0.0},
        ),
    ]


@dataclasses.dataclass(frozen=True)
class Run:
    """One mechanism on one problem with one seed."""

    problem: Problem
    mechanism: str
    seed: int

    def model(self) -> Any:
        task = self.problem.task.build()
        options = OPTIONS.get(self.mechanism, {}) | self.problem.options.get(self.mechanism, {})
        config = attention.for_length(attention.load(self.mechanism).Config, task.length, **options)
        return dataclasses.replace(task.model(config), **self.problem.model)

    def trial(self) -> Trial:
        problem = self.problem
        settings = {"precision": "32", "save_every": 100, "validate_every": 10**6, "seed": self.seed}
        return Trial(
            name=f"{problem.name}, {self.mechanism}, seed {self.seed}",
            folder=HERE / "runs" / problem.name / self.mechanism / f"seed-{self.seed}",
            task=problem.task,
            model=self.model(),
            training=train.Config(**{**problem.training, **settings}),
            score=problem.score,
        )


def runs(data: Path, names: list[str]) -> Iterator[Run]:
    """Everything there is to train, the first seed of all before the second of any."""
    for seed in SEEDS:
        for problem in problems(data):
            for name in names:
                if attention.mechanism(name).can.causal or not problem.causal:
                    yield Run(problem, name, seed)


def measure(data: Path, names: list[str]) -> tuple[list[Row], dict[str, Any]]:
    """Seconds of a training step, interleaved over the mechanisms, and the memory it takes."""
    rows, timings = [], {}
    for problem in (each for each in problems(data) if each.name in TIMED):
        mine = [run for run in runs(data, names) if run.problem.name == problem.name and run.seed == 0]
        timings |= {
            f"{problem.name} {name}": timing
            for name, timing in interleaved(
                {run.mechanism: step(run) for run in mine}, rounds=5, at_least=0
            ).items()
        }
        for run in mine:
            what = f"{problem.name}: {run.mechanism}"
            rows.append(Row(f"{what}, a step", 1e3 * timings[f"{problem.name} {run.mechanism}"].median, "ms"))
            program = (
                f"import sys; sys.path.insert(0, {str(HERE)!r}); from pathlib import Path; import run\n"
                f"one = run.find(Path({str(data)!r}), {problem.name!r}, {run.mechanism!r})\n"
                "update = run.step(one)\nforget_peak()\nbefore = peak()\nupdate()\nprint(peak() - before)"
            )
            rows.append(Row(f"{what}, memory", peak_of(program) / 1e6, "MB"))
    return rows, timings


def find(data: Path, problem: str, mechanism: str) -> Run:
    """The first run of a mechanism on a problem."""
    return next(x for x in runs(data, [mechanism]) if x.problem.name == problem)


def step(run: Run) -> Any:
    """One update of a fresh model."""
    task = run.problem.task.build()
    batch = task.train.__getitems__(range(run.problem.training["batch"]))
    return updates(task, run.model(), [batch])


def scores(data: Path, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """problem -> mechanism -> the score of each seed that is done."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs(data, names):
        value = run.trial().scored()
        if value is not None:
            found.setdefault(run.problem.name, {}).setdefault(run.mechanism, []).append(value)
    return found


def draw(found: dict[str, dict[str, list[float]]]) -> None:
    """Recall against the number of pairs, a line for each mechanism; linear and softmax in every panel."""
    lines: dict[str, dict[int, float]] = {}
    for pairs in PAIRS:
        for name, values in found.get(f"recall-{pairs}", {}).items():
            lines.setdefault(name, {})[pairs] = 100 * statistics.mean(values)
    before = {name: lines.pop(name) for name in ("linear", "softmax") if name in lines}
    pictures.percentages(
        HERE / "recall.png",
        before,
        others=pictures.families(lines),
        x="pairs in the sequence",
        y="recalled (%)",
        title="associative recall, same model and budget",
    )


def table(report: dict[str, Any]) -> str:
    """A row for each mechanism: its scores, and what a step of training costs."""
    rows = by_name(report)
    columns: list[tuple[str, Callable[[str], str | None]]] = [
        *((f"recall {pairs}, %", score_of(report, f"recall-{pairs}", 100, ".1f")) for pairs in PAIRS),
        ("Shakespeare, bits/byte", score_of(report, "shakespeare", 1, ".2f")),
        ("reviews, %", score_of(report, "classification", 100, ".1f")),
    ]
    for problem, name in zip(TIMED, ("Shakespeare", "reviews"), strict=True):
        for what, unit in (("a step", "ms"), ("memory", "MB")):
            columns.append((f"{name}, {unit}", figure_of(rows, problem, what)))
    heads = ["mechanism", *(head for head, _ in columns)]
    lines = [heads, ["---"] * len(heads)]
    names = sorted({name for found in report["scores"].values() for name in found})
    lines += [[name, *(of(name) or "" for _, of in columns)] for name in names]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def score_of(report: dict[str, Any], problem: str, scale: float, form: str) -> Callable[[str], str | None]:
    found = report["scores"].get(problem, {})
    return lambda name: f"{scale * statistics.mean(found[name]):{form}}" if name in found else None


def figure_of(rows: dict[str, float], problem: str, what: str) -> Callable[[str], str | None]:
    return lambda name: f"{rows[key]:,.0f}" if (key := f"{problem}: {name}, {what}") in rows else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Same model, same budget, every mechanism.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the texts README.md names")
    parser.add_argument("--only", nargs="*", help="these mechanisms, without a file of results")
    add_options(parser, minutes=120.0)
    parser.add_argument("--no-times", action="store_true", help="train only, without a file of results")
    options = parser.parse_args()
    names = options.only or attention.names()
    todo = [run.trial() for run in runs(options.data, names)]
    if options.list:
        tell(todo)
        return
    keep_freed_memory()
    train_all(todo, workers=options.workers, minutes=options.minutes)
    found = scores(options.data, names)
    if options.no_times or options.only:  # not the whole of what results.json holds
        print(table({"scores": found, "rows": []}))
        return
    rows, timings = measure(options.data, names)
    command = "python experiments/compare/run.py --data DIR"
    reports.write(HERE / "results.json", rows, timings, command=command, scores=found)
    draw(found)
    print(table(json.loads((HERE / "results.json").read_text())))
    print(f"\nsaved in {HERE / 'results.json'}")


if __name__ == "__main__":
    main()

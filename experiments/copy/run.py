"""The copy task, three ways to attend: see README.md beside this file.

    python experiments/copy/run.py          train what is not trained yet, then measure and draw
    python experiments/copy/run.py --list   what there is to train and what is done

A run is a folder of `lintra train`; killed at any moment, the same command resumes it.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lintra import pictures, train
from lintra.allocator import keep_freed_memory
from lintra.attention import linear, lsh, softmax
from lintra.bench import reports
from lintra.bench.reports import Row, by_name
from lintra.bench.timing import interleaved
from lintra.tasks import copy

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from trials import Trial, add_options, tell, train_and_keep, updates  # noqa: E402 (from the folder above)

TIMES = HERE / "times.json"
MODELS = {
    "linear": linear.Config(),
    "softmax": softmax.Config(),
    "LSH-4": lsh.Config(rounds=4, chunk=16, redraw_every=None),  # a quarter of the sequence, as in the paper
}
SEEDS = (0,)
# Half the paper's length, width and batch.
TASK = copy.Config(length=64)
SIZE = {"width": 128, "heads": 4}
TRAINING = train.Config(
    steps=2_000,
    batch=32,
    optimizer="radam",
    lr=1e-3,
    schedule="step",
    drop_at=1_500,
    precision="bf16",
    validate_every=100,
    save_every=500,
)
ROUNDS = 7
STEPS_TIMED = "minutes (steps x the time of one)"
COMMAND = "python experiments/copy/run.py"


def trial(model: str, seed: int) -> Trial:
    task = TASK.build()
    return Trial(
        f"{model}, seed {seed}",
        HERE / "runs" / model / f"seed-{seed}",
        TASK,
        dataclasses.replace(task.model(MODELS[model]), **SIZE),
        dataclasses.replace(TRAINING, seed=seed),
        "loss",
        samples=TASK.validate_samples,
        kept=HERE / "outcomes" / f"{model}-{seed}.json",
    )


def trials() -> list[Trial]:
    """Everything there is to train, the first seed of all before the second of any."""
    return [trial(model, seed) for seed in SEEDS for model in MODELS]


def outcome(one: Trial) -> dict[str, Any]:
    """Return what is kept of a training beside its curve."""
    right = train.curves(one.folder)["validate_accuracy"]
    return {"loss": one.scored(), "accuracy": right[max(right)]}


def measure() -> None:
    """Seconds that a step of each model takes one core, interleaved: nothing else may run."""
    torch.set_num_threads(1)
    task = TASK.build()
    batch = task.train.__getitems__(range(TRAINING.batch))
    steps: dict[str, Callable[[], None]] = {
        model: updates(task, trial(model, 0).model, [batch], TRAINING) for model in MODELS
    }
    found = interleaved(steps, rounds=ROUNDS, at_least=0)
    rows = [Row(model, timing.median, "s") for model, timing in found.items()]
    reports.write(TIMES, rows, found, command=COMMAND)


def learned() -> dict[str, list[dict[str, Any]]]:
    """model -> what came of each of its trainings."""
    found = {model: [trial(model, seed).concluded() for seed in SEEDS] for model in MODELS}
    return {model: trained for model, every in found.items() if (trained := [one for one in every if one])}


def seconds() -> dict[str, float]:
    """model -> those of a step."""
    return by_name(json.loads(TIMES.read_text()))


def table() -> str:
    """A row for each model: what it has learned, and in what time."""
    heads = ["model", "loss, nats a symbol", "each seed", "symbols right, %", "a step, s", STEPS_TIMED]
    lines = [heads, ["---"] * len(heads)]
    for model, trained in learned().items():
        loss, right = ([one[name] for one in trained] for name in ("loss", "accuracy"))
        lines.append(
            [
                model,
                f"{statistics.mean(loss):.3f}",
                ", ".join(f"{x:.3f}" for x in loss),
                f"{100 * statistics.mean(right):.1f}",
                f"{seconds()[model]:.3f}",
                f"{TRAINING.steps * seconds()[model] / 60:.1f}",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw() -> list[Path]:
    """The loss in validation, the mean over the seeds, by the steps and by the minutes that these take."""
    taken, files = seconds(), []
    for name, x in (("loss", "steps"), ("loss-time", STEPS_TIMED)):
        lines = {}
        for model, trained in learned().items():
            unit = taken[model] / 60 if name == "loss-time" else 1
            steps = map(int, trained[0]["curve"])
            lines[model] = {
                step * unit: statistics.mean(one["curve"][str(step)] for one in trained) for step in steps
            }
        files.append(HERE / f"{name}.png")
        title = f"Copying {TASK.length // 4} to {(TASK.length - 1) // 2 - 1} symbols"
        pictures.curves(files[-1], lines, x=x, y="loss (nats a symbol)", title=title, log=True)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description="The copy task, three ways to attend.")
    add_options(parser, minutes=170.0)
    options = parser.parse_args()
    every = trials()
    if options.list:
        tell(every)
        return
    keep_freed_memory()
    train_and_keep(every, COMMAND, outcome, workers=options.workers, minutes=options.minutes)
    if not TIMES.exists():
        measure()
    print(table(), *(f"chart saved in {file}" for file in draw()), sep="\n\n")


if __name__ == "__main__":
    main()

"""The copy task, three ways to attend: see README.md beside this file.

    python experiments/copy/run.py          train what is not trained yet, then measure and draw
    python experiments/copy/run.py --list   what there is to train and what is done

Each way is trained briefly at every learning rate. It is then trained for the paper's number of steps, with
three more seeds, at the rate that was best in validation. A run is a folder of `lintra train`; if it is
killed at any moment, the same command resumes it.
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

from lintra import checkpoint, evaluate, pictures, train
from lintra.allocator import keep_freed_memory
from lintra.attention import linear, lsh, softmax
from lintra.bench import reports
from lintra.bench.reports import Row, by_name
from lintra.bench.timing import interleaved
from lintra.tasks import copy

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from trials import (  # noqa: E402 (from the folder above)
    BATCH,
    Trial,
    add_options,
    interval,
    markdown,
    ranked,
    tell,
    train_and_keep,
    updates,
)

TIMES = HERE / "times.json"
MODELS = {
    "linear": linear.Config(),
    "softmax": softmax.Config(),
    "LSH-4": lsh.Config(rounds=4, chunk=16, redraw_every=None),  # a quarter of the sequence, as in the paper
}
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SEARCHED = 0  # the seed of the search
SEEDS = (1, 2, 3)
SEARCH_STEPS, STEPS = 2_000, 10_000  # STEPS is the number in the paper
# Half the paper's length, width and batch.
TASK = copy.Config(length=64)
TESTED = dataclasses.replace(TASK, data_seed=2**20)  # sequences that nothing was trained on or chosen by
SIZE = {"width": 128, "heads": 4}
TRAINING = train.Config(
    batch=32,
    optimizer="radam",
    schedule="step",
    precision="bf16",
    validate_every=100,
    save_every=500,
)
ROUNDS = 7
COMMAND = "python experiments/copy/run.py"
Outcome = dict[str, Any]


def trial(model: str, rate: float, steps: int, seed: int) -> Trial:
    """One training. Its rate falls to a tenth at three quarters of the steps."""
    name = f"{model}-{rate:g}-{steps}-{seed}"
    task = TASK.build()
    return Trial(
        name=name,
        folder=HERE / "runs" / name,
        task=TASK,
        model=dataclasses.replace(task.model(MODELS[model]), **SIZE),
        training=dataclasses.replace(TRAINING, lr=rate, steps=steps, drop_at=steps * 3 // 4, seed=seed),
        score="loss",
        samples=TASK.validate_samples,
        split="validate",
        kept=HERE / "outcomes" / f"{name}.json",
    )


def search(model: str) -> dict[float, Trial]:
    """rate -> its short training."""
    return {rate: trial(model, rate, SEARCH_STEPS, SEARCHED) for rate in RATES}


def searched(model: str) -> dict[float, Outcome]:
    """rate -> the outcome of its short training, of those that are done."""
    found = {rate: one.concluded() for rate, one in search(model).items()}
    return {rate: outcome for rate, outcome in found.items() if outcome is not None}


def finals(model: str) -> list[Trial]:
    """The long trainings, at the rate with the lowest validation loss; none before all rates are tried."""
    found = searched(model)
    if len(found) < len(RATES):
        return []
    losses = {rate: None if one.get("diverged") else one["loss"] for rate, one in found.items()}
    best = ranked(losses, lower_is_better=True)[:1]  # empty if all of them diverged
    return [trial(model, rate, STEPS, seed) for rate in best for seed in SEEDS]


def searches() -> list[Trial]:
    """All short trainings."""
    return [one for model in MODELS for one in search(model).values()]


def trials() -> list[Trial]:
    """All long trainings that are known so far, the first seed of all before the second of any."""
    return [one for of in zip(*filter(None, map(finals, MODELS)), strict=True) for one in of]


def outcome(one: Trial) -> Outcome:
    """Return what is kept of a training besides its curve; of a long one, also its score on test data."""
    right = train.curves(one.folder)["validate_accuracy"]
    found = {"loss": one.scored(), "accuracy": right[max(right)]}
    if one.training.steps == STEPS:
        task, places = TESTED.build(), range(TESTED.validate_samples)
        scores = evaluate.scores(checkpoint.load(one.folder), task, places, batch=BATCH, split="validate")
        found["test"] = {name: scores[name].mean for name in ("loss", "accuracy")}
    return found


def measure() -> None:
    """Seconds that a step of each model takes on one core, interleaved. Nothing else may run meanwhile."""
    torch.set_num_threads(1)
    task = TASK.build()
    batch = task.train.__getitems__(range(TRAINING.batch))
    steps: dict[str, Callable[[], None]] = {
        model: updates(task, trial(model, RATES[0], STEPS, 0).model, [batch], TRAINING) for model in MODELS
    }
    found = interleaved(steps, rounds=ROUNDS, at_least=0)
    rows = [Row(model, timing.median, "s") for model, timing in found.items()]
    reports.write(TIMES, rows, found, command=COMMAND)


def learned() -> dict[str, list[Outcome]]:
    """model -> the outcomes of its long trainings, for all models that have one."""
    found = {model: [one.concluded() for one in finals(model)] for model in MODELS}
    done = {model: [one for one in each if one] for model, each in found.items()}
    return {model: each for model, each in done.items() if each}


def seconds() -> dict[str, float]:
    """model -> the seconds of a step."""
    return by_name(json.loads(TIMES.read_text()))


def search_table() -> str:
    """A row for each model: its validation loss after the short training at each rate."""
    lines = [["nats a symbol", *(f"rate {rate:g}" for rate in RATES)], ["---"] * (1 + len(RATES))]
    for model in MODELS:
        found = searched(model)
        losses = {rate: "diverged" if x.get("diverged") else f"{x['loss']:.2g}" for rate, x in found.items()}
        lines.append([model, *(losses.get(rate, "") for rate in RATES)])
    return markdown(lines)


def table() -> str:
    """A row for each model: what it has learned in the long trainings, and in how much time."""
    heads = ["model", "rate", "loss, nats a symbol", "each seed", "symbols right, %", "a step, s", "minutes"]
    lines = [heads, ["---"] * len(heads)]
    for model, trained in learned().items():
        kept = [one["test"] for one in trained if not one.get("diverged")]
        each = ["diverged" if one.get("diverged") else f"{one['test']['loss']:.2g}" for one in trained]
        whole = len(kept) == len(trained)
        loss, right = ([one[name] for one in kept] for name in ("loss", "accuracy"))
        lines.append(
            [
                model,
                f"{trained[0]['settings']['train']['lr']:g}",
                _mean(loss) if whole else "diverged",
                ", ".join([*each, *["missing"] * (len(SEEDS) - len(trained))]),
                f"{100 * statistics.mean(right):.3f}" if whole else "",
                f"{seconds()[model]:.3f}",
                f"{STEPS * seconds()[model] / 60:.1f}",
            ]
        )
    return markdown(lines)


def _mean(losses: list[float]) -> str:
    """The mean over the seeds; with all seeds also half of its 95 % confidence interval, Student's t."""
    if len(losses) < len(SEEDS):
        return f"{statistics.mean(losses):.2g}"
    mean, half = interval(losses)
    return f"{mean:.2g} ± {half:.1g}"


def hours() -> str:
    """Return a sentence with the number of trainings and the hours they took."""
    every = [one for one in (x.concluded() for x in [*searches(), *trials()]) if one]
    diverged = sum(bool(one.get("diverged")) for one in every)
    total = sum(one["minutes_by_the_clock"] or 0.0 for one in every) / 60
    return f"In all: {len(every)} trainings, of which {diverged} diverged, in {total:.1f} core hours."


def draw() -> list[Path]:
    """Draw the mean validation loss over the seeds, by steps and by the minutes that these take; no picture
    before a long training is done."""
    if not learned():
        return []
    taken, files = seconds(), []
    for name, x in (("loss", "steps"), ("loss-time", "minutes (steps x the time of one)")):
        lines = {}
        for model, trained in learned().items():
            trained = [one for one in trained if not one.get("diverged")]
            if not trained:
                continue
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
    parser.add_argument("--times", action="store_true", help="time a step again: nothing else may run")
    options = parser.parse_args()
    if options.list:
        tell([*searches(), *trials()])
        return
    keep_freed_memory()
    limits = {"workers": options.workers, "minutes": options.minutes}
    train_and_keep((searches, trials), COMMAND, outcome, **limits)
    if options.times or not TIMES.exists():
        measure()
    print(search_table(), table(), hours(), *(f"chart saved in {file}" for file in draw()), sep="\n\n")


if __name__ == "__main__":
    main()

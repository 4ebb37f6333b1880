"""Trainings of equal duration: linear attention, softmax, LSH, and images of four times as many values."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from speed import LSH
from trials import Trial, train_and_keep, updates

from lintra import pictures, train
from lintra.allocator import keep_freed_memory
from lintra.attention import linear, softmax
from lintra.bench import reports
from lintra.bench.reports import Row, by_name
from lintra.bench.timing import interleaved
from lintra.tasks import images

HERE = Path(__file__).parent
TIMES = HERE / "hours.json"
WARMUP = 0.1  # of the steps: a fixed number would be a large part of few
MINUTES = 10  # on one core, for each training: its steps times the time of one
TRAINED = {
    "MNIST, linear": ("mnist", linear.Config()),
    "MNIST, softmax": ("mnist", softmax.Config()),
    **{f"MNIST, {name}": ("mnist", attention) for name, attention in LSH.items()},
    "CIFAR-10, linear": ("cifar10", linear.Config()),
    "CIFAR-10, softmax": ("cifar10", softmax.Config()),
}
SCORE = "bits_per_dim"
SCORED = {"mnist": 10_000, "cifar10": 500}  # test images
ROUNDS = 7
STEPS_TIMED = "minutes (steps x the time of one)"  # the trainings ran beside other work
COMMAND = "python experiments/images/run.py hours --data DIR"


def training() -> train.Config:
    """The settings that all trainings share, except for the steps and the warm-up, a part of them; float32 on
    every machine."""
    return train.Config(
        optimizer="muon", batch=8, lr=3e-3, schedule="wsd", warmup=0, precision="32", save_every=100
    )


def problem(name: str, data: Path) -> tuple[Any, Any]:
    """The configurations of the task and the model that a name stands for."""
    which, attention = TRAINED[name]
    task = images.Config(data=which, preset="small", data_dir=str(data), validate_images=256)
    return task, task.build().model(attention)


def step_times(data: Path) -> dict[str, float]:
    """Seconds that a step of each takes on one core, interleaved in one run. They are measured once and kept
    in the repository."""
    if not TIMES.exists():
        torch.set_num_threads(1)
        keep_freed_memory()  # as during training
        calls = {}
        for name in TRAINED:
            task, model = problem(name, data)
            built = task.build()
            batch = built.train.__getitems__(range(training().batch))
            calls[name] = updates(built, model, [batch], training())
        found = interleaved(calls, rounds=ROUNDS, at_least=0)
        rows = [Row(name, timing.median, "s") for name, timing in found.items()]
        reports.write(TIMES, rows, found, command=COMMAND)
    return by_name(json.loads(TIMES.read_text()))


def trials(data: Path) -> list[Trial]:
    """As many steps of each as fit into the time, to the nearest 100; validated whenever it is saved."""
    taken = step_times(data)
    found = []
    for name, (which, _) in TRAINED.items():
        steps = 100 * round(60 * MINUTES / taken[name] / 100)
        warmup = round(WARMUP * steps)
        settings = dataclasses.replace(training(), steps=steps, warmup=warmup, validate_every=100)
        task, model = problem(name, data)
        folder = HERE / "runs" / "hours" / name.replace(", ", "-")
        kept = outcome(name)
        found.append(Trial(name, folder, task, model, settings, SCORE, samples=SCORED[which], kept=kept))
    return found


def outcome(name: str) -> Path:
    """The file of an outcome."""
    return HERE / "outcomes" / f"{name.replace(', ', '-')}.json"


def measure(every: list[Trial], workers: int | None, minutes: float) -> list[Path]:
    """Train those of `trials` that are not trained yet, keep the outcomes, and return the pictures drawn of
    the curves."""
    train_and_keep(
        [lambda: every], COMMAND, lambda one: {"score": one.scored()}, workers=workers, minutes=minutes
    )
    return draw(json.loads(TIMES.read_text()))


def learned() -> dict[str, tuple[int, float, dict[int, float]]]:
    """name -> the steps of a training, its score (NaN if it diverged) and its validation scores by step."""
    found = {}
    for name in TRAINED:
        if outcome(name).exists():
            saved = json.loads(outcome(name).read_text())
            curve = {int(step): value for step, value in saved["curve"].items()}
            found[name] = saved["settings"]["train"]["steps"], saved.get("score", math.nan), curve
    return found


def table(report: dict[str, Any]) -> str:
    """A row for each training: the time of a step, the steps that fit, and the score."""
    taken, batch = by_name(report), training().batch
    heads = ["of preset `small`", "a step, s", "steps", "images seen", STEPS_TIMED, "bits/dim of test images"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name, (steps, score, _) in learned().items():
        minutes = steps * taken[name] / 60
        cells = [
            name,
            f"{taken[name]:.2f}",
            f"{steps:,}",
            f"{steps * batch:,}",
            f"{minutes:.0f}",
            "diverged" if math.isnan(score) else f"{score:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(report: dict[str, Any]) -> list[Path]:
    """Draw the bits per value of held-out training images against the minutes that the steps so far take: a
    picture for each set of images.
    """
    taken, found, files = by_name(report), learned(), []
    for data in dict.fromkeys(name.split(",")[0] for name in found):
        lines = {
            name.removeprefix(f"{data}, "): {step * taken[name] / 60: value for step, value in curve.items()}
            for name, (_, _, curve) in found.items()
            if name.split(",")[0] == data
        }
        files.append(HERE / f"hours-{data.lower()}.png")
        title = f"{data}: one time for each, small models on one core"
        pictures.curves(files[-1], lines, x=STEPS_TIMED, y="bits/dim in validation", title=title)
    return files

"""What one and the same time brings: linear attention, softmax, and images of four times as many values.

It is the time of mnist-small, which comes with the library: as many steps as it was trained for, each as long
as one takes here.
"""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from trials import Trial, train_all, updates

from lintra import checkpoint, pictures, train
from lintra.allocator import keep_freed_memory
from lintra.attention import linear, softmax
from lintra.bench import _report
from lintra.bench._report import Row
from lintra.bench._timing import interleaved

HERE = Path(__file__).parent
RUNS = HERE / "runs" / "hours"
LINEAR = "MNIST, linear"  # the model that comes with the library
TRAINED = {"MNIST, softmax": ("mnist", softmax.Config()), "CIFAR-10, linear": ("cifar10", linear.Config())}
SCORE = "bits_per_dim"
SCORED = {"mnist": 10_000, "cifar10": 500}  # test images
ROUNDS = 7
FIGURES = ("a step", "steps", "all steps", "score")


def shipped() -> train.Run:
    return train.Run.around("mnist-small")


def problem(name: str, data: Path) -> tuple[Any, Any]:
    """The configurations of the task and the model that a name stands for."""
    which, attention = TRAINED.get(name, ("mnist", linear.Config()))
    task = dataclasses.replace(shipped().task, data=which, data_dir=str(data))
    return task, task.build().model(attention)


def timings(data: Path) -> dict[str, Any]:
    """What a step of each takes one core, interleaved: measured once, and kept beside the trainings."""
    file = RUNS / "timings.json"
    if not file.exists():
        torch.set_num_threads(1)
        keep_freed_memory()  # as trainings do
        calls = {}
        for name in (LINEAR, *TRAINED):
            task, model = problem(name, data)
            built = task.build()
            batch = built.train.__getitems__(range(shipped().train.batch))
            calls[name] = updates(built, model, [batch], shipped().train)
        found = interleaved(calls, rounds=ROUNDS, at_least=0)
        text = json.dumps({name: timing.as_json() for name, timing in found.items()}, indent=1)
        checkpoint.write_atomically(file, lambda place: place.write_text(text))
    return json.loads(file.read_text())


def trials(data: Path) -> list[Trial]:
    """As many steps of each as the time allows, to the nearest 100."""
    taken, training = timings(data), shipped().train
    found = []
    for name, (which, _) in TRAINED.items():
        steps = training.steps * taken[LINEAR]["median"] / taken[name]["median"]
        settings = dataclasses.replace(training, steps=max(100, 100 * round(steps / 100)))
        task, model = problem(name, data)
        folder = RUNS / name.replace(", ", "-")
        found.append(Trial(name, folder, task, model, settings, SCORE, samples=SCORED[which]))
    return found


def measure(todo: list[Trial], data: Path, workers: int | None, minutes: float) -> None:
    """Trains what is not trained yet of `trials`; writes hours.json and hours.png with what is by then."""
    train_all(todo, workers=workers, minutes=minutes)
    run, taken = shipped(), timings(data)
    scores = checkpoint.read_json(run.folder / "evaluation.json")["scores"]
    rows = _rows(LINEAR, taken, run.train.steps, scores[SCORE]["mean"])
    curves = {LINEAR: _logged(run.folder / "log.csv")}
    for trial in todo:
        if (score := trial.scored()) is None:
            continue
        rows += _rows(trial.name, taken, trial.training.steps, score)
        curves[trial.name] = train.curves(trial.folder)["validate_bits_per_dim"]
    _report.save(
        HERE / "hours.json",
        command="python experiments/images/run.py hours --data DIR",
        batch=run.train.batch,
        rows=[dataclasses.asdict(row) for row in rows],
        curves=curves,
        timings_in_seconds=taken,
    )
    report = json.loads((HERE / "hours.json").read_text())
    print(table(report), f"drawn in {draw(report)}", sep="\n\n")


def _rows(name: str, taken: dict[str, Any], steps: int, score: float) -> list[Row]:
    seconds = taken[name]["median"]
    figures = (seconds, "s"), (steps, ""), (steps * seconds / 60, "min"), (score, "bits/dim")
    return [Row(f"{name}: {what}", *figure) for what, figure in zip(FIGURES, figures, strict=True)]


def _logged(file: Path) -> dict[int, float]:
    """The validations of a model that comes with the library."""
    with file.open(newline="") as lines:
        rows = [(row["step"], row["validate_bits_per_dim"]) for row in csv.DictReader(lines)]
    return {int(step): float(value) for step, value in rows if value}


def table(report: dict[str, Any]) -> str:
    """A row for each: what its time went into, and what came of it."""
    rows = {row["what"]: row["figure"] for row in report["rows"]}
    heads = ["of preset `small`", "a step, s", "steps", "images seen", "minutes", "bits/dim"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name in report["curves"]:
        step, steps, minutes, score = (rows[f"{name}: {what}"] for what in FIGURES)
        seen = steps * report["batch"]
        lines.append(f"| {name} | {step:.2f} | {steps:,.0f} | {seen:,.0f} | {minutes:.0f} | {score:.3f} |")
    return "\n".join(lines)


def draw(report: dict[str, Any]) -> Path:
    """Bits per value of the validation images by the minutes that the steps so far take."""
    rows = {row["what"]: row["figure"] for row in report["rows"]}
    lines = {
        name: {int(step) * rows[f"{name}: a step"] / 60: value for step, value in curve.items()}
        for name, curve in report["curves"].items()
    }
    file = HERE / "hours.png"
    title = "One time for each: small models on one machine"
    pictures.curves(file, lines, x="minutes of training", y="bits/dim in validation", title=title)
    return file

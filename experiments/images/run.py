"""The paper's images: see README.md beside this file.

    python experiments/images/run.py ablation --data DIR     what each part of preset "best" is worth
    python experiments/images/run.py hours --data DIR        what the same time brings each mechanism
    python experiments/images/run.py speed                   how fast each way to generate is

Trainings that are killed resume with the same command. A measurement of speed starts again, and nothing else
may run during it, nor while `hours` first measures what a step takes.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from lintra import train
from lintra.allocator import keep_freed_memory
from lintra.attention import linear
from lintra.bench import reports
from lintra.bench.reports import Row
from lintra.nn import Logits
from lintra.tasks import images

HERE = Path(__file__).parent
ABLATION = HERE / "ablation.json"
sys.path[:0] = [str(HERE), str(HERE.parent)]
import hours  # noqa: E402 (from this folder)
import speed  # noqa: E402
from trials import Trial, add_options, earlier, tell, train_all  # noqa: E402 (from the folder above)

SEEDS = (0, 1, 2)
STEPS = 300
JUDGED = 500  # held-out training images, by which preset "best" is chosen
# Half the depth of preset "small"; without the paper's ReLU and dropout, which so few steps would not show.
SIZE = {"layers": 2, "heads": 4, "width": 128, "mlp_ratio": 3, "activation": "gelu", "dropout": 0.0}

# From the paper's model and training to ours: each line keeps what the lines above it changed.
Changes = tuple[str, dict[str, Any], dict[str, Any]]  # name, of the model, of the training


def changes(task: images.Images) -> list[Changes]:
    ours = task.model(linear.Config())
    falling = {"schedule": "wsd", "warmup": 30}
    return [
        ("the paper's model and training", {}, {"optimizer": "radam", "lr": 1e-4}),
        ("learning rate 1e-3", {}, {"lr": 1e-3}),
        ("norms first, warm-up, a rate that falls to 0", {"norm": "pre", "final_norm": None}, falling),
        ("a logit for each level", {"output": Logits(), "start": True}, {}),
        ("positions by row and column", {"position": "grid", "grid": ours.grid}, {}),
        ("surrounding values embedded", {"context": ours.context}, {}),
        ("Muon, learning rate 3e-3", {}, {"optimizer": "muon", "lr": 3e-3}),
    ]


# Changes to `best`, each by itself on top of all of the above.
FURTHER: list[Changes] = [
    ("a running mean of the weights (0.99)", {}, {"ema": 0.99}),
    ("a running mean (0.99), and a rate that does not fall", {}, {"ema": 0.99, "schedule": "constant"}),
    ("dropout 0.1", {"dropout": 0.1}, {}),
    ("learning rate 1.5e-3", {}, {"lr": 1.5e-3}),
    ("learning rate 6e-3", {}, {"lr": 6e-3}),
    ("learning rate 1.2e-2", {}, {"lr": 1.2e-2}),
    ("learning rate 2.4e-2", {}, {"lr": 2.4e-2}),
    (
        "learning rate 1.2e-2, the running mean, no fall",
        {},
        {"lr": 1.2e-2, "ema": 0.99, "schedule": "constant"},
    ),
    ("4 images a step, 600 steps", {}, {"batch": 4, "steps": 600}),
    ("16 images a step, 150 steps", {}, {"batch": 16, "steps": 150}),
    ("weight decay 0.1", {}, {"weight_decay": 0.1}),
    ("2 heads: a state of twice the size", {"heads": 2}, {}),
    ("8 heads: a state of half the size", {"heads": 8}, {}),
    ("a short convolution over 4 values", {"conv": 4}, {}),
    ("a gated norm of each head", {"output_gate": True}, {}),
    ("squared ReLU as the feature map", {"attention": linear.Config(feature_map=linear.SquaredRelu())}, {}),
]


def ablation(data: Path) -> list[Trial]:
    """Everything to train, the first seed of all before the second of any."""
    task = images.Config(data_dir=str(data), preset="small", validate_images=JUDGED)
    paper = dataclasses.replace(task, preset="paper").build().model(linear.Config())
    trials = []

    def add(name: str, model: Any, training: dict[str, Any], seed: int) -> None:
        settings = {"steps": STEPS, "batch": 8, "precision": "32", "save_every": 100, "validate_every": 10**6}
        config = train.Config(**settings | training, seed=seed)
        folder = HERE / "runs" / "ablation" / f"{len(trials) % len(order) + 1}" / f"seed-{seed}"
        trials.append(Trial(name, folder, task, model, config, "bits_per_dim", JUDGED, "validate"))

    kept = changes(task.build())
    order = [*kept, *FURTHER]
    for seed in SEEDS:
        model, training = dataclasses.replace(paper, **SIZE), {}
        for name, of_model, of_training in kept:
            model = dataclasses.replace(model, **of_model)
            training = training | of_training
            add(name, model, training, seed)
        for name, of_model, of_training in FURTHER:
            add(name, dataclasses.replace(model, **of_model), training | of_training, seed)
    return trials


def summary(trials: list[Trial]) -> dict[str, list[float]]:
    """name -> the score of each seed that is done; none for a change of which a seed diverged."""
    found: dict[str, list[float]] = {}
    for trial in trials:
        value = trial.scored()
        if value is not None:
            found.setdefault(trial.name, []).append(value)
    return {name: [] if any(map(math.isnan, values)) else values for name, values in found.items()}


def ablation_tables(report: dict[str, Any]) -> list[str]:
    """Mean and spread over the seeds: of the parts that make up `best`, and of further changes to it."""
    scores = report["scores"]
    further = [name for name, _, _ in FURTHER if name in scores]
    parts = {
        "change, on top of those above it": [name for name in scores if name not in further],
        "change, by itself on top of all of them": further,
    }
    tables = []
    for head, names in parts.items():
        lines = [f"| {head} | bits/dim | standard deviation |", "| --- | --- | --- |"]
        for name in names:
            if not scores[name]:
                lines.append(f"| {name} | diverged | |")
                continue
            mean, spread = statistics.mean(scores[name]), statistics.stdev(scores[name])
            lines.append(f"| {name} | {mean:.3f} | {spread:.3f} |")
        tables.append("\n".join(lines))
    return tables


def hours_tables(report: dict[str, Any]) -> list[str]:
    return [hours.table(report)] if hours.learned() else []


def speed_tables(report: dict[str, Any]) -> list[str]:
    tables = (speed.table(report, data) for data in speed.BATCHES)
    return [*tables, speed.batch_table(report), speed.state_table(report)]


def measure_speed() -> None:
    keep_freed_memory()
    rows, timings = [], {}
    for data in speed.BATCHES:
        measured, each = speed.measure(data)
        rows += [*measured, *speed.state_sizes(data)]
        timings |= each
    reports.write(HERE / "speed.json", rows, timings, command="python experiments/images/run.py speed")
    print("\n\n".join(speed_tables(json.loads((HERE / "speed.json").read_text()))))


def main() -> None:
    parser = argparse.ArgumentParser(description="The paper's images.")
    parser.add_argument("what", choices=["ablation", "hours", "speed"])
    parser.add_argument("--data", type=Path, help="folder with the data sets, or one above")
    add_options(parser, minutes=60.0)
    options = parser.parse_args()
    if options.what == "speed":
        if options.list or options.data is not None:
            parser.error("speed trains nothing: it takes neither --data nor --list")
        measure_speed()
        return
    if options.data is None:
        parser.error(f"{options.what} needs --data")
    saved = json.loads(ABLATION.read_text()) if ABLATION.exists() else {}
    scores = saved.get("scores", {})
    if options.what == "hours" and options.list and not hours.TIMES.exists():
        print("to do: what a step of each takes, which says how many steps are trained")
        return
    if options.what == "ablation":  # what the file holds is not trained again
        asked = ablation(options.data)
        scores = {trial.name: scores[trial.name] for trial in asked if trial.name in scores}
        trials = [trial for trial in asked if trial.name not in scores]
    else:
        trials = hours.trials(options.data)
    if options.list:
        if options.what == "ablation":
            for name in scores:
                print(f"done  {name}")
        tell(trials)
        return
    if options.what == "hours":
        files = hours.measure(trials, workers=options.workers, minutes=options.minutes)
        print(*hours_tables(json.loads(hours.TIMES.read_text())), sep="\n\n")
        print(*(f"chart saved in {file}" for file in files), sep="\n")
        return
    train_all(trials, workers=options.workers, minutes=options.minutes)
    if any(trial.scored() is None for trial in trials):
        print("not all is trained: the same command resumes")
        return
    if trials:
        found = scores | summary(trials)
        rows = [Row(name, statistics.mean(values), "bits/dim") for name, values in found.items() if values]
        command = "python experiments/images/run.py ablation --data DIR"
        reports.write(ABLATION, rows, {}, command=command, scores=found, earlier=earlier(saved))
    print(*ablation_tables(json.loads(ABLATION.read_text())), sep="\n\n")


if __name__ == "__main__":
    main()

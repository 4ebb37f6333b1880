"""Count the generated digits that read as digits, by a classifier of MNIST. README.md says more.

    python experiments/images/readability.py --data DIR

An image counts as a digit if the classifier gives one class more than 90 %. The classifier was taught digits
alone, and may be sure of what a person cannot read. This takes minutes on one core. DIR holds MNIST's four
files, or a folder mnist that does.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra import checkpoint
from lintra.bench import reports
from lintra.bench.reports import Row, by_name
from lintra.generation import sampling
from lintra.tasks import image_classification

HERE = Path(__file__).parent
FILE = HERE / "readability.json"
MODELS = ("mnist-small", "weights/mnist")
SURE = 0.9  # probability of one class
DRAWN, AT_ONCE = 1_000, 250  # images of each model, and how many are drawn at a time
EPOCHS, BATCH, RATE = 3, 100, 3e-3
SEED = 0  # of the classifier, and of the first batch of generated images
TEST, ACCURACY = "MNIST's test images", "the classifier is right on test images"


def network() -> nn.Sequential:
    """Images [n 1 28 28] -> logits [n 10]: two convolutions and two layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 49, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def pixels(values: Tensor) -> Tensor:
    """Grey levels [n 784] -> [n 1 28 28] from 0 to 1."""
    return values.float().reshape(-1, 1, 28, 28) / 255


def learned(values: Tensor, digits: Tensor) -> nn.Sequential:
    """Return a classifier of images [n 784] with classes [n], trained for a few epochs of Adam."""
    torch.manual_seed(SEED)
    model, steps = network(), EPOCHS * len(values) // BATCH
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    order = torch.cat([torch.randperm(len(values)) for _ in range(EPOCHS)])
    for chosen in order.split(BATCH):
        loss = functional.cross_entropy(model(pixels(values[chosen])), digits[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def probabilities(model: nn.Module, values: Tensor) -> Tensor:
    """The probability of each class, for images [n 784] -> [n 10]."""
    return torch.cat([model(pixels(part)).softmax(1) for part in values.split(500)])


def generated(name: str) -> Tensor:
    """Images that a model generates -> [n 784]."""
    folder = Path(name) if name in checkpoint.shipped() else HERE.parents[1] / name
    model, seeds = checkpoint.load(folder), range(SEED, SEED + DRAWN // AT_ONCE)
    return torch.cat([sampling.generate(model, steps=784, batch=AT_ONCE, seed=seed) for seed in seeds])


def share(sure: Tensor) -> float:
    """The share of True in [n] bool, in percent."""
    return 100 * float(sure.double().mean())


def rows(data: Path) -> Iterator[Row]:
    task = image_classification.Config(data="mnist", data_dir=str(data)).build()
    parts = task.train, task.validate  # the split of the task, not of the classifier
    model = learned(*(torch.cat([getattr(x, name) for x in parts]) for name in ("values", "labels")))
    found = probabilities(model, task.test.values)
    right = found.argmax(1) == task.test.labels
    yield Row(ACCURACY, share(right), "%")
    yield Row(TEST, share(found.amax(1) > SURE), "%")
    for name in MODELS:
        yield Row(name, share(probabilities(model, generated(name)).amax(1) > SURE), "%")


def sentence(report: dict[str, Any], name: str) -> str:
    """The result of one model and that of the test images, with the standard error of the samples."""
    found = by_name(report)
    part = found[name] / 100
    error = 100 * math.sqrt(part * (1 - part) / report["drawn"])
    return (
        f"a classifier that is right on {found[ACCURACY]:.1f} % of the test images is over 90 % sure of "
        f"{found[name]:.0f} +- {error:.0f} % of what it draws, and of {found[TEST]:.0f} % of the test images"
    )


def table(report: dict[str, Any]) -> str:
    found = by_name(report)
    heads = ["images", "of which the classifier is over 90 % sure, %"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- |"]
    names = {TEST: f"{TEST}, 10,000"} | {name: f"samples of {name}, {report['drawn']:,}" for name in MODELS}
    return "\n".join([*lines, *(f"| {label} | {found[name]:.1f} |" for name, label in names.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description="How many generated digits read as digits.")
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST, or one above")
    command = "python experiments/images/readability.py --data DIR"
    found = list(rows(parser.parse_args().data))
    reports.write(FILE, found, {}, command=command, drawn=DRAWN, seed=SEED, sure=SURE)
    print(table(json.loads(FILE.read_text())))


if __name__ == "__main__":
    main()

"""The models that come with the library: small, complete, able to draw, and with measured claims only."""

import csv
import json
import re
import runpy
import statistics
from pathlib import Path

import pytest
import torch

from lintra import checkpoint, train
from lintra.cli import main
from lintra.generation import sampling
from lintra.models import Decoder

ROOT = Path(__file__).parents[1]
PACKED = sorted(
    x.parent for x in (*checkpoint.SHIPPED.glob("*/config.json"), *ROOT.glob("weights/*/config.json"))
)
INSTALLED = checkpoint.shipped()
MOST = {"images": 2e6, "speech": 4e6}  # bytes in the wheel
RECORDINGS = ROOT / "tests" / "speech" / "data"


def test_there_are_some_right_after_installation():
    assert {"mnist-small", "spoken-digits"} <= set(INSTALLED)


@pytest.mark.parametrize("name", INSTALLED)
def test_what_is_in_the_wheel_is_small(name):
    weights = sum(x.stat().st_size for x in (checkpoint.SHIPPED / name).glob("*.safetensors"))
    assert weights <= MOST[train.Run.around(name).task.build().name]


def check_arrangements(folder, card, model, found):
    """The card of a digit recogniser states the results of all arrangements of the test recordings."""
    arranged = json.loads((folder / "arrangements.json").read_text())
    assert {"machine", "versions", "command", "date"} <= set(arranged)
    rates = [100 * x["word"] for x in arranged["arrangements"]["strings of 1 to 7 digits"]]
    assert len(rates) == len(arranged["seeds"]) >= 31
    assert rates[0] == 100 * found["scores"]["word"]["rate"]  # `lintra evaluate` scores the first
    told = f"{statistics.mean(rates):.2f} % of the words are wrong on average, {min(rates):.2f} % to "
    told += f"{max(rates):.2f} %, with a standard deviation of {statistics.stdev(rates):.2f} %"
    assert f"In {len(rates)} arrangements {told}" in " ".join(card.split())
    made = runpy.run_path(str(ROOT / "experiments" / "ship.py"))["of_speech"]
    assert card.startswith(made(folder.name, model, found, arranged))


@pytest.mark.parametrize("folder", PACKED, ids=lambda folder: folder.name)
def test_the_card_says_what_was_measured(folder):
    card, found = (folder / "README.md").read_text(), json.loads((folder / "evaluation.json").read_text())
    assert {"machine", "versions", "command", "date"} <= set(found)
    model, run = checkpoint.load(folder), train.Run.around(folder)
    assert f"{sum(x.numel() for x in model.parameters()):,} parameters" in card
    assert f"| {found['test_samples']:,} test " in card
    assert model.config == run.model
    with (folder / "log.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    if run.task.build().name == "images":
        for score in ("bits_per_dim", "bits_per_dim_without_the_first"):
            assert f"| {found['scores'][score]['mean']:.4f} | {found['scores'][score]['error']:.4f} |" in card
        assert all(x["samples"] == found["test_samples"] for x in found["scores"].values())
        told = re.findall(rf"([\d,]+) steps of {run.train.batch} images", card)  # a number for each training
        assert sum(int(x.replace(",", "")) for x in told) == steps[-1]
    else:
        for unit, x in found["scores"].items():
            assert f"| {unit} errors | {x['rate']:.2%} | {x['low']:.2%} to {x['high']:.2%} |" in card
        assert re.search(rf"{steps[-1]:,} steps of up to {run.task.build().batch_tokens:,} frames", card)
        if run.task.data == "an4":
            made = runpy.run_path(str(ROOT / "experiments" / "speech" / "letters.py"))["card"]
            assert card.startswith(made(folder.name, model, found))
        else:
            check_arrangements(folder, card, model, found)
    assert not found.get("partial")
    for x in (x for x in folder.rglob("*") if x.is_file()):
        assert x.stat().st_size <= 15e6, x
        if x.suffix in (".json", ".md", ".csv"):
            assert not re.search(r"(?<![\w.])/(tmp|home|root|work|Users)/", x.read_text()), x


@pytest.mark.parametrize("how", ["whole", "stream"])
@pytest.mark.parametrize(
    ("file", "word"), [("0_nicolas_2.wav", "zero"), ("3_theo_0.wav", "three"), ("7_jackson_1.wav", "seven")]
)
def test_it_writes_down_digits(file, word, how, capsys):
    """Recordings that it was not trained on, with the model used by default."""
    arguments = ["transcribe", *(["--stream"] if how == "stream" else []), str(RECORDINGS / file)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.split() == [word]


@pytest.mark.parametrize("name", [x for x in INSTALLED if isinstance(checkpoint.load(x), Decoder)])
def test_it_draws_digits(name):
    """As far as numbers tell: about as much ink as MNIST, 13 % of the maximum, and none in the corners."""
    model = checkpoint.load(name)
    drawn = sampling.generate(model, steps=784, batch=8, seed=0).unflatten(1, (28, 28)) / 255
    assert 0.08 < drawn.mean() < 0.2
    assert drawn[:, :3, :3].max() == drawn[:, -3:, -3:].max() == 0
    assert torch.equal(
        sampling.generate(model, steps=40, batch=2, seed=1),
        sampling.generate(model, steps=40, batch=2, seed=1),
    )

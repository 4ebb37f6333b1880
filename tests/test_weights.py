"""The models that come with the library: small, whole, able to draw, and what their cards say is measured."""

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from lintra import checkpoint, generate, train

ROOT = Path(__file__).parents[1]
PACKED = sorted(
    x.parent for x in (*checkpoint.SHIPPED.glob("*/config.json"), *ROOT.glob("weights/*/config.json"))
)
INSTALLED = checkpoint.shipped()


def test_there_is_one_right_after_installation():
    assert "mnist-small" in INSTALLED


@pytest.mark.parametrize("name", INSTALLED)
def test_what_is_in_the_wheel_is_small(name):
    assert sum(x.stat().st_size for x in (checkpoint.SHIPPED / name).glob("*.safetensors")) <= 2e6


@pytest.mark.parametrize("folder", PACKED, ids=lambda folder: folder.name)
def test_the_card_says_what_was_measured(folder):
    card, found = (folder / "README.md").read_text(), json.loads((folder / "evaluation.json").read_text())
    assert {"machine", "versions", "command", "date"} <= set(found)
    for score in ("bits_per_dim", "bits_per_dim_without_the_first"):
        assert f"| {found['scores'][score]['mean']:.4f} | {found['scores'][score]['error']:.4f} |" in card
    model, run = checkpoint.load(folder), train.Run.around(folder)
    assert f"{sum(x.numel() for x in model.parameters()):,} parameters" in card
    assert found["test_samples"] == 10_000
    assert model.config == run.model
    with (folder / "log.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert re.search(rf"{steps[-1]:,} steps of {run.train.batch} images", card)
    for x in folder.iterdir():
        assert x.stat().st_size <= 15e6, x
        if x.suffix in (".json", ".md", ".csv"):
            assert not re.search(r"(?<![\w.])/(tmp|home|root|work|Users)/", x.read_text()), x


@pytest.mark.parametrize("name", INSTALLED)
def test_it_draws_digits(name):
    """As far as numbers tell: about as much ink as MNIST has, 13 % of the most, and none in the corners."""
    model = checkpoint.load(name)
    drawn = generate.generate(model, steps=784, batch=8, seed=0).unflatten(1, (28, 28)) / 255
    assert 0.08 < drawn.mean() < 0.2
    assert drawn[:, :3, :3].max() == drawn[:, -3:, -3:].max() == 0
    assert torch.equal(
        generate.generate(model, steps=40, batch=2, seed=1),
        generate.generate(model, steps=40, batch=2, seed=1),
    )

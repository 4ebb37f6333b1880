"""Pictures are PNG files of the expected make; whether they are good to look at, a person must say."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from lintra import checkpoint, pictures


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (32, 32, 3)])
def test_grids_show_the_images(tmp_path, shape):
    white = torch.full((5, *shape), 255, dtype=torch.uint8)
    dark = torch.zeros_like(white)
    for name, images in (("white", white), ("dark", dark)):
        pictures.samples(tmp_path / f"{name}.png", images, "five")
        pictures.completions(
            tmp_path / f"{name}2.png", images, 3, images[:, None].repeat(1, 2, 1, 1, 1), "five completed"
        )
    for number in ("", "2"):
        bright, black = pixels(tmp_path / f"white{number}.png"), pixels(tmp_path / f"dark{number}.png")
        assert bright.shape == black.shape
        assert (black == 0).mean() > 0.2
        assert (bright == 0).mean() < 0.02


def test_curves_with_little_in_them(tmp_path):
    for train, validate in [
        ({}, {}),
        ({10: 2.0}, {}),
        ({i: 1 / i for i in range(1, 99)}, {50: 0.1, 98: 0.05}),
    ]:
        pictures.loss_curve(tmp_path / "loss.png", train, validate, unit="nats per symbol", title="loss")
        assert pixels(tmp_path / "loss.png").std() > 1
    pictures.time_per_token(tmp_path / "time.png", (16, 32), {"a": [1.0, 1.1], "b": [1.0, 4.0]}, "time")
    assert pixels(tmp_path / "time.png").std() > 1


def test_a_roof_over_points(tmp_path):
    points = {"a": (0.5, 3.0), "b": (20.0, 90.0)}
    pictures.roofline(tmp_path / "roof.png", points, arithmetic=100.0, memory=10.0, title="roof")
    assert pixels(tmp_path / "roof.png").std() > 1


def test_a_picture_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    pictures.samples(path, torch.zeros(1, 8, 8, 1, dtype=torch.uint8), "before")
    before = path.read_bytes()

    def broken(self, file, **_):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", broken)
    with pytest.raises(checkpoint.Error, match=r"a\.png cannot be written"):
        pictures.samples(path, torch.zeros(1, 8, 8, 1, dtype=torch.uint8), "after")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]

"""Pathfinder: do the two circles lie on one dashed path, or on two?

A grey image has two long dashed paths, shorter ones that distract, and circles at two ends: at both ends
of one path, or at one of each path (Linsley et al. 2018, arXiv:1805.08315; the Long Range Arena,
Tay et al. 2021, arXiv:2011.04006, section 2.2.5). Pixels are read one after another, row by row, as symbols
0 to 255. The images are drawn here, not those of these papers: a dash is two pixels long and the next one
begins GAP pixels behind it, turned by at most TURN, while pixels of different paths are more than GAP apart
along a row or column. So a path is what can be walked in steps of at most GAP, which decides every label.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.models import encoder
from lintra.tasks._classification import ClassificationTask
from lintra.tasks._synthetic import NumberedSamples, NumberedTask, check, generator
from lintra.tasks.base import Batch, TaskConfig

GAP = 2  # the larger of the steps along rows and columns from one dash to the next, and within one
TURN = 0.6  # radians from one dash to the next, at most
CIRCLE, DASHES, BLACK = 255, (128, 224), 0  # grey levels; that of a dash is drawn between two
_STARTS, _TURNS, _IMAGES = 40, 6, 10_000  # attempts at a path, a dash and an image
Pixel = tuple[int, int]  # row, column


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Decide whether a path joins two circles (of the LRA)."""

    size: int = 32  # pixels of a side
    dashes: int = 9  # of each of the two long paths
    distractors: int = 6  # shorter paths, of a third as many dashes, at most: as many as fit
    train_samples: int = 160_000  # images in an epoch
    validate_samples: int = 2_000  # images to validate on
    data_seed: int = 0  # another seed, other images

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, size=16, dashes=3, distractors=0)
        if (most := self.size * self.size // 64) < self.dashes:
            raise ValueError(f"dashes must be at most {most} at size={self.size}, got {self.dashes}")
        check(self)

    def training_preset(self) -> dict[str, Any]:
        return {"steps": 10_000, "batch": 64, "lr": 1e-3, "schedule": "cosine", "warmup": 300}

    def build(self) -> "Pathfinder":
        return Pathfinder(self)


class _Image:
    """An image as it is drawn: which pixels are taken, and which lie near other paths."""

    def __init__(self, size: int, source: np.random.Generator):
        self.size, self.source = size, source
        self.pixels = np.zeros((size, size), np.uint8)
        # Whether a pixel is closer than a path may come to those that are drawn, by row and column.
        self.near = [[False] * size for _ in range(size)]

    def path(self, dashes: int) -> list[Pixel] | None:
        """Return the pixels of a path that fits, from end to end; None where none does."""
        for _ in range(_STARTS):
            row, column, turn = self.source.random(3).tolist()
            row, column = (2 + x * (self.size - 5) for x in (row, column))
            angle = 2 * math.pi * turn
            if found := self._walk(row, column, angle, dashes):
                return found
        return None

    def _walk(self, row: float, column: float, angle: float, dashes: int) -> list[Pixel] | None:
        found: list[Pixel] = []
        for _ in range(dashes):
            for turn in self.source.uniform(-TURN, TURN, _TURNS).tolist():
                down, right = math.sin(angle + turn), math.cos(angle + turn)
                longer = max(abs(down), abs(right))
                down, right = down / longer, right / longer  # a pixel along a row or column
                dash = [(round(row + i * down), round(column + i * right)) for i in range(2)]
                if all(self._free(pixel, found) for pixel in dash):
                    found += dash
                    row, column, angle = row + (1 + GAP) * down, column + (1 + GAP) * right, angle + turn
                    break
            else:
                return None
        return found

    def _free(self, pixel: Pixel, found: list[Pixel]) -> bool:
        """Return whether a path may reach a pixel: not at the border, near others or its own beginning."""
        row, column = pixel
        if not (1 <= row < self.size - 1 and 1 <= column < self.size - 1) or self.near[row][column]:
            return False
        return all(abs(row - y) > GAP or abs(column - x) > GAP for y, x in found[:-2])

    def draw(self, path: list[Pixel], apart: int) -> None:
        """Draw a path, each dash in a grey of its own, and keep other paths this many pixels away."""
        greys = self.source.integers(*DASHES, len(path) // 2).repeat(2)
        for (row, column), grey in zip(path, greys, strict=True):
            self.pixels[row, column] = grey
            for line in self.near[max(0, row - apart + 1) : row + apart]:
                for other in range(max(0, column - apart + 1), min(self.size, column + apart)):
                    line[other] = True

    def circle(self, pixel: Pixel) -> None:
        """Mark an end: 3 x 3 pixels."""
        row, column = pixel
        self.pixels[row - 1 : row + 2, column - 1 : column + 2] = CIRCLE


def draw(config: Config, source: np.random.Generator) -> tuple[np.ndarray, int]:
    """Return an image [size size] uint8 and whether one path joins its circles, 1 or 0. Raises ValueError
    where no two paths fit."""
    label = int(source.integers(2))
    for _ in range(_IMAGES):
        image = _Image(config.size, source)
        paths = []
        for _ in range(2):
            if (path := image.path(config.dashes)) is not None:
                image.draw(path, GAP + 3)  # circles, a pixel wider, may be at both
                paths.append(path)
        if len(paths) < 2:
            continue
        for _ in range(config.distractors):
            if (path := image.path(max(1, config.dashes // 3))) is not None:
                image.draw(path, GAP + 2)
        for end in _ends(*paths, joined=label == 1):
            image.circle(end)
        return image.pixels, label
    raise ValueError(
        f"two paths of {config.dashes} dashes do not find room in {config.size} x {config.size} pixels"
    )


def _ends(first: list[Pixel], second: list[Pixel], *, joined: bool) -> tuple[Pixel, Pixel]:
    """Return the ends of the first path, or one of each path that are about as far from each other. How far
    the circles are apart and from the border still says something of the label: a baseline to beat."""
    if joined:
        return first[0], first[-1]
    distance = math.dist(first[0], first[-1])
    pairs = [(one, other) for one in (first[0], first[-1]) for other in (second[0], second[-1])]
    return min(pairs, key=lambda pair: abs(math.dist(*pair) - distance))


class PathfinderSamples(NumberedSamples):
    """Samples {"tokens": [size * size] int64, "label": int64}, the label 1 where a path joins the circles."""

    workers = 2

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        config = self.config
        drawn = [draw(config, generator(config.data_seed, self.numbers[i])) for i in indices]
        pixels = np.stack([pixels for pixels, _ in drawn]).reshape(len(drawn), -1)
        labels = torch.tensor([label for _, label in drawn])
        return {"tokens": torch.from_numpy(pixels.astype(np.int64)), "label": labels}


class Pathfinder(NumberedTask, ClassificationTask):
    """Two classes: 1 where a path joins the circles."""

    name = "pathfinder"
    loss_unit = "nats an image"
    samples = PathfinderSamples

    @property
    def length(self) -> int:
        return self.config.size**2

    def model(self, attention: AttentionPattern) -> encoder.Config:
        """Return a network small enough for two cores: 2 layers, 4 heads of 32, the mean over all pixels."""
        return encoder.Config(
            vocabulary=256,
            attention=attention,
            layers=2,
            heads=4,
            width=128,
            mlp_ratio=2,
            position="learned",
            max_length=self.length,
            pool="mean",
            outputs=2,
            dropout=0.1,
        )

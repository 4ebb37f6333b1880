"""Draw handwritten digits of 8 x 8 pixels: real, bundled, learned in minutes on a laptop.

1,797 images with 17 levels: the first 1,500 are for training, the next 147 for validation, the last 150 for
the test. Their source and licence are in data/README.md. Nothing is augmented.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from lintra.attention import AttentionPattern
from lintra.models import decoder
from lintra.tasks._pixels import PixelTask, Split
from lintra.tasks.base import TaskConfig

_ENDS = (1_500, 1_647)  # of the images to train and to validate on


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Draw 8 x 8 handwritten digits (1,797 real ones, bundled)."""

    def training_preset(self) -> dict[str, Any]:
        """Settings for two to three minutes on two cores."""
        return {
            "steps": 2_000,
            "batch": 16,
            "lr": 4e-3,
            "weight_decay": 0.1,
            "schedule": "cosine",
            "warmup": 50,
        }

    def build(self) -> "Digits":
        return Digits(self)


class Digits(PixelTask):
    name = "digits"
    image_shape = (8, 8, 1)
    levels = 17

    def __init__(self, config: Config):
        self.config = config

    def images(self, split: Split) -> np.ndarray:
        with (files("lintra.tasks") / "data" / "digits.npz").open("rb") as file:
            images = np.load(file, allow_pickle=False)["images"][..., None]
        train, validate, test = np.split(images, _ENDS)
        return {"train": train, "validate": validate, "test": test}[split]

    def model(self, attention: AttentionPattern) -> decoder.Config:
        """Return a network small enough for minutes of training: 3 layers, 4 heads of 32."""
        return decoder.Config(
            vocabulary=self.levels,
            attention=attention,
            layers=3,
            heads=4,
            width=128,
            mlp_ratio=4,
            position="concatenated",
            output=decoder.Logits(),
            dropout=0.1,  # 1,500 images are soon memorised
        )

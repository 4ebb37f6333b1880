"""Classify images of MNIST or CIFAR-10, read pixel by pixel, row after row, as grey levels.

Of CIFAR-10 it is the image task of the Long Range Arena (Tay et al. 2021, arXiv:2011.04006, section 2.2.4),
of MNIST it is sequential MNIST (Le et al. 2015, arXiv:1504.00941). The last training images are held
out to validate on; test images are for scores alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.models import encoder
from lintra.tasks._classification import ClassificationTask
from lintra.tasks.base import Batch, Samples, TaskConfig
from lintra.tasks.images import SOURCES, Data, check_count, first, last, locate

CLASSES = 10
LUMA = (0.2989, 0.5870, 0.1140)  # of red, green and blue in a grey level (ITU-R BT.601)


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Classify images (CIFAR-10, MNIST)."""

    PATHS: ClassVar = ("data_dir",)

    data: Data = "cifar10"  # which images
    data_dir: str | None = None  # their files; else $LINTRA_DATA, or a download
    validate_images: int = 1_000  # training images held out to validate on

    def __post_init__(self):
        fields.check(self)
        check_count("validate_images", self.validate_images, SOURCES[self.data].TRAIN_IMAGES - 1)

    def training_preset(self) -> dict[str, Any]:
        return {
            "steps": 20_000,
            "batch": 32,
            "lr": 1e-3,
            "weight_decay": 0.1,
            "schedule": "cosine",
            "warmup": 500,
        }

    def with_data(self, data: str) -> "Config":
        return replace(self, data_dir=data)

    def build(self) -> "ImageClassification":
        return ImageClassification(self)


class ClassifiedImages(Samples):
    """Images [n h w] uint8 and their classes [n] uint8 -> samples {"tokens": [h*w] int64, "label": int64}."""

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self.values = torch.from_numpy(images).flatten(1)
        self.labels = torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        places = torch.as_tensor(indices)
        return {"tokens": self.values[places].long(), "label": self.labels[places]}


class ImageClassification(ClassificationTask):
    """Ten classes."""

    name = "image_classification"
    loss_unit = "nats an image"
    validates_all = True

    def __init__(self, config: Config):
        self.config = config

    @property
    def length(self) -> int:
        height, width, _ = SOURCES[self.config.data].SHAPE
        return height * width

    @cached_property
    def _splits(self) -> Any:
        return locate(self.config.data, self.config.data_dir, labels=True)

    @cached_property
    def train(self) -> ClassifiedImages:  # pyright: ignore[reportIncompatibleMethodOverride]
        kept = SOURCES[self.config.data].TRAIN_IMAGES - self.config.validate_images
        return ClassifiedImages(grey(first(kept, self._splits.train)), self._splits.labels("train")[:kept])

    @cached_property
    def validate(self) -> ClassifiedImages:  # pyright: ignore[reportIncompatibleMethodOverride]
        held_out = self.config.validate_images
        images = grey(last(held_out, self._splits.train))
        return ClassifiedImages(images, self._splits.labels("train")[-held_out:])

    @cached_property
    def test(self) -> ClassifiedImages:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ClassifiedImages(grey(first(None, self._splits.test)), self._splits.labels("test"))

    def model(self, attention: AttentionPattern) -> encoder.Config:
        """Return a network small enough for two cores: 3 layers, 4 heads of 16, the mean over all pixels."""
        return encoder.Config(
            vocabulary=256,
            attention=attention,
            layers=3,
            heads=4,
            width=64,
            mlp_ratio=2,
            position="learned",
            max_length=self.length,
            pool="mean",
            outputs=CLASSES,
            dropout=0.1,
        )


def grey(images: np.ndarray) -> np.ndarray:
    """Images [n h w 3] or [n h w 1] uint8 -> grey levels [n h w] uint8."""
    if images.shape[-1] == 1:
        return images[..., 0]
    found = np.empty(images.shape[:-1], np.uint8)
    for part in range(0, len(images), 1_000):  # in float32 they would take four times their memory
        levels = images[part : part + 1_000].astype(np.float32) @ np.array(LUMA, np.float32)
        found[part : part + 1_000] = np.rint(levels)
    return found

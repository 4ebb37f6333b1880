"""Draw MNIST or CIFAR-10 images value by value (Katharopoulos et al. 2020, arXiv:2006.16236, tables 1 and 2).

An image is a sequence of 784 grey levels, or of 3,072 with r, g and b of a pixel side by side. Every value is
predicted, the first from the start symbol; the paper's released code, and so the preset "paper", leaves the
first one out (783 and 3,071 predictions).

The last training images are held out to validate on; test images are for scores alone.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.models import decoder
from lintra.tasks._pixels import HOURS, PixelTask, Split
from lintra.tasks.base import DataError, TaskConfig
from lintra.tasks.datasets import cifar10, data_files, mnist

Data = Literal["mnist", "cifar10"]
SOURCES: dict[Data, ModuleType] = {"mnist": mnist, "cifar10": cifar10}

Preset = Literal["best", "small", "paper"]

# Settings of lintra.train.Config.
PRESETS: dict[Preset, dict[str, Any]] = {
    "best": {"steps": 12_000, **HOURS},
    "paper": {"clip": None, "precision": "32", "save_every": 100},
}
PRESETS["small"] = PRESETS["best"]
# Of the paper's released code; for MNIST 250 epochs; the paper's text has 10 images a step.
PAPER: dict[Data, dict[str, Any]] = {
    "mnist": {"steps": 937_500, "batch": 16, "lr": 1e-4},
    "cifar10": {"steps": 500_000, "batch": 10, "lr": 2e-4},
}


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Draw MNIST or CIFAR-10 images (the paper's)."""

    PATHS: ClassVar = ("data_dir",)
    # Version 0.1 knew no held-out images: its runs were validated on the first test images.
    ABSENT: ClassVar = {"validate_on": "test"}

    data: Data = "mnist"  # which images
    preset: Preset = "best"  # paper: model and training of its released code
    data_dir: str | None = None  # their files; else $LINTRA_DATA, or a download
    limit: int | None = None  # train on this many first images only
    validate_images: int | None = 256  # validate on this many; None: all test images
    validate_on: Literal["train", "test"] = "train"  # held-out training images, or test images

    def __post_init__(self):
        fields.check(self)
        source = SOURCES[self.data]
        if self.validate_on == "train" and self.validate_images is None:
            raise ValueError(
                "validate_images must be a number where validate_on is 'train', got None: it says how many "
                "training images are held out"
            )
        of = source.TRAIN_IMAGES - 1 if self.validate_on == "train" else source.TEST_IMAGES
        check_count("validate_images", self.validate_images, of)
        held_out = f", since {self.held_out} are held out to validate on" if self.held_out else ""
        check_count("limit", self.limit, source.TRAIN_IMAGES - self.held_out, held_out)

    @property
    def held_out(self) -> int:
        """Return how many of the last training images are not trained on."""
        return (self.validate_images or 0) if self.validate_on == "train" else 0

    def training_preset(self) -> dict[str, Any]:
        return PRESETS[self.preset] | (PAPER[self.data] if self.preset == "paper" else {})

    def with_data(self, data: str) -> "Config":
        return replace(self, data_dir=data)

    def build(self) -> "Images":
        return Images(self)


class Images(PixelTask):
    name = "images"
    validates_all = True
    levels = 256

    def __init__(self, config: Config):
        self.config = config
        self.image_shape = SOURCES[config.data].SHAPE

    def notices(self, folder: Path) -> list[str]:
        if self.config.validate_on == "train":
            return [f"validates on {self.config.held_out:,} held-out training images"]
        which = "all" if self.config.validate_images is None else f"the first {self.config.validate_images:,}"
        return [f"validates on {which} test images: what is chosen by these scores has seen the test set"]

    def at_hand(self) -> bool:
        source = SOURCES[self.config.data]
        named = data_files.named_folder(self.config.data_dir)
        return any(source.find(folder) for folder in _folders(self.config.data, named))

    def images(self, split: Split) -> np.ndarray:
        config, splits = self.config, locate(self.config.data, self.config.data_dir)
        if split == "train":
            most = SOURCES[config.data].TRAIN_IMAGES - config.held_out
            return first(config.limit or most, splits.train)
        if split == "test":
            return first(None, splits.test)
        if config.validate_on == "test":
            return first(config.validate_images, splits.test)
        return last(config.held_out, splits.train)

    def model(self, attention: AttentionPattern) -> decoder.Config:
        """Return the paper's network: 8 layers for MNIST, 16 for CIFAR-10, 8 heads of 32, a mixture of 10
        logistics. Ours have no more parameters, and see what surrounds each value.
        """
        layers = {"mnist": 8, "cifar10": 16}[self.config.data]
        mixture = decoder.LogisticMixture(components=10)
        if self.config.preset == "paper":
            return decoder.Config(
                vocabulary=self.levels,
                attention=attention,
                layers=layers,
                heads=8,
                width=256,
                mlp_ratio=4,
                activation="relu",
                dropout=0.1,
                norm="post",
                final_norm=True,
                position="concatenated",
                output=mixture,
                start=False,
            )
        small = self.config.preset == "small"
        return decoder.Config(
            vocabulary=self.levels,
            attention=attention,
            layers=4 if small else layers,
            heads=4 if small else 8,
            width=128 if small else 256,
            mlp_ratio=3 if small else 3.5,
            position="grid",
            grid=self.image_shape,
            context=self.surroundings(),
            output=decoder.Logits() if self.config.data == "mnist" else mixture,
        )


def check_count(name: str, count: int | None, most: int, why: str = "") -> None:
    """Raise ValueError unless a number of images lies in 1 .. most; None passes."""
    if count is not None and not 1 <= count <= most:
        raise ValueError(f"{name} must lie in 1 .. {most}{why}, got {count}")


def locate(data: Data, data_dir: str | None, *, labels: bool = False) -> data_files.Splits:
    """Find the files where the user says they are, or else download them, with `labels` if those are read.
    Raises DataError."""
    source, named = SOURCES[data], data_files.named_folder(data_dir)
    if named is None:
        source.download(data_files.cache_dir(data), labels=labels)
    for folder in _folders(data, named):
        if splits := source.find(folder):
            return splits
    raise DataError(
        f"{'data_dir' if data_dir else '$LINTRA_DATA'} {named} holds no {data} files, nor does its folder "
        f"{data}: expected {source.FORMS}. Without data_dir and $LINTRA_DATA they are downloaded"
    )


def _folders(data: Data, named: Path | None) -> list[Path]:
    """Return where the files may be."""
    return [data_files.cache_dir(data)] if named is None else [named, named / data]


def first(count: int | None, shards: data_files.Shards) -> np.ndarray:
    """The first `count` images of these shards, all if None. Shards that are not needed are not read."""
    read, have = [], 0
    for shard in shards:
        if count is None or have < count:
            read.append(shard())
            have += len(read[-1])
    return np.concatenate(read)[:count]


def last(count: int, shards: data_files.Shards) -> np.ndarray:
    """The last `count` images of these shards, in their order."""
    read, have = [], 0
    for shard in reversed(shards):
        if have < count:
            read.insert(0, shard())
            have += len(read[0])
    return np.concatenate(read)[-count:]

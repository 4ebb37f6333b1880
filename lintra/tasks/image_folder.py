"""Draw images like those of a folder of your own, value by value: photographs, drawings, scans.

It reads all images below the folder (PNG, JPEG, GIF, BMP, TIFF, WebP, PNM), in the order of their names, or
one IDX file of grey images. It resizes the middle square of each; transparent places become white.
Every tenth image and the last one are held out for validation.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.io.files import expanded, refuse_irregular
from lintra.models import decoder
from lintra.tasks._pixels import HOURS, PixelTask, Split
from lintra.tasks.base import DataError, TaskConfig, elsewhere
from lintra.tasks.datasets import data_files, idx

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_HELD_BACK = 10  # one image in this many is validated on
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L")  # modes of grey images
_UNSCALED = ("I", "F")  # modes of numbers of 32 bits


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Draw images like your own (--data FOLDER)."""

    PATHS: ClassVar = ("data", "test")
    SEARCHED: ClassVar = SUFFIXES

    data: str | None = None  # a folder of images, with its subfolders; or an IDX file (.gz too)
    test: str | None = None  # such a folder to test on; else what is held out
    size: int = 32  # pixels a side
    color: Literal["rgb", "gray"] = "rgb"  # what all images become

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, size=4)

    def with_data(self, data: str) -> "Config":
        """Return this configuration with the images at `data` to test on, or those held out of them where it
        learned from them."""
        return replace(self, test=elsewhere(self.data, data))

    def training_preset(self) -> dict[str, Any]:
        """Settings for some hours on two cores; --steps or --max-minutes shorten them."""
        return {"steps": 6_000, **HOURS}

    def build(self) -> "ImageFolder":
        return ImageFolder(self)


class ImageFolder(PixelTask):
    name = "image_folder"
    levels = 256

    def __init__(self, config: Config):
        self.config = config
        self.image_shape = (config.size, config.size, 3 if config.color == "rgb" else 1)

    def at_hand(self) -> bool:
        place = self.config.data if self.config.test is None else self.config.test
        return place is not None and os.path.exists(expanded(place))

    @property
    def judged_by(self) -> Literal["test", "validate"]:
        return "validate" if self.config.test is None else "test"

    def images(self, split: Split) -> np.ndarray:
        if split == "test" and self.config.test is not None:
            return self._read("test", self.config.test)
        held_out = np.arange(len(self._own)) % _HELD_BACK == _HELD_BACK - 1
        held_out[-1:] = True  # also of fewer than ten
        if split == "train":
            return self._own[~held_out]
        # In a random order, on which the fingerprints of runs depend.
        return self._own[np.random.default_rng(0).permutation(np.flatnonzero(held_out))]

    def model(self, attention: AttentionPattern) -> decoder.Config:
        """4 layers of width 128, which see what surrounds each value; colours are mixtures of 10
        logistics."""
        gray = self.config.color == "gray"
        return decoder.Config(
            vocabulary=self.levels,
            attention=attention,
            layers=4,
            heads=4,
            width=128,
            mlp_ratio=3,
            position="grid",
            grid=self.image_shape,
            context=self.surroundings(),
            output=decoder.Logits() if gray else decoder.LogisticMixture(components=10),
        )

    @cached_property
    def _own(self) -> np.ndarray:
        images = self._read("data", self.config.data)
        if len(images) < 2:
            raise DataError(f"data {self.config.data} holds one image: one is learned from, another held out")
        return images

    def _read(self, flag: str, place: str | None) -> np.ndarray:
        """Read a folder or an IDX file -> [n h w ch] uint8. Raises DataError."""
        if place is None:
            raise DataError(f"which images? Name their folder with --{flag} FOLDER")
        path = expanded(place)
        if not path.exists():
            raise DataError(f"{flag} {place} does not exist: name a folder of images")
        form = self.config.size, self.config.color
        if not path.is_dir():
            from PIL import Image

            grey = idx.images(data_files.unpack(path), path)
            count, found = len(grey), (_square(Image.fromarray(image), *form) for image in grey)
        else:
            paths = sorted(_below(path))
            count, found = len(paths), (_open(path, *form) for path in paths)
        if not count:
            raise DataError(f"{flag} {place} holds no images: expected {', '.join(SUFFIXES)}, or an IDX file")
        images = np.empty((count, *self.image_shape), np.uint8)
        with self.watch("reading images", count, "images") as report:
            for i, image in enumerate(found):
                images[i] = image.reshape(self.image_shape)
                report(i + 1)
        return images


def _below(folder: Path) -> Iterator[Path]:
    """Yield the images in a folder and its subfolders, except hidden ones and those in runs and models."""
    yield from (path for path in data_files.walk(folder) if path.suffix.lower() in SUFFIXES)


def _open(path: Path, size: int, color: Literal["rgb", "gray"]) -> np.ndarray:
    """Read an image file, its first picture if there are several, as `_square` does. Raises DataError."""
    from PIL import Image, ImageOps

    refuse_irregular(path, DataError)
    try:
        with Image.open(path) as image:
            image.load()
            sixteen = image.mode == "I" and image.format in ("PNG", "PPM")  # 16 bits, scaled to them
            if image.mode in _UNSCALED and not sixteen:
                raise ValueError("it has numbers of 32 bits, of which nothing says which one is white")
            return _square(ImageOps.exif_transpose(image), size, color)
    except Exception as error:  # Pillow's readers raise almost any for damaged files
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as an image ({reason}): repair or remove it") from error


def _square(image: "Image.Image", size: int, color: Literal["rgb", "gray"]) -> np.ndarray:
    """Make an image of any size and mode a square of `size` pixels a side -> [size size 3] or [size size]."""
    from PIL import Image, ImageOps

    if image.mode in (*_SIXTEEN_BITS, "I"):
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB" if color == "rgb" else "L")
    return np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS))

"""Images as sequences: row after row, the channels of a pixel side by side, every value predicted."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lintra.models import Decoder
from lintra.tasks.base import Batch, BitsTask, DataError, Samples

Split = Literal["train", "validate", "test"]
Draw = Callable[[Tensor, int], Tensor]  # prompts [n t'], steps -> what follows them [n steps]

# Settings of lintra.train.Config for some hours on two cores.
HOURS: dict[str, Any] = {
    "batch": 8,
    "optimizer": "muon",
    "lr": 3e-3,
    "schedule": "wsd",
    "warmup": 100,
    "save_every": 100,
}


class PixelSamples(Samples):
    """Images [n h w ch] uint8 -> samples {"tokens": [h*w*ch] int64}. Held in memory as bytes."""

    def __init__(self, images: np.ndarray):
        self.values = torch.from_numpy(images).flatten(1)

    def __len__(self) -> int:
        return len(self.values)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return {"tokens": self.values[torch.as_tensor(indices)].long()}


class PixelTask(BitsTask):
    """Learn to draw images of `image_shape` (h, w, ch), whose values are 0 .. levels - 1."""

    bits = "bits_per_dim"
    image_shape: tuple[int, int, int]
    levels: int

    @abstractmethod
    def images(self, split: Split) -> np.ndarray:
        """Return images [n h w ch] uint8. Raises DataError."""

    def at_hand(self) -> bool:
        """Return whether the images are on this machine already."""
        return True

    @property
    def length(self) -> int:
        return math.prod(self.image_shape)

    @cached_property
    def train(self) -> PixelSamples:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PixelSamples(self.images("train"))

    @cached_property
    def validate(self) -> PixelSamples:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PixelSamples(self.images("validate"))

    @cached_property
    def test(self) -> PixelSamples:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PixelSamples(self.images("test"))

    def surroundings(self) -> tuple[int, ...]:
        """Return how many places before the latest value the values around the next one are: two pixels to
        its left, three in the row above, one two rows above."""
        _, columns, channels = self.image_shape
        row = columns * channels
        left = (2, 3) if channels == 1 else (2, channels)
        places = (*left, row - channels, row, row + channels, 2 * row)
        return tuple(place - 1 for place in dict.fromkeys(places))  # narrow rows have some of them twice

    def to_images(self, tokens: Tensor) -> Tensor:
        """Whole images [b h*w*ch] -> pictures [b h w ch] uint8, the highest level as 255."""
        size = self.length
        if tokens.ndim != 2 or tokens.shape[1] != size:
            raise ValueError(f"tokens must be whole images [b {size}], got shape {list(tokens.shape)}")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.levels:
            raise ValueError(
                f"tokens must lie in 0 .. {self.levels - 1}, got {int(tokens.min())} .. {int(tokens.max())}"
            )
        scaled = tokens.long() * 255 // (self.levels - 1)
        return scaled.to(torch.uint8).unflatten(1, self.image_shape)

    def to_tokens(self, images: Tensor) -> Tensor:
        """The inverse: pictures [b h w ch] uint8 -> [b h*w*ch] int64, each value as the nearest level."""
        if images.shape[1:] != self.image_shape or images.dtype != torch.uint8:
            raise ValueError(
                f"images must be [b {', '.join(map(str, self.image_shape))}] of uint8, got "
                f"{list(images.shape)} of {images.dtype}"
            )
        return (images.flatten(1).long() * (self.levels - 1) + 127) // 255

    def beginnings(self, n: int, seed: int | None = None) -> Tensor:
        """The first values of n training images [n 1] int64, for models that do not predict them."""
        generator = torch.Generator() if seed is None else torch.Generator().manual_seed(seed)
        if seed is None:
            generator.seed()
        images = torch.randint(len(self.train), (n,), generator=generator)
        return self.train.__getitems__(images.tolist())["tokens"][:, :1]

    def blank(self, model: Decoder, n: int, seed: int | None = None) -> Tensor:
        """Return what stands before n images without a prompt -> [n 0], or `beginnings` [n 1] for
        a model that needs them."""
        if model.start_token is None:
            try:
                return self.beginnings(n, seed)
            except DataError as error:
                why = "the model does not predict the first value of an image: training images give it"
                raise DataError(f"{why}, and {error}") from error
        return torch.empty(n, 0, dtype=torch.int64)

    def prompts(self, complete: int, fraction: float = 0.5) -> tuple[Tensor, Tensor]:
        """Return `upper` of the first `complete` test images, n, and the images -> [n t'], [n h*w*ch] int64.

        Raises ValueError.
        """
        most = len(self.test)
        if not 1 <= complete <= most:
            raise ValueError(f"complete must lie in 1 .. {most}, the test images, got {complete}")
        images = self.test.__getitems__(range(complete))["tokens"]
        return self.upper(images, fraction), images

    def upper(self, images: Tensor, fraction: float) -> Tensor:
        """The upper `fraction` of images [n h*w*ch] -> [n t'], a whole number of rows, at least one and fewer
        than all. Raises ValueError."""
        height, width, channels = self.image_shape
        check_fraction(fraction)
        rows = min(max(round(fraction * height), 1), height - 1)
        return images[:, : rows * width * channels]

    def draw(self, prompts: Tensor, draw: Draw) -> Tensor:
        """Draw the rest of images that begin with prompts [n t'] -> pictures [n h w ch] uint8; fewer than n
        if `draw` gives fewer."""
        rest = draw(prompts, self.length - prompts.shape[1]).cpu()
        return self.to_images(torch.cat((prompts[: len(rest)], rest), 1))

    def complete(self, prompts: Tensor, times: int, draw: Draw) -> list[Tensor]:
        """Complete each prompt `times` times -> n of [times h w ch]; if `draw` gives fewer, the last of them
        has fewer, and those after it are left out."""
        images = self.draw(prompts.repeat_interleave(times, 0), draw)
        return [images[i : i + times] for i in range(0, len(images), times)]

    def rows(self, prompts: Tensor) -> int:
        """Return how many rows of an image prompts [n t'] are."""
        return prompts.shape[1] * self.image_shape[0] // self.length


def check_fraction(fraction: float) -> None:
    """Raise ValueError unless `fraction` is a part of an image that can be completed."""
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie between 0 and 1, both excluded, got {fraction}")

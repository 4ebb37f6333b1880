"""Pictures of images: grids of them, and reading one."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lintra.pictures._figure import INK, PAPER, SOFT, save

_PIXELS_PER_INCH = 100
_TINY = 16  # pixels
_GAP = 0.15  # between the images of a grid, as part of an image's width


def samples(path: Path, images: Tensor, title: str) -> None:
    """Images [n h w ch] uint8 as a grid about as wide as high."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = [list(images[first : first + columns]) for first in range(0, len(images), columns)]
    _grid(path, rows, title, labels=())


def completions(path: Path, originals: Tensor, given: int, completed: Tensor, title: str) -> None:
    """A row for each image: the original, its first `given` lines, and what a model made of them.

    originals [n h w ch], completed [n k h w ch], both uint8.
    """
    prompts = originals.clone()
    prompts[:, given:] = 96
    rows = [
        [original, prompt, *drawn]
        for original, prompt, drawn in zip(originals, prompts, completed, strict=True)
    ]
    drawn = completed.shape[1]
    _grid(path, rows, title, labels=("original", "given", *["completed"] * drawn))


def read(file: Path, shape: Sequence[int]) -> Tensor:
    """The image in a file -> uint8 of `shape` [h w ch]. Raises ValueError if that is not what it is."""
    height, width, channels = shape
    mode, words = {1: ("L", "grey"), 3: ("RGB", "RGB colours")}[channels]
    try:
        with Image.open(file) as image:
            if image.size != (width, height) or image.mode != mode:
                found = f"{image.width} x {image.height} pixels, mode {image.mode}"
                raise ValueError(
                    f"{file} has {found}; this model's images have {width} x {height} pixels in {words}, "
                    f'mode {mode}: convert it, in Pillow with .convert("{mode}").resize(({width}, {height}))'
                )
            values = np.array(image)
    except FileNotFoundError as error:
        raise ValueError(f"{file} does not exist") from error
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{file} cannot be read as an image, it must have {width} x {height} pixels in {words}: {error}"
        ) from error
    return torch.from_numpy(values.reshape(height, width, channels))


def _grid(path: Path, rows: list[list[Tensor]], title: str, labels: Sequence[str]) -> None:
    """Images [h w ch] side by side, each row a row; a label above each column."""
    height, width, _ = rows[0][0].shape
    columns = max(len(row) for row in rows)
    scale = max(1, 64 // width)  # so that the gap is a whole number of pixels
    gap = max(2, round(_GAP * width * scale))
    down, right = height * scale + gap, width * scale + gap
    canvas = np.full((len(rows) * down - gap, columns * right - gap, 3), 255, np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            place = canvas[i * down :, j * right :][: height * scale, : width * scale]
            place[:] = _enlarged(image, scale)
    high, wide = canvas.shape[0] / _PIXELS_PER_INCH, canvas.shape[1] / _PIXELS_PER_INCH
    head, margin = (0.6 if labels else 0.4), 0.1  # inches
    size = (max(wide, 3.2) + 2 * margin, high + head + margin)
    figure = Figure(figsize=size, dpi=_PIXELS_PER_INCH, facecolor=PAPER)
    axes = figure.add_axes(((size[0] - wide) / 2 / size[0], margin / size[1], wide / size[0], high / size[1]))
    axes.imshow(canvas, interpolation="nearest")
    axes.set_title(title, color=INK, fontsize=10)
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.set_xticks([j * right + width * scale / 2 for j in range(len(labels))], labels)
    axes.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=7, colors=SOFT)
    save(path, figure)


def _enlarged(image: Tensor, scale: int) -> np.ndarray:
    """Pixels as squares; those of tiny images blend into each other, or the eye sees only squares."""
    mode = "nearest" if image.shape[1] >= _TINY else "bicubic"
    enlarged = F.interpolate(image.permute(2, 0, 1)[None].float(), scale_factor=scale, mode=mode)
    return enlarged[0].permute(1, 2, 0).round().clamp(0, 255).numpy()

"""Pictures of images: grids of them, and reading one."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from PIL import Image
from torch import Tensor

from lintra.io.files import refuse_irregular
from lintra.pictures.figure import INK, PAPER, SOFT, save

_PIXELS_PER_INCH = 100
Place = tuple[float, float, float, float]  # left, bottom, width, height, as parts of the figure
_WIDE = 4096  # pixels: images of a grid that would be wider are not enlarged
_GAP = 0.15  # between the images of a grid, as part of an image's width


def samples(path: Path, images: Tensor, title: str) -> None:
    """Images [n h w ch] uint8 as a grid about as wide as high."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = [list(images[first : first + columns]) for first in range(0, len(images), columns)]
    _grid(path, rows, title, labels=())


def completions(path: Path, originals: Tensor, given: int, completed: Sequence[Tensor], title: str) -> None:
    """A row for each image: the original, its first `given` lines, and what a model made of them.

    originals [n h w ch], completed n of [k h w ch], all uint8.
    """
    prompts = originals.clone()
    prompts[:, given:] = 96
    rows = [
        [original, prompt, *drawn]
        for original, prompt, drawn in zip(originals, prompts, completed, strict=True)
    ]
    drawn = max(map(len, completed))
    _grid(path, rows, title, labels=("original", "given", *["completed"] * drawn))


def rows(path: Path, images: Mapping[str, Tensor], title: str) -> None:
    """A row of images [n h w ch] uint8 for each name, which stands on its left."""
    _grid(path, [list(row) for row in images.values()], title, labels=(), sides=tuple(images))


def heat(
    path: Path, mean: Tensor, images: Tensor, maps: Tensor, *, unit: str, titles: tuple[str, str]
) -> None:
    """A map [h w] of all, and beside it single images [n h w ch] uint8 above their own maps [n h w]."""
    n = len(images)
    figure = Figure(figsize=(4.2 + 1.6 * n, 3.6), dpi=150, facecolor=PAPER)
    left, right = 4.2 / (4.2 + 1.6 * n), 1.6 * n / (4.2 + 1.6 * n)  # parts of the width
    note: dict[str, Any] = {"color": INK, "fontsize": 10, "va": "center"}
    figure.text(0.05 * left, 0.94, titles[0], **note)
    shown = _map(figure, (0.05 * left, 0.05, 0.74 * left, 0.82), mean, float(np.nanmax(mean)))
    _scale(figure, (0.82 * left, 0.05, 0.03 * left, 0.76), shown, unit)
    figure.text(left, 0.94, titles[1], **note)
    # A few pixels surprise much more than the others, which would all be dark beside them.
    most, step = float(np.nanquantile(maps, 0.995)), 0.9 * right / n
    for i, (image, bits) in enumerate(zip(images, maps, strict=True)):
        place = left + i * step
        above = figure.add_axes((place, 0.48, 0.95 * step, 0.39))
        above.imshow(image.expand(-1, -1, 3).numpy(), interpolation="nearest")
        above.set_axis_off()
        shown = _map(figure, (place, 0.05, 0.95 * step, 0.39), bits, most)
    more = "max" if float(np.nanmax(maps)) > most else "neither"
    _scale(figure, (left + 0.91 * right, 0.05, 0.11 / n * right, 0.33), shown, unit, more)
    save(path, figure)


def _map(figure: Figure, place: Place, values: Tensor, most: float) -> AxesImage:
    """Values [h w] from 0 to `most` as colours; nan stays empty."""
    axes = figure.add_axes(place)
    axes.set_axis_off()
    return axes.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=most, interpolation="nearest")


def _scale(figure: Figure, place: Place, shown: AxesImage, unit: str, more: str = "neither") -> None:
    """Draw the legend of the colours."""
    bar = figure.colorbar(shown, cax=figure.add_axes(place), extend=more)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(labelsize=7, colors=SOFT, length=2)
    bar.ax.set_title(unit, fontsize=8, color=SOFT)


def read(file: Path, shape: Sequence[int]) -> Tensor:
    """The image in a file -> uint8 of `shape` [h w ch]. Raises ValueError for any other file."""
    height, width, channels = shape
    mode, words = {1: ("L", "grey"), 3: ("RGB", "RGB colours")}[channels]
    refuse_irregular(file, ValueError)
    try:
        with Image.open(file) as image:
            image.load()
    except FileNotFoundError as error:
        raise ValueError(f"{file} does not exist") from error
    except Exception as error:  # Pillow's readers raise almost any for damaged files
        raise ValueError(
            f"{file} cannot be read as an image, it must have {width} x {height} pixels in {words}: {error}"
        ) from error
    if image.size != (width, height) or image.mode != mode:
        found = f"{image.width} x {image.height} pixels, mode {image.mode}"
        first = "put it on black and " if image.has_transparency_data else ""
        scaled = ".point(lambda x: x / 256)" if image.mode in ("I;16", "I") else ""  # 16 bits, else clipped
        raise ValueError(
            f"{file} has {found}; this model's images have {width} x {height} pixels in {words}, "
            f"mode {mode}: {first}convert it, in Pillow with "
            f'{scaled}.convert("{mode}").resize(({width}, {height}))'
        )
    values = np.array(image)
    return torch.from_numpy(values.reshape(height, width, channels))


def _grid(
    path: Path,
    rows: list[list[Tensor]],
    title: str,
    labels: Sequence[str],
    sides: Sequence[str] = (),
) -> None:
    """Images [h w ch] side by side, each row a row; a label above each column, one left of each row."""
    height, width, _ = rows[0][0].shape
    columns = max(len(row) for row in rows)
    # A whole number, so that pixels stay squares; many images are not enlarged.
    scale = max(1, min(64 // width, _WIDE // (columns * width)))
    gap = max(2, round(_GAP * width * scale))
    down, right = height * scale + gap, width * scale + gap
    canvas = np.full((len(rows) * down - gap, columns * right - gap, 3), 255, np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            place = canvas[i * down :, j * right :][: height * scale, : width * scale]
            place[:] = image.numpy().repeat(scale, 0).repeat(scale, 1)  # pixels as squares
    high, wide = canvas.shape[0] / _PIXELS_PER_INCH, canvas.shape[1] / _PIXELS_PER_INCH
    head, margin = (0.6 if labels else 0.4), 0.1  # inches
    beside = 0.4 if sides else 0.0  # inches
    size = (max(wide, 3.2) + 2 * margin + beside, high + head + margin)
    figure = Figure(figsize=size, dpi=_PIXELS_PER_INCH, facecolor=PAPER)
    first = (size[0] - wide + beside) / 2
    axes = figure.add_axes((first / size[0], margin / size[1], wide / size[0], high / size[1]))
    axes.set(xlim=(0, canvas.shape[1]), ylim=(canvas.shape[0], 0))
    axes.set_title(title, color=INK, fontsize=10)
    axes.spines[:].set_visible(False)
    axes.set_yticks([i * down + height * scale / 2 for i in range(len(sides))], sides)
    axes.set_xticks([j * right + width * scale / 2 for j in range(len(labels))], labels)
    axes.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=7, colors=SOFT)
    place = round(first * _PIXELS_PER_INCH), round((size[1] - margin - high) * _PIXELS_PER_INCH)
    save(path, figure, (canvas, place))

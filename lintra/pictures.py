"""Pictures of what a model draws, how it learned and how fast it writes. The only user of matplotlib."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lintra import checkpoint

_GAP = 0.15  # between the images of a grid, as part of an image's width
_PAPER, _INK, _SOFT = "white", "#222222", "#8a8a8a"
_COLORS = ("#0b6e99", "#d1495b", "#66a182", "#edae49")

matplotlib.use("Agg")


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


def loss_curve(
    path: Path,
    train: Mapping[int, float],
    validate: Mapping[int, float],
    *,
    unit: str,
    title: str,
    scale: float = 1.0,
) -> None:
    """Losses by step, multiplied by `scale` into `unit`: each training loss, their trend, validation."""
    figure, axes = _figure(title)
    steps, losses = np.array(list(train)), scale * np.array(list(train.values()))
    if len(steps):
        axes.plot(steps, losses, color=_COLORS[0], alpha=0.25, linewidth=0.8)
        window = max(1, len(losses) // 40)
        trend = np.convolve(losses, np.ones(window) / window, "valid")
        axes.plot(
            steps[window - 1 :], trend, color=_COLORS[0], linewidth=1.8, label=f"training, mean of {window}"
        )
        settled = np.concatenate([losses[len(losses) // 20 :], scale * np.array(list(validate.values()))])
        low, high = settled.min(), np.quantile(settled, 0.99)
        axes.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))
    if validate:
        values = [scale * value for value in validate.values()]
        axes.plot(list(validate), values, "o-", color=_COLORS[1], markersize=4, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss ({unit})")
    axes.legend(frameon=False)
    _save(path, figure)


def time_per_token(
    path: Path, positions: Sequence[int], milliseconds: Mapping[str, Sequence[float]], title: str
) -> None:
    """The time one more token takes (ms) against the tokens that came before it, a line for each way."""
    figure, axes = _figure(title)
    for color, (name, times) in zip(_COLORS, milliseconds.items(), strict=False):
        axes.plot(positions[: len(times)], times, "o-", color=color, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_xlabel("position in the sequence (tokens)")
    axes.set_ylabel("time for the next token (ms)")
    axes.legend(frameon=False)
    _save(path, figure)


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.2), dpi=150, facecolor=_PAPER, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, which="both")
    axes.grid(which="major", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _grid(path: Path, rows: list[list[Tensor]], title: str, labels: Sequence[str]) -> None:
    """Images [h w ch] side by side, each row a row; a label above each column."""
    height, width, channels = rows[0][0].shape
    columns = max(len(row) for row in rows)
    scale = max(1, 64 // width)  # so that the gap is a whole number of pixels
    gap = max(2, round(_GAP * width * scale))
    tall, wide = height * scale + gap, width * scale + gap
    canvas = np.full((len(rows) * tall - gap, columns * wide - gap, 3), 255, np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            pixels = image.numpy().repeat(scale, 0).repeat(scale, 1)
            canvas[i * tall :, j * wide :][: height * scale, : width * scale] = np.broadcast_to(
                pixels, (*pixels.shape[:2], 3) if channels == 1 else pixels.shape
            )
    inches = 0.72
    figure = Figure(
        figsize=(max(columns * inches, 3.6), len(rows) * inches * tall / wide + 0.7),
        dpi=150,
        facecolor=_PAPER,
        layout="constrained",
    )
    axes = figure.subplots()
    axes.imshow(canvas, interpolation="nearest")
    axes.set_title(title, color=_INK, fontsize=10)
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.set_xticks([j * wide + width * scale / 2 for j in range(len(labels))], labels)
    axes.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=7, colors=_SOFT)
    _save(path, figure)


def _save(path: Path, figure: Figure) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))

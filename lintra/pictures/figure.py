"""Figures of all pictures: colours, axes, and saving them whole or not at all."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from lintra.io.files import write_atomically

PAPER, INK, SOFT = "white", "#222222", "#8a8a8a"
COLORS = ("#0b6e99", "#d1495b", "#66a182", "#b97a0e", "#7b5ea7", "#8a5a44", "#4f6d7a")
SIZE = (7.0, 4.2)  # inches


def figure_of(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, dpi=150, facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    dress(axes, title)
    return figure, axes


def dress(axes: Axes, title: str, fontsize: float = 11) -> None:
    """Give axes a title on the left and a grid behind what they show."""
    axes.set_title(title, loc="left", color=INK, fontsize=fontsize)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, which="both")
    axes.grid(which="major", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def save(path: Path, figure: Figure, *pasted: tuple[np.ndarray, tuple[int, int]]) -> None:
    """Write a figure as a PNG file.

    pasted: arrays [h w 3] of uint8 and their places, in pixels from the left and from the top; as images of
    the figure's axes they would be resampled, in 100 bytes a pixel."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    whole = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    for array, place in pasted:
        whole.paste(Image.fromarray(array), place)
    write_atomically(path, lambda temporary: whole.save(temporary, "png"))


def plain(value: float, _: float) -> str:
    """A number at an axis, not as a power of ten."""
    return f"{value:,.10g}"


def few(value: float, _: float) -> str:
    """Return a label for some of the numbers between two powers of ten, for an axis hardly longer."""
    return plain(value, _) if f"{value:e}"[0] in "235" else ""

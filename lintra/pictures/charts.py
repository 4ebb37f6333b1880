"""Pictures of numbers: curves, points and matrices."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from lintra.pictures.figure import COLORS, INK, PAPER, SOFT, few, figure_of, plain, save

_TICKS = (-1, -0.1, -0.01, 0, 0.01, 0.1, 1)  # at a scale of cube roots
_MARKS = ("o", "s", "^", "D", "v", "P", "X")


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
    figure, axes = figure_of(title)
    steps, losses = np.array(list(train)), scale * np.array(list(train.values()))
    if len(steps):
        axes.plot(steps, losses, color=COLORS[0], alpha=0.25, linewidth=0.8)
        window = max(1, len(losses) // 40)
        trend = np.convolve(losses, np.ones(window) / window, "valid")
        label = f"training, mean of {window} logged steps" if window > 1 else "training"
        axes.plot(steps[window - 1 :], trend, color=COLORS[0], linewidth=1.8, label=label)
        settled = np.concatenate([losses[len(losses) // 20 :], scale * np.array(list(validate.values()))])
        low, high = settled.min(), np.quantile(settled, 0.99)
        room = max(high - low, 1e-3)
        axes.set_ylim(low - 0.05 * room, high + 0.15 * room)
    if validate:
        values = [scale * value for value in validate.values()]
        axes.plot(list(validate), values, "o-", color=COLORS[1], markersize=4, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss ({unit})")
    if train or validate:
        axes.legend(frameon=False)
    save(path, figure)


def histograms(path: Path, values: Mapping[str, np.ndarray], *, x: str, title: str) -> None:
    """Draw how numbers [n] are spread, a row for each name, above one logarithmic axis; values that are not
    positive are drawn at the least positive one."""
    every = np.concatenate([each.ravel() for each in values.values()])
    positive = every[every > 0]
    low, high = (float(positive.min()), float(positive.max())) if positive.size else (0.5, 1.0)
    bins = np.geomspace(0.8 * low, 1.25 * high, 90)
    figure = Figure(figsize=(7.0, 0.8 + 0.62 * len(values)), dpi=150, facecolor=PAPER, layout="constrained")
    figure.suptitle(title, color=INK, fontsize=11)
    panels = figure.subplots(len(values), 1, sharex=True, squeeze=False)[:, 0]
    for i, (axes, (name, each)) in enumerate(zip(panels, values.items(), strict=True)):
        axes.hist(np.maximum(each, low), bins, color=COLORS[i % len(COLORS)])
        axes.set_xscale("log")
        mean = f"mean {each.mean():.2f}" if len(each) > 1 else f"{each.mean():.2f}"
        axes.set_ylabel(f"{name}\n{mean}", rotation=0, ha="right", va="center", color=INK, fontsize=9)
        axes.set_yticks([])
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.tick_params(colors=INK, which="both", labelsize=8, length=3)
    panels[-1].xaxis.set_major_formatter(plain)
    panels[-1].xaxis.set_minor_formatter(few)
    panels[-1].set_xlabel(x, color=INK, fontsize=9)
    save(path, figure)


def roofline(
    path: Path,
    points: Mapping[str, tuple[float, float]],
    *,
    arithmetic: float,
    memory: float,
    title: str,
) -> None:
    """Computations, name -> (operations a byte, GFLOP/s), below what the arithmetic (GFLOP/s) and the memory
    (GB/s) of a machine allow."""
    figure, axes = figure_of(title)
    edge = arithmetic / memory
    low = 0.5 * min(edge, *(x for x, _ in points.values()))
    high = 3 * max(edge, *(x for x, _ in points.values()))
    axes.plot([low, edge, high], [low * memory, arithmetic, arithmetic], color=INK, linewidth=1.4)
    note: dict[str, Any] = {"color": SOFT, "fontsize": 8}
    axes.annotate(f"copy, {memory:.0f} GB/s ", (edge / 4, memory * edge / 4), ha="right", va="bottom", **note)
    axes.annotate(f"matrix product, {arithmetic:.0f} GFLOP/s", (edge, 1.08 * arithmetic), **note)
    for i, (name, (x, y)) in enumerate(points.items()):
        axes.plot([x], [y], _MARKS[i % len(_MARKS)], color=COLORS[i % len(COLORS)], markersize=6, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations for every byte that must be moved")
    axes.set_ylabel("GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(plain)
        axis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    save(path, figure)


def matrices(path: Path, panels: Mapping[str, np.ndarray], unit: str) -> None:
    """Square matrices [n n] side by side, of numbers from -1 to 1: white is 0, blue above, red below.

    One scale of colours, named `unit`, serves all of them and every such picture. It has cube roots, which
    show small weights beside large ones.
    """
    size = (3.2 * len(panels) + 0.9, 3.6)
    # Squares may be narrower than their part of the figure: the layout has to know, or labels are cut off.
    figure = Figure(figsize=size, dpi=150, facecolor=PAPER, layout="compressed")
    scale = FuncNorm((np.cbrt, lambda x: x**3), vmin=-1, vmax=1)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, matrix) in zip(grid, panels.items(), strict=True):
        shown = axes.imshow(matrix, cmap="RdBu", norm=scale, interpolation="nearest")
        axes.set_title(name, color=INK, fontsize=9)
        axes.set_xlabel("key", color=SOFT, fontsize=8)
        axes.set_ylabel("query", color=SOFT, fontsize=8)
        axes.tick_params(colors=SOFT, labelsize=7)
        axes.spines[:].set_color("#cccccc")
        if axes is grid[-1]:  # has the bar beside it
            place = axes.inset_axes((1.05, 0, 0.045, 1))
            bar = figure.colorbar(shown, cax=place, ticks=_TICKS, format=plain)
            bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
            place.minorticks_off()
            place.tick_params(labelsize=7, colors=SOFT, length=2)
            bar.set_label(unit, color=SOFT, fontsize=8)
    save(path, figure)

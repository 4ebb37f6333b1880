"""Pictures of lines, at most 7 in a panel: each is named where it ends, and no legend is needed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullFormatter, NullLocator

from lintra.pictures.figure import COLORS, INK, PAPER, dress, few, figure_of, plain, save

Lines = Mapping[str, Mapping[Any, float]]  # name -> {x: y}
Ranges = Mapping[str, Mapping[Any, tuple[float, float]]]  # name -> {x: (low, high)}
End = tuple[float, float, str]  # x, y, colour
# In parts of the axes: where a name begins or ends, "left" or "right" accordingly; its left, right, low,
# high.
Place = tuple[float, float, str]
Box = tuple[float, float, float, float]
_MOST = len(COLORS)  # lines of a panel
_NAME = 8  # points; a letter is about 0.58 times as wide, a line 1.35 times as high
_FEW = 8  # values of x that can all stand at the axis
_APART = 1.2  # the least ratio of neighbours among them


def time_per_token(
    path: Path, positions: Sequence[int], milliseconds: Mapping[str, Sequence[float]], title: str
) -> None:
    """The time one more token takes (ms) against the tokens that came before it, a line for each way."""
    logarithmic(
        path,
        {name: dict(zip(positions, times, strict=False)) for name, times in milliseconds.items()},
        x="position in the sequence (tokens)",
        y="time for the next token (ms)",
        title=title,
    )


def logarithmic(
    path: Path, lines: Lines, *, x: str, y: str, title: str, others: Mapping[str, Lines] | None = None
) -> None:
    """Lines on two logarithmic axes, which leave out values that are not positive.

    Where all of them are more than a panel can show, `others`, groups by their titles, get panels of their
    own, each beside `lines` and on the same axes.
    """
    lines, *rest = (_positive(group) for group in (lines, *(others or {}).values()))
    figure, panels = _panels(lines, dict(zip(others or {}, rest, strict=True)), x=x, y=y, title=title)
    for axes, ends in panels:
        _logarithmic_y(axes)
        _name(axes, ends)
    save(path, figure)


def percentages(
    path: Path,
    lines: Lines,
    *,
    x: str,
    y: str,
    title: str,
    others: Mapping[str, Lines] | None = None,
    ranges: Ranges | None = None,
    levels: Mapping[str, float] | None = None,
) -> None:
    """Draw lines as `logarithmic` does, but for y on a plain axis from 0 to 100, or to 10, 20 or 50 if no
    value is higher; a bar is a range, and levels, name -> y, are dashed. Where the least is at least half of
    the largest, y is from the ten below it to the ten above: no difference would be seen otherwise."""
    figure, panels = _panels(lines, others or {}, x=x, y=y, title=title)
    for axes, ends in panels:
        for name, level in (levels or {}).items():
            axes.axhline(level, color=INK, alpha=0.6, linewidth=0.8, linestyle="--")
            place = axes.get_yaxis_transform()
            axes.annotate(name, (1, level), (0, 2), place, "offset points", fontsize=_NAME, ha="right")
        for name, (_, _, color) in ends.items():
            for at, (low, high) in (ranges or {}).get(name, {}).items():
                axes.vlines(at, low, high, color=color, alpha=0.45, linewidth=1.5)
    groups = [lines, *(others or {}).values()]
    values = [value for group in groups for line in group.values() for value in line.values()]
    values += [end for at in (ranges or {}).values() for ends in at.values() for end in ends]
    values += (levels or {}).values()
    bottom, (top, step) = 0, next((x for x in ((10, 2), (20, 5), (50, 10)) if max(values) <= x[0]), (100, 20))
    if min(values) >= max(values) / 2 and top > 20:
        bottom, top = 10 * math.floor(min(values) / 10), 10 * math.ceil(max(values) / 10)
        step = 5 if top - bottom <= 30 else 10
    for axes, ends in panels:
        axes.set_ylim(bottom, top + 0.02 * (top - bottom))
        axes.set_yticks(range(bottom, top + 1, step))
        _name(axes, ends)
    save(path, figure)


def curves(path: Path, lines: Lines, *, x: str, y: str, title: str, log: bool = False) -> None:
    """Draw at most 7 lines, name -> {x: y}, x from 0. y is from 0 if the least is below half of the largest;
    else, as with bits/dim, it begins near the least: from 0 on, no difference between the lines would be
    seen.

    log: y is logarithmic, and values that are not positive are left out.
    """
    figure, axes = figure_of(title)
    lines = _positive(lines) if log else lines
    ends = _plot(axes, lines, markersize=3)
    values = [value for line in lines.values() for value in line.values()]
    axes.set_xlim(left=0)
    if log:
        _logarithmic_y(axes)
    elif min(values) < max(values) / 2:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _name(axes, ends)
    save(path, figure)


def _positive(lines: Lines) -> Lines:
    return {name: {at: value for at, value in line.items() if value > 0} for name, line in lines.items()}


def _logarithmic_y(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plain)
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(few if high < 50 * low else NullFormatter())


def _panels(
    lines: Lines, others: Mapping[str, Lines], *, x: str, y: str, title: str
) -> tuple[Figure, list[tuple[Axes, dict[str, End]]]]:
    """Panels over a logarithmic x, each with where its lines end: one, or one for each group of others."""
    groups = list(_groups(others, _MOST - len(lines)))
    together: dict[str, Mapping[int, float]] = {}
    for _, group in [("", lines), *groups]:
        together |= group
    if len(together) <= _MOST:
        figure, axes = figure_of(title)
        drawn = [(axes, _plot(axes, together))]
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    else:
        columns = 2 if len(groups) <= 4 else 3
        rows = math.ceil(len(groups) / columns)
        figure = Figure(figsize=(4.5 * columns, 3.1 * rows), dpi=120, facecolor=PAPER, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
        figure.supxlabel(x, fontsize=10)
        figure.supylabel(y, fontsize=10)
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        drawn = []
        for axes, (name, group) in zip(grid, groups, strict=False):
            dress(axes, name, fontsize=9)
            drawn.append((axes, _plot(axes, {**lines, **group}, thick=len(lines), markersize=3)))
            axes.tick_params(labelbottom=True, labelsize=8)
        for axes in grid[len(groups) :]:
            axes.set_axis_off()
    measured = sorted({at for line in together.values() for at in line})
    for axes, _ in drawn:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(plain)
        if len(measured) <= _FEW and all(b >= _APART * a for a, b in pairwise(measured)):
            # Every other one where panels are narrow.
            axes.set_xticks(measured if len(drawn) == 1 or len(measured) < 6 else measured[1::2])
            axes.xaxis.set_minor_locator(NullLocator())
    return figure, drawn


def _groups(others: Mapping[str, Lines], room: int) -> Iterator[tuple[str, Lines]]:
    """Yield the groups of others that have lines, in equal parts where a panel has no room for all."""
    for name, group in others.items():
        items = [(who, line) for who, line in group.items() if line]
        parts = math.ceil(len(items) / room)
        size = math.ceil(len(items) / max(1, parts))
        for part, first in enumerate(range(0, len(items), max(1, size)), 1):
            yield f"{name}, {part} of {parts}" if parts > 1 else name, dict(items[first : first + size])


def _plot(axes: Axes, lines: Lines, thick: int = 0, markersize: float = 4) -> dict[str, End]:
    """Draw the lines, the first `thick` ones the thicker -> where each ends."""
    ends = {}
    for i, (name, line) in enumerate(lines.items()):
        if line:
            look = {"color": COLORS[i], "linewidth": 2.6 if i < thick else 1.5, "markersize": markersize}
            axes.plot(list(line), list(line.values()), marker="o", **look)
            ends[name] = (*list(line.items())[-1], COLORS[i])
    return ends


def _name(axes: Axes, ends: Mapping[str, End]) -> None:
    """Write each line's name: in the margin where it goes furthest, else beside its end, in the plot."""
    axes.get_ylim()  # settles the limits, which `transData` does not
    parts = axes.transData + axes.transAxes.inverted()  # of the width and the height of the axes
    spots = {name: parts.transform(ends[name][:2]) for name in sorted(ends, key=lambda name: ends[name][1])}
    furthest = max((x for x, _, _ in ends.values()), default=0)
    letter = _NAME / 72 / _inches(axes)  # as parts of the axes too
    outside = {name: spots[name] for name in spots if ends[name][0] == furthest}
    inside = sorted(spots.keys() - outside, key=lambda name: (spots[name][0], -spots[name][1]))
    tracks = [parts.transform(line.get_xydata()) for line in axes.lines]
    for name, (x, y, side) in (
        _in_margin(outside, letter) | _in_plot({name: spots[name] for name in inside}, letter, tracks)
    ).items():
        color, at = ends[name][2], {"xycoords": axes.transAxes, "textcoords": axes.transAxes}
        line = {"arrowstyle": "-", "color": color, "alpha": 0.5, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tuple(spots[name]), (x, y), arrowprops=line, annotation_clip=False, **at)
        note: dict[str, Any] = {"color": color, "fontsize": _NAME}
        x += 0.4 * letter[0] * (1 if side == "left" else -1)
        halo = [withStroke(linewidth=2, foreground=PAPER)]
        axes.text(x, y, name, transform=axes.transAxes, ha=side, va="center", path_effects=halo, **note)


def _inches(axes: Axes) -> np.ndarray:
    """About the width and height that axes will have: before they are laid out."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return np.asarray(axes.get_position().size) * figure.get_size_inches()


def _in_margin(spots: Mapping[str, np.ndarray], letter: np.ndarray) -> dict[str, Place]:
    """Place names at the heights of rising points, or near them where the names would touch."""
    heights = _moved_apart([spot[1] for spot in spots.values()], 1.35 * letter[1])
    return {name: (1.035, height, "left") for name, height in zip(spots, heights, strict=True)}


def _in_plot(
    spots: Mapping[str, np.ndarray], letter: np.ndarray, tracks: Sequence[np.ndarray]
) -> dict[str, Place]:
    """Place names on one side or the other of each point, where the fewest lines [n 2] and names are in the
    way."""
    places, taken = {}, []
    for name, (x, y) in spots.items():
        width, height = (0.58 * len(name) + 0.5) * letter[0], 1.35 * letter[1]
        boxes: dict[Place, Box] = {}
        for up in (0, 1, -1, 2, -2):
            low, high = y + (up - 0.5) * height, y + (up + 0.5) * height
            right, left = x + 1.2 * letter[0], x - 1.2 * letter[0]
            boxes[right, y + up * height, "left"] = right, right + width, low, high
            boxes[left, y + up * height, "right"] = left - width, left, low, high
        places[name] = min(boxes, key=lambda place: _crowd(boxes[place], tracks, taken))
        taken.append(boxes[places[name]])
    return places


def _crowd(box: Box, tracks: Sequence[np.ndarray], taken: Sequence[Box]) -> int:
    """Return how many lines pass through a box, and more than all of them if it overlaps another or an edge;
    above, a name may stand on it."""
    left, right, low, high = box
    x = np.linspace(left, right, 50)
    lines = [np.interp(x, *track.T, left=np.inf, right=np.inf) for track in tracks]
    over = any(a < right and left < b and c < high and low < d for a, b, c, d in taken)
    over = over or min(left, low) < 0 or right > 1 or (low + high) / 2 > 1
    return sum(bool(((low < y) & (y < high)).any()) for y in lines) + over * (len(lines) + 1)


def _moved_apart(heights: list[float], gap: float) -> np.ndarray:
    """Rising heights, moved as little as it takes for them to be `gap` apart and within 0 and 1."""
    blocks: list[list[float]] = []  # of names that touch: the sum of heights less the gaps, how many
    for i, height in enumerate(heights):
        blocks.append([height - i * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    level = np.array([total / count for total, count in blocks for _ in range(int(count))])
    return np.clip(level, 0, 1 - gap * (len(heights) - 1)) + gap * np.arange(len(heights))

"""Pictures of lines over lengths, a logarithmic axis: a line is named where it ends, so that many fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullFormatter, NullLocator

from lintra.pictures.figure import COLORS, INK, PAPER, SIZE, SOFT, few, figure_of, plain, save

Lines = Mapping[str, Mapping[int, float]]  # name -> {x: y}
End = tuple[float, float, str]  # x, y, colour
# In parts of the axes: where a name begins or ends, "left" or "right" for which; its left, right, low, high.
Place = tuple[float, float, str]
Box = tuple[float, float, float, float]
_DASHES = ("-", "--", ":", "-.")
_NAME = 8  # points; a letter is about 0.58 times as wide, a line 1.35 times as high
_FEW = 8  # values of x that can all stand at the axis


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
    path: Path, lines: Lines, *, x: str, y: str, title: str, others: Sequence[Lines] = ()
) -> None:
    """Lines in colour on two logarithmic axes, where values that are not positive have no place.

    `others` are thin and grey behind them, each group with dashes of its own.
    """
    lines, *others = (
        {name: {at: value for at, value in line.items() if value > 0} for name, line in group.items()}
        for group in (lines, *others)
    )
    figure, axes, ends = _plot(lines, others, x=x, y=y, title=title)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plain)
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(few if high < 50 * low else NullFormatter())
    _name(figure, axes, ends)
    save(path, figure)


def percentages(
    path: Path, lines: Lines, *, x: str, y: str, title: str, others: Sequence[Lines] = ()
) -> None:
    """Draw lines as `logarithmic` does, but for y from 0 to 100 on a plain axis."""
    figure, axes, ends = _plot(lines, others, x=x, y=y, title=title)
    axes.set_ylim(0, 102)
    _name(figure, axes, ends)
    save(path, figure)


def _plot(
    lines: Lines, others: Sequence[Lines], *, x: str, y: str, title: str
) -> tuple[Figure, Axes, dict[str, End]]:
    """The lines over a logarithmic x, and where each ends."""
    many = len(lines) + sum(len(group) for group in others) > len(COLORS)
    figure, axes = figure_of(title, size=(9, 6) if many else SIZE)
    ends = {}

    def plot(name: str, line: Mapping[int, float], color: str, **look: Any) -> None:
        if line:
            axes.plot(list(line), list(line.values()), marker="o", color=color, **look)
            ends[name] = (*list(line.items())[-1], color)

    for i, group in enumerate(others):
        for name, line in group.items():
            plot(name, line, SOFT, linestyle=_DASHES[i % len(_DASHES)], linewidth=0.8, markersize=2)
    for i, (name, line) in enumerate(lines.items()):
        plot(name, line, COLORS[i % len(COLORS)], linewidth=2.6 if others else 1.5, markersize=4)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(plain)
    measured = sorted({at for group in (lines, *others) for line in group.values() for at in line})
    if len(measured) <= _FEW:
        axes.set_xticks(measured)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes, ends


def _name(figure: Figure, axes: Axes, ends: Mapping[str, End]) -> None:
    """Writes each line's name: in the margin where it goes furthest, else beside its end, in the plot."""
    axes.get_ylim()  # settles the limits, which `transData` does not
    parts = axes.transData + axes.transAxes.inverted()  # of the width and the height of the axes
    spots = {name: parts.transform(ends[name][:2]) for name in sorted(ends, key=lambda name: ends[name][1])}
    furthest = max((x for x, _, _ in ends.values()), default=0)
    letter = _NAME / 72 / (0.85 * figure.get_size_inches())  # as parts of the axes too
    outside = {name: spots[name] for name in spots if ends[name][0] == furthest}
    inside = sorted(spots.keys() - outside, key=lambda name: (spots[name][0], -spots[name][1]))
    tracks = [parts.transform(line.get_xydata()) for line in axes.lines]
    for name, (x, y, side) in (
        _in_margin(outside, letter) | _in_plot({name: spots[name] for name in inside}, letter, tracks)
    ).items():
        color, at = ends[name][2], {"xycoords": axes.transAxes, "textcoords": axes.transAxes}
        line = {"arrowstyle": "-", "color": color, "alpha": 0.5, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tuple(spots[name]), (x, y), arrowprops=line, annotation_clip=False, **at)
        note: dict[str, Any] = {"color": INK if color == SOFT else color, "fontsize": _NAME}
        x += 0.4 * letter[0] * (1 if side == "left" else -1)
        halo = [withStroke(linewidth=2, foreground=PAPER)]
        axes.text(x, y, name, transform=axes.transAxes, ha=side, va="center", path_effects=halo, **note)


def _in_margin(spots: Mapping[str, np.ndarray], letter: np.ndarray) -> dict[str, Place]:
    """At the heights of rising points, or near them where the names would touch."""
    heights = _moved_apart([spot[1] for spot in spots.values()], 1.35 * letter[1])
    return {name: (1.035, height, "left") for name, height in zip(spots, heights, strict=True)}


def _in_plot(
    spots: Mapping[str, np.ndarray], letter: np.ndarray, tracks: Sequence[np.ndarray]
) -> dict[str, Place]:
    """On one side or the other of each point, where the fewest lines [n 2] and names are in the way."""
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
    """Return how many lines pass through a box, and more than all of them if it overlaps another or the
    edge."""
    left, right, low, high = box
    x = np.linspace(left, right, 50)
    lines = [np.interp(x, *track.T, left=np.inf, right=np.inf) for track in tracks]
    over = any(a < right and left < b and c < high and low < d for a, b, c, d in taken)
    over = over or min(left, low) < 0 or max(right, high) > 1
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

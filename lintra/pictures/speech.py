"""Pictures of speech: what a recogniser heard, and when."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from lintra.pictures.figure import COLORS, INK, PAPER, SOFT, save


def alignment(
    path: Path,
    features: np.ndarray,
    words: Sequence[tuple[str, float, float]],
    symbol: np.ndarray,
    *,
    shift: float,
    stride: float,
    title: str,
) -> None:
    """A filterbank [t bins], above it the words with the seconds between which each was said, below it how
    probable a symbol is, and not the blank [u]; `shift` seconds from a frame to the next, `stride` from a
    prediction to the next.
    """
    seconds = shift * len(features)
    figure = Figure(
        figsize=(max(6.0, min(16.0, 2 * seconds)), 3.8), dpi=150, facecolor=PAPER, layout="constrained"
    )
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.set_title(title, loc="left", color=INK, fontsize=11, pad=18)
    above.imshow(
        features.T,
        aspect="auto",
        origin="lower",
        cmap="magma",
        extent=(0, seconds, 0, features.shape[1]),
        interpolation="nearest",
    )
    for i, (word, start, end) in enumerate(words):
        color = COLORS[i % len(COLORS)]
        above.axvspan(start, end, ymin=0.97, color=color)
        middle = ((start + end) / 2, 1.01)
        where = above.get_xaxis_transform()
        above.text(*middle, word, transform=where, ha="center", va="bottom", color=color, fontsize=9)
        below.axvspan(start, end, color=color, alpha=0.15, linewidth=0)
    above.set_ylabel("mel filter", color=INK, fontsize=9)
    below.stairs(symbol, stride * np.arange(len(symbol) + 1), color=INK, linewidth=0.9)
    below.set_ylim(0, 1.05)
    below.set_xlim(0, seconds)
    below.set_ylabel("p(symbol)", color=INK, fontsize=9)
    below.set_xlabel("seconds", color=INK, fontsize=9)
    for axes in (above, below):
        axes.tick_params(colors=SOFT, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    save(path, figure)

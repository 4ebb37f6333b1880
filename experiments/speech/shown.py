"""The tables and pictures of README.md, from the result files alone."""

import statistics
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from setting import BEST, CORPORA, HERE, MODELS, UNIT, WITH_NGRAMS
from timing import LENGTHS, ratios, times
from trials import markdown

from lintra import pictures
from lintra.bench.reports import Row
from lintra.evaluate import ErrorRate


def draw(report: dict[str, Any]) -> list[Path]:
    """Draw the pictures from the result file alone."""
    files = []
    for corpus, of in report["scores"].items():
        lines = {}
        for model, found in of.items():
            steps = [int(step) for step in found["curves"][0]]
            lines[model] = {s: 100 * statistics.mean(c[str(s)] for c in found["curves"]) for s in steps}
        files.append(HERE / f"{corpus}.png")
        title = f"{CORPORA[corpus]}, mean of {len(next(iter(of.values()))['curves'])} seeds"
        pictures.curves(files[-1], lines, x="step", y=f"{UNIT[corpus]} errors in validation (%)", title=title)
    if rows := times():
        against = {m: {n: rows[f"{n} frames: {m}, an epoch"] for n in LENGTHS} for m in timed(rows)}
        files.append(HERE / "length.png")
        title = "The paper's models, an epoch of AN4 in joined utterances"
        pictures.logarithmic(
            files[-1], against, x="frames of an utterance", y="seconds an epoch", title=title
        )
    shown = report["alignment"]
    files.append(HERE / "alignment.png")
    pictures.alignment(
        files[-1],
        np.array(shown["features"]),
        [(word["text"], word["start"], word["end"]) for word in shown["words"]],
        np.array(shown["symbol"]),
        shift=shown["shift"],
        stride=shown["shift"] * shown["subsample"],
        title=f"said: {shown['said']}",
    )
    return files


def tables(report: dict[str, Any]) -> list[str]:
    """Return the tables of README.md: rates by corpus, targets, and times against the length."""
    scores, rows = [table(report, corpus) for corpus in report["scores"]], times()
    scores += [searches(report), targets(report)]
    return [*scores, against_length(rows)] if rows else scores


def table(report: dict[str, Any], corpus: str) -> str:
    """A row for each model trained on a corpus: its error rates, and the time of an epoch."""
    rows, kinds = times(), {BEST: f"{UNIT[corpus]} errors", WITH_NGRAMS: "with n-grams"}
    found = report["scores"][corpus]
    kinds = {kind: head for kind, head in kinds.items() if all(kind in of for of in found.values())}
    heads = ["model", "parameters", *kinds.values(), "each seed, %", *["seconds an epoch"] * bool(rows)]
    lines = [heads, ["---"] * len(heads)]
    for model, of in found.items():
        cells = [model, f"{of['parameters'] / 1e6:.2f} M"]
        for kind in kinds:
            rate = ErrorRate(**of[kind][UNIT[corpus]])
            cells.append(f"{100 * rate.rate:.1f} % ({100 * rate.low:.1f} to {100 * rate.high:.1f})")
        each = [f"{100 * seed[UNIT[corpus]]['rate']:.1f}" for seed in of["seeds"]]
        cells.append(", ".join(each + ["diverged"] * of.get("diverged", 0)))
        if rows:
            seconds = rows.get(f"{CORPORA[corpus]}: {model}, an epoch")
            cells.append("" if seconds is None else f"{seconds:.1f}")
        lines.append(cells)
    return markdown(lines)


def searches(report: dict[str, Any]) -> str:
    """A row for each corpus and model whose learning rate is searched: its errors in validation."""
    found = {
        f"{CORPORA[corpus]}, {model}": of["searched"]
        for corpus, models in report["scores"].items()
        for model, of in models.items()
        if of["searched"]
    }
    rates = sorted({rate for of in found.values() for rate in of}, key=float)
    lines = [["learning rate", *rates], ["---"] * (1 + len(rates))]
    for what, of in found.items():
        lines.append([what, *(_share(of[rate]) if rate in of else "" for rate in rates)])
    return markdown(lines)


def targets(report: dict[str, Any]) -> str:
    """Everything that has a target, and whether the target is met."""
    rows = [Row(**{x.name: row[x.name] for x in fields(Row)}) for row in report["rows"]]
    lines = [["work", "measured", "target", ""], ["---"] * 4]
    for row in [*rows, *(ratios(found) if (found := times()) else [])]:
        met = "met" if row.met else "**missed**"
        lines.append([row.what, f"{row.figure:.3g} {row.unit}", row.target, met])
    return markdown(lines)


def against_length(rows: dict[str, float]) -> str:
    """A row for each model: seconds an epoch by the frames of an utterance, beside softmax, and memory."""
    heads = ["model", *(f"{n:,} frames" for n in LENGTHS), "MB of 2,400 frames"]
    lines = [heads, ["---"] * len(heads)]
    for model in timed(rows):
        times = [rows[f"{n} frames: {model}, an epoch"] for n in LENGTHS]
        least = [rows[f"{n} frames: softmax, an epoch"] for n in LENGTHS]
        cells = [f"{x:,.0f} s ({y / x:.1f} x)" for x, y in zip(times, least, strict=True)]
        lines.append([model, *cells, f"{rows[f'2400 frames: {model}, memory']:,.0f}"])
    return markdown(lines)


def timed(rows: dict[str, float]) -> list[str]:
    """The models that existed when times were measured."""
    return [model for model in MODELS if f"{LENGTHS[0]} frames: {model}, an epoch" in rows]


def _share(found: float | None) -> str:
    return "diverged" if found is None else f"{100 * found:.1f} %"

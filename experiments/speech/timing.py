"""Seconds an epoch of each model, on the corpora and against the length of utterances, and memory."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lintra.bench.memory import peak_of
from lintra.bench.reports import Row, by_name
from lintra.bench.timing import interleaved
from lintra.train.batches import LengthSampler

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from setting import CORPORA, MODELS, network, problem, task  # noqa: E402 (from this folder)
from trials import updates  # noqa: E402 (from the folder above)

TIMES = HERE / "times.json"
SAMPLED = 4  # batches of an epoch that are timed, and stand for all
LENGTHS = (800, 1_600, 2_400, 4_800)  # frames of joined utterances
LONG = 4_800  # frames in a step on these; every length divides it
ROUNDS = 5


def epoch(corpus: str, model: str, data: Path) -> tuple[Callable[[], None], int]:
    """An update on each of some batches of an epoch, sampled evenly, and how many batches the epoch has."""
    one = problem(task(corpus, model, data))
    batches = LengthSampler(one.train.lengths, one.batch_tokens, seed=0).epoch(0)
    batches.sort(key=lambda places: sum(one.train.lengths[i] for i in places))
    chosen = [batches[(2 * i + 1) * len(batches) // (2 * SAMPLED)] for i in range(SAMPLED)]
    loaded = [one.train.__getitems__(places) for places in chosen]
    return updates(one, network(one, model), loaded), len(batches)


def long(model: str, length: int, data: Path) -> Callable[[], None]:
    """One update of the paper's model on utterances of AN4, joined to so many frames each, LONG in all."""
    one = problem(task("an4", model, data, preset="paper"))
    corpus, places = one.train.utterances.corpus, iter(one.train.utterances.places)
    rows, targets = [], []
    for _ in range(LONG // length):
        frames, said = np.zeros((0, corpus.features.shape[1]), np.float32), []
        while len(frames) < length:
            place = next(places)
            frames = np.concatenate((frames, corpus.array(place)))
            said += one.symbols.encode(corpus.texts[place]) if len(frames) <= length else []
        rows.append(torch.from_numpy(frames[:length]))
        targets.append(torch.tensor(said))
    batch = {
        "x": torch.stack(rows),
        "mask": torch.ones(len(rows), length, dtype=torch.bool),
        "targets": torch.nn.utils.rnn.pad_sequence(targets, batch_first=True),
    }
    return updates(one, network(one, model), [batch])


def measure(data: Path) -> tuple[list[Row], dict[str, Any]]:
    """Seconds an epoch of each corpus and against the length, interleaved over the models, and memory."""
    rows, timings = [], {}
    for corpus in CORPORA:
        found = {model: epoch(corpus, model, data) for model in MODELS}
        times = interleaved({model: step for model, (step, _) in found.items()}, rounds=ROUNDS, at_least=0)
        timings |= {f"{corpus} {model}": timing for model, timing in times.items()}
        for model, (_, batches) in found.items():
            seconds = times[model].median * batches / SAMPLED
            rows.append(Row(f"{CORPORA[corpus]}: {model}, an epoch", seconds, "s"))
    frames = sum(problem(task("an4", "linear", data)).train.lengths)
    for length in LENGTHS:
        times = interleaved({model: long(model, length, data) for model in MODELS}, rounds=2, at_least=0)
        timings |= {f"{length} {model}": timing for model, timing in times.items()}
        for model, timing in times.items():
            seconds = timing.median * frames / LONG
            rows.append(Row(f"{length} frames: {model}, an epoch", seconds, "s"))
    for model in MODELS:
        program = (
            f"import sys; sys.path.insert(0, {str(HERE)!r}); from pathlib import Path; import timing\n"
            f"update = timing.long({model!r}, 2400, Path({str(data)!r}))\n"
            "forget_peak()\nbefore = peak()\nupdate()\nprint(peak() - before)"
        )
        rows.append(Row(f"2400 frames: {model}, memory", peak_of(program) / 1e6, "MB"))
    return rows + ratios({row.what: row.figure for row in rows}), timings


def ratios(times: Mapping[str, float]) -> list[Row]:
    """Speed of linear attention relative to softmax, by the times of `measure`."""
    where = [*CORPORA.values(), *(f"{length} frames" for length in LENGTHS)]
    figures = ((x, times[f"{x}: softmax, an epoch"] / times[f"{x}: linear, an epoch"]) for x in where)
    return [Row(f"{x}: seconds an epoch, softmax / linear", ratio, "x", at_least=1.0) for x, ratio in figures]


def times() -> dict[str, float]:
    """Return the times of the last measurement by name; empty if there was none."""
    return by_name(json.loads(TIMES.read_text())) if TIMES.exists() else {}

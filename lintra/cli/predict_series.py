"""`lintra predict` for series: forecasts of those in a file, or of the next row of a stream."""

import codecs
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lintra.cli import memory
from lintra.cli.failures import report_failure
from lintra.cli.json_lines import print_json
from lintra.generation import check_recurrent, evaluation
from lintra.generation.forecasting import quantiles, sample_paths
from lintra.generation.uniforms import sequence_seed
from lintra.models import Forecaster
from lintra.nn.parameters import reference_param
from lintra.tasks import DataError
from lintra.tasks.datasets.time_series import LARGEST, Columns, Series
from lintra.tasks.series import SeriesTask

# Flags that no stream has.
OF_FILES = ("horizon", "samples", "paths", "columns", "time_column", "id_column", "seed")
_DIGITS = 7  # printed of a number: those of float32


def forecast(model: Forecaster, task: SeriesTask, options: Any) -> int:
    """Print forecasts as `lintra.cli.predict.Options` asks for them -> the exit code: 1 where a file or a
    line could not be read."""
    check_recurrent(model)
    if not options.files:
        options.refuse(OF_FILES, "series in files", "and standard input is read without one")
        return _follow(model, task, sys.stdin.buffer, options.quantiles)
    failed = 0
    for file in options.files:
        forecasts = _continued(model, task, file, options)
        while True:
            try:
                content = next(forecasts, None)
            except (OSError, ValueError) as error:
                failed += 1
                report_failure(file, error)
                break
            if content is None:
                break
            print_json(content)  # an error of the output is not one of the file
    return 1 if failed else 0


def _continued(model: Forecaster, task: SeriesTask, file: Path, options: Any) -> Iterator[dict[str, Any]]:
    """Yield the forecasts of all series of a file, row by row."""
    if not file.exists():
        raise DataError(f"{file} does not exist")
    named = Columns(options.columns, options.time_column, options.id_column)
    found, context = task.read(file, named), task.config.context
    for series in found:
        if len(series.values) < task.least:
            raise DataError(
                f"{file}: the series {series.name!r} has {len(series.values):,} rows, and a forecast needs "
                f"{task.least:,}, half of the context"
            )
    horizon, number = options.horizon or task.config.horizon, 0
    for _, alike in groupby(found, key=lambda x: min(len(x.values), context)):
        while group := list(islice(alike, options.batch)):
            history = torch.stack([torch.from_numpy(x.values[-context:]) for x in group])
            memory.check_paths(model, history, horizon, options.samples)
            seed = None if options.seed is None else sequence_seed(options.seed, number)
            paths = sample_paths(model, history, horizon=horizon, samples=options.samples, seed=seed)
            number += len(group)
            for series, own in zip(group, paths, strict=True):
                yield from _rows(str(file), series, own, options)


def _rows(file: str, series: Series, paths: torch.Tensor, options: Any) -> Iterator[dict[str, Any]]:
    """Yield the forecast of each row of a series, given paths [n horizon]."""
    several = np.quantile(paths.numpy(), [0.5, *options.quantiles], axis=0)
    for row, found in enumerate(several.T.tolist(), 1):
        time = {} if series.times is None else {"time": series.times.after(row)}
        sampled = {"paths": [_short(x) for x in paths[:, row - 1].tolist()]} if options.paths else {}
        said = {"file": file, "series": series.name, "step": row, **time}
        yield {**said, **_said(found, options.quantiles), **sampled}


def _follow(model: Forecaster, task: SeriesTask, lines: Iterable[bytes], levels: Sequence[float]) -> int:
    """Print the forecast of the next row after each line of a stream, the state carried from line to line."""
    state, failed, rows, width = None, 0, 0, 0
    with torch.no_grad(), evaluation(model):
        for number, line in enumerate(lines, 1):
            try:
                values = _numbers(line.removeprefix(codecs.BOM_UTF8), width)
            except ValueError as error:
                failed += 1
                report_failure(f"stdin, line {number:,}", error)
                continue
            rows, width = rows + 1, len(values)
            column = torch.tensor(values, dtype=torch.float64, device=reference_param(model).device)[:, None]
            prediction, state = model.extend(column, state)
            found = quantiles(model, prediction, [0.5, *levels])[:, 0].tolist()
            for i, value in enumerate(values):
                said = {"line": number, **({"series": i + 1} if width > 1 else {}), "value": value}
                early = {"median": None, "needs": task.least - rows}
                print_json({**said, **(early if rows < task.least else _said(found[i], levels))})
    return 1 if failed else 0


def _numbers(line: bytes, width: int) -> list[float]:
    """The numbers of a line, one for each series of a stream. Raises ValueError."""
    text = line.decode(errors="replace").strip()
    try:
        values = [float(x) for x in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(abs(x) <= LARGEST for x in values):
        raise ValueError(
            f"expected a number up to {LARGEST:g}, or one for each series with commas between, got "
            f"{text[:40]!r}: the line is left out"
        )
    if width and len(values) != width:
        raise ValueError(f"{len(values)} numbers where the first line has {width}: the line is left out")
    return values


def _said(found: Sequence[float], levels: Sequence[float]) -> dict[str, Any]:
    """Return a median and the quantiles behind it, for JSON."""
    median, *rest = map(_short, found)
    return {"median": median, "quantiles": {str(x): q for x, q in zip(levels, rest, strict=True)}}


def _short(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")

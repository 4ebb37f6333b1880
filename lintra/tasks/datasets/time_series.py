"""Numeric series from CSV files and JSON lines: one series per column, or one for each id of a long table."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lintra.tasks.base import DataError
from lintra.tasks.datasets import tables, text_files
from lintra.tasks.datasets.data_files import suffix
from lintra.tasks.datasets.time_steps import TimeError, TimeSteps, time_steps

LARGEST = 1e30  # of a value: the square of what is much larger, or smaller than 1 / LARGEST, is no float


class Series(NamedTuple):
    """Values [n] float64 of equally distant rows, and when the rows are, if a column says so."""

    name: str
    values: np.ndarray
    times: TimeSteps | None = None


class Columns(NamedTuple):
    """Columns of a table that are read: those of values (none named: all others), of times and of ids."""

    values: tuple[str, ...] = ()
    time: str | None = None
    id: str | None = None


ALL = Columns()


def read(path: Path, columns: Columns) -> list[Series]:
    """Return the series of a file in the order in which they begin.

    With a column of ids the rows of each are a series of their own, named after it, and after the column too
    where there are several; rows of different ids may alternate. Raises DataError, with the line, for values
    that are not numbers up to LARGEST and for times that are irregular, unsorted or double.
    """
    if path.is_dir() or not tables.is_table(path):
        raise DataError(f"{path} must be a file that ends in {' or '.join(tables.SUFFIXES)}")
    content = text_files.decoded(text_files.content(path), path)
    there = tables.names(content, path)
    beside = [name for name in (columns.time, columns.id) if name is not None]
    names = _split(columns.values, there)
    names = names or [name for name in there if name.strip() and not {name, name.strip()} & {*beside}]
    if not names:
        what = f" beside {' and '.join(map(repr, beside))}" if beside else ""
        raise DataError(f"{path} has no column of values{what}: its first row names the columns")
    if twice := next((name for name in names if columns.values and names.count(name) > 1), None):
        raise DataError(f"the column {twice!r} is named twice: name each once")
    if not columns.values and all(map(_is_number, there)):
        raise DataError(
            f"{path} begins with numbers, {', '.join(there)[:40]}, and not with the names of its columns: "
            "give it a heading, or name them with --columns if these are names"
        )
    rows = tables.rows(content, path, [*beside, *names])
    if len(there) == 1 and suffix(path) == ".csv":
        rows = _without_gaps(rows, path)
    return _collect(rows, path, names, columns)


def _without_gaps(rows: Iterable[tuple[int, list[str]]], path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield rows of a CSV of one column, whose empty lines are empty cells. Raises DataError for one."""
    before = None
    for line, cells in rows:
        if before is not None and line != before + 1:
            raise DataError(f"{path}, line {before + 1:,} is empty: fill in the value, or remove the line")
        before = line
        yield line, cells


def _split(given: Sequence[str], there: Sequence[str]) -> list[str]:
    """The names of columns, which may stand behind each other with commas between."""
    several = [[name] if name in there else [x.strip() for x in name.split(",")] for name in given]
    return [name for names in several for name in names if name]


def _collect(
    rows: Iterable[tuple[int, list[str]]], path: Path, names: Sequence[str], columns: Columns
) -> list[Series]:
    lines: dict[str, list[int]] = {}
    times: dict[str, list[str]] = {}
    values: dict[str, list[list[float]]] = {}
    for line, cells in rows:
        time = cells.pop(0) if columns.time is not None else ""
        key = cells.pop(0).strip() if columns.id is not None else ""
        if columns.id is not None and not key:
            raise DataError(f"{path}, line {line:,} has no id in {columns.id!r}")
        numbers = [_number(x, name, path, line) for x, name in zip(cells, names, strict=True)]
        lines.setdefault(key, []).append(line)
        times.setdefault(key, []).append(time)
        values.setdefault(key, []).append(numbers)
    if not values:
        raise DataError(f"{path} holds no rows")
    found = []
    for key, numbers in values.items():
        steps = None
        if columns.time is not None and len(numbers) > 1:
            try:
                steps = time_steps(times[key], lines[key])
            except TimeError as error:
                raise DataError(f"{path}, {error}") from error
        for name, column in zip(names, np.array(numbers, np.float64).T, strict=True):
            parts = ([key] if columns.id is not None else []) + (
                [name] if columns.id is None or len(names) > 1 else []
            )
            name = "/".join(parts)
            if 0 < np.abs(column).max() < 1 / LARGEST:
                raise DataError(
                    f"{path}: all values of the series {name!r} are below {1 / LARGEST:g} in size: take a "
                    "smaller unit"
                )
            found.append(Series(name, np.ascontiguousarray(column), steps))
    return found


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _number(text: str, column: str, path: Path, line: int) -> float:
    number = float(text) if _is_number(text) else math.nan
    if abs(number) <= LARGEST:
        return number
    if math.isfinite(number):
        raise DataError(
            f"{path}, line {line:,}, column {column!r}: {text[:40]!r} is beyond {LARGEST:g}: take a larger "
            "unit"
        )
    if _is_number(text.replace(",", "")):
        raise DataError(
            f"{path}, line {line:,}, column {column!r}: {text[:40]!r} is not a finite number: write a "
            "point before decimals, and nothing between thousands"
        )
    what = f"{text[:40]!r} is not a finite number" if text.strip() else "the cell is empty"
    raise DataError(
        f"{path}, line {line:,}, column {column!r}: {what}: fill it in, or name the columns of "
        "values with --columns, and one of times with --time-column"
    )

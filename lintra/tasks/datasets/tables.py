"""Named columns of CSV files and JSON lines."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lintra.tasks.base import DataError
from lintra.tasks.datasets.data_files import JSON_LINES, suffix

SUFFIXES = (".csv", *JSON_LINES)


def is_table(path: Path) -> bool:
    """Return whether a file of this name has columns with names."""
    return suffix(path) in SUFFIXES


def rows(content: str, path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of its line, the last one of several, and the values in these columns of every row.

    CSV has its names in the first row; of comma, semicolon and tab, the separator is the one this row has
    most of. JSON lines are an object each, whose numbers count as text. Raises DataError for a file without
    such a column and for a row without its value, with names and numbers."""
    return _json(content, path, columns) if suffix(path) != ".csv" else _csv(content, path, columns)


def names(content: str, path: Path) -> list[str]:
    """Return the names of the columns, of JSON lines those of the first object. Raises DataError."""
    if suffix(path) == ".csv":
        try:
            return next(_reader(content), [])
        except csv.Error as error:
            raise DataError(f"{path}, line 1 is not CSV: {error}") from error
    first = next((line for line in content.split("\n") if line.strip()), "")
    return list(_object(first, path, 1, "columns by name"))


def _csv(content: str, path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    reader = _reader(content)
    try:
        names = next(reader)
        places = [_place(names, column, path) for column in columns]
        for row in reader:
            if row and len(row) != len(names):
                raise DataError(
                    f"{path}, line {reader.line_num:,}: {len(row)} values in {len(names)} columns"
                )
            if row:
                yield reader.line_num, [row[place] for place in places]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num:,} is not CSV: {error}") from error


def _reader(content: str) -> Any:
    csv.field_size_limit(2**31 - 1)  # a text may be long; more does not fit into a C long everywhere
    heading = content.partition("\n")[0]
    separator = max(",;\t", key=heading.count)
    return csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True)


def _place(names: list[str], column: str, path: Path) -> int:
    """Return the place of a column, ignoring spaces around its name where it is not found otherwise."""
    if column not in names:
        names = [name.strip() for name in names]
    if names.count(column) != 1:
        found = "has several columns" if column in names else "has no column"
        raise DataError(f"{path} {found} {column!r}: its first row names {', '.join(map(repr, names))}")
    return names.index(column)


def _json(content: str, path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        row = _object(line, path, number, " and ".join(columns))
        for column in columns:
            if not isinstance(row.get(column), str | int | float):
                had = ", ".join(map(repr, row)) or "nothing"
                raise DataError(f"{path}, line {number:,} has {had}, and no text or number as {column!r}")
        yield number, [x if isinstance(x := row[column], str) else json.dumps(x) for column in columns]


def _object(line: str, path: Path, number: int, expected: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number:,} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number:,}: expected an object with {expected}")
    return row

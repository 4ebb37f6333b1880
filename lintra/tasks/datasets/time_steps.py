"""The times of the rows of a series: numbers or dates, equally far apart, and what comes after them."""

import calendar
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from statistics import median

Time = float | datetime

_OFFSET = re.compile(r"\d(Z|[+-]\d\d:?\d\d)$", re.IGNORECASE)  # from UTC, after an hour


class TimeError(ValueError):
    """Times that no series can have; the message has the number of their line."""


@dataclass(frozen=True)
class TimeSteps:
    """End of a series, and the distance of its rows: a number, seconds, or months of the calendar."""

    last: Time
    step: float
    months: int = 0  # instead of `step`
    day: int = 1  # of those months; of shorter ones the last
    as_date: bool = False  # written without an hour

    def after(self, rows: int) -> float | str:
        """Return the time so many rows after the last one, as JSON has it: a number, or ISO 8601. Raises
        TimeError for one after the year 9999."""
        if not isinstance(self.last, datetime):
            time = float(self.last + rows * self.step)  # perhaps with noise, as that of 0.1 + 0.2
            return _whole(time if time.is_integer() else float(f"{time:.15g}"))
        try:
            time = self._date_after(self.last, rows)
        except (OverflowError, ValueError) as error:
            raise TimeError(
                f"{rows:,} rows after {self.last.isoformat()} is after the year 9999: forecast fewer"
            ) from error
        return time.date().isoformat() if self.as_date else time.isoformat()

    def _date_after(self, last: datetime, rows: int) -> datetime:
        if not self.months:
            return last + timedelta(seconds=rows * self.step)
        month = last.year * 12 + last.month - 1 + rows * self.months
        year, month = month // 12, month % 12 + 1
        day = min(self.day, calendar.monthrange(year, month)[1])
        return last.replace(year=year, month=month, day=day)


def time_steps(texts: Sequence[str], lines: Sequence[int]) -> TimeSteps:
    """Return the steps of a series of two or more rows, whose times are in these lines.

    Times are numbers, or dates with or without an hour in ISO 8601, also YYYY-MM and with / for -; YYYYMMDD
    and YYYYMM where all rows are such dates, unless they are equally far apart as numbers alone. Raises
    TimeError for others, for times that do not rise, and for rows that are not equally far apart.
    """
    dates = _compact(texts)
    if dates is None:
        times = [_parse(text, line) for text, line in zip(texts, lines, strict=True)]
        return _steps(times, texts, lines)
    try:
        return _steps(dates, texts, lines)
    except TimeError:
        with contextlib.suppress(TimeError):
            return _steps([float(text) for text in texts], texts, lines)
        raise


def _compact(texts: Sequence[str]) -> list[datetime] | None:
    """Return dates written YYYYMMDD or YYYYMM, all of one of these forms; None for times of any other."""
    for form, length in (("%Y%m%d", len("20000101")), ("%Y%m", len("200001"))):
        if all(len(text := x.strip()) == length and text.isascii() and text.isdigit() for x in texts):
            try:
                return [datetime.strptime(x.strip(), form) for x in texts]
            except ValueError:
                return None
    return None


def _steps(times: Sequence[Time], texts: Sequence[str], lines: Sequence[int]) -> TimeSteps:
    if len({type(x) for x in times}) > 1 or len({_is_aware(x) for x in times}) > 1:
        first = next(i for i, x in enumerate(times) if (type(x), _is_aware(x)) != _kind(times[0]))
        raise TimeError(f"line {lines[first]:,}: {texts[first]!r} is not written as {texts[0]!r} is")
    for i in range(1, len(times)):
        if times[i] <= times[i - 1]:  # pyright: ignore (of one type)
            what = "the time of the row above, too" if times[i] == times[i - 1] else "before the row above"
            raise TimeError(f"line {lines[i]:,}: {texts[i]!r} is {what}: sort the rows, keep one for a time")
    as_date = all(len(text.strip()) <= len("2000-01-01") for text in texts)
    months, day = _months(times)
    if months:
        return TimeSteps(times[-1], 0.0, months, day, as_date)
    gaps = [_distance(a, b) for a, b in pairwise(times)]
    usual = median(gaps)
    rounding = 1e-15 * max((abs(x) for x in times if not isinstance(x, datetime)), default=0.0)
    for i, gap in enumerate(gaps, 1):
        if abs(gap - usual) > 1e-6 * usual + rounding:
            raise TimeError(
                f"line {lines[i]:,}: {texts[i]!r} is {_format(gap, times)} after the row above, others are "
                f"{_format(usual, times)} apart: fill in what is missing, resample the series, or "
                f"leave --time-column out if rows are to count as equally far apart{_shifted(texts)}"
            )
    return TimeSteps(times[-1], usual, as_date=as_date and usual % 86_400 == 0)


def _shifted(texts: Sequence[str]) -> str:
    """Return a hint for times with several offsets from UTC, empty for others."""
    if len({found[1] for text in texts if (found := _OFFSET.search(text.strip()))}) < 2:
        return ""
    return ". Their offset from UTC changes, as for daylight saving: write local times without it"


def _parse(text: str, line: int) -> Time:
    text = text.strip()
    try:
        number = float(text)
    except ValueError:
        return _date(text, line)
    if abs(number) == float("inf") or number != number:
        raise TimeError(f"line {line:,}: {text!r} is not a time")
    return number


def _date(text: str, line: int) -> datetime:
    iso = text.replace("/", "-")
    iso = iso[:-1] + "+00:00" if iso.endswith(("Z", "z")) else iso
    iso = iso + "-01" if len(iso) == len("2000-01") else iso
    try:
        found = datetime.fromisoformat(iso)
        _ = found.tzinfo and found.astimezone(timezone.utc)  # OverflowError for what no other compares with
        return found
    except (ValueError, OverflowError):
        what = "the time is missing" if not text else f"{text!r} is not a time"
        raise TimeError(
            f"line {line:,}: {what}: expected a number or a date as in 2024-01-31 or 2024-01-31T18:00"
        ) from None


def _is_aware(time: Time) -> bool:
    return isinstance(time, datetime) and time.tzinfo is not None


def _kind(time: Time) -> tuple[type, bool]:
    return type(time), _is_aware(time)


def _months(times: Sequence[Time]) -> tuple[int, int]:
    """Return how many months of the calendar the rows are apart, 0 if they are not so, and their day."""
    dates = [x for x in times if isinstance(x, datetime)]
    gaps = {(b.year - a.year) * 12 + b.month - a.month for a, b in pairwise(dates)}
    day = max((x.day for x in dates), default=1)
    fits = all(x.day == min(day, calendar.monthrange(x.year, x.month)[1]) for x in dates)
    hours = {x.time() for x in dates}
    if len(gaps) == len(hours) == 1 and fits and min(gaps) > 0:
        return min(gaps), day
    return 0, 1


def _distance(a: Time, b: Time) -> float:
    if isinstance(a, datetime) and isinstance(b, datetime):
        return (b - a).total_seconds()
    return float(b) - float(a)  # pyright: ignore (numbers both)


def _format(gap: float, times: Sequence[Time]) -> str:
    return str(timedelta(seconds=gap)) if isinstance(times[0], datetime) else f"{gap:g}"


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number

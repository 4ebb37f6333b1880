"""The checks of the fields of a configuration, in one place: types and ranges."""

import math
from dataclasses import dataclass
from typing import Literal

import pytest

from lintra.config import fields
from lintra.tasks import (
    copy,
    listops,
    pathfinder,
    recall,
    selective_copying,
    series,
    state_tracking,
    text,
    text_classification,
)


@dataclass(frozen=True, kw_only=True)
class Some:
    count: int | None = None
    factor: float | None = None
    share: float = 0.0
    weight: float | None = None
    heat: float | None = None
    pairs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    places: int | tuple[int, ...] = 0
    order: Literal[1, 2] = 1

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, count=1)
        fields.finite(self, "factor")
        fields.not_negative(self, "weight")
        fields.positive(self, "heat")
        fields.probability(self, "share")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"count": 0}, ValueError, "count must be at least 1, got 0"),
        ({"count": 1.0}, TypeError, r"count must be int or None, got 1\.0"),
        ({"factor": math.inf}, ValueError, "factor must be finite, got inf"),
        ({"factor": math.nan}, ValueError, "factor must be finite, got nan"),
        ({"weight": -1.0}, ValueError, r"weight must be at least 0 and finite, got -1\.0"),
        ({"weight": math.inf}, ValueError, "weight must be at least 0 and finite, got inf"),
        ({"weight": math.nan}, ValueError, "weight must be at least 0 and finite, got nan"),
        ({"heat": 0.0}, ValueError, r"heat must be above 0 and finite, got 0\.0"),
        ({"heat": math.inf}, ValueError, "heat must be above 0 and finite, got inf"),
        ({"heat": math.nan}, ValueError, "heat must be above 0 and finite, got nan"),
        ({"pairs": (("a", 1),)}, TypeError, r"pairs must be several \(str, several int\), got"),
        ({"pairs": (("a",),)}, TypeError, "pairs must be several"),
        ({"pairs": (("a", (1,), (2,)),)}, TypeError, "pairs must be several"),
        ({"pairs": [("a", (1,))]}, TypeError, "pairs must be several"),
        ({"places": (1, 2.0)}, TypeError, r"places must be int or several, got \(1, 2\.0\)"),
        ({"order": True}, TypeError, "order must be 1 or 2, got True"),
        ({"order": 1.0}, TypeError, r"order must be 1 or 2, got 1\.0"),
        ({"share": 1.0}, ValueError, r"share must be in \[0, 1\), got 1\.0"),
        ({"share": math.nan}, ValueError, r"share must be in \[0, 1\), got nan"),
    ],
)
def test_a_field_out_of_range_is_named(options, error, message):
    with pytest.raises(error, match=message):
        Some(**options)


def test_bounds_are_in_and_none_passes():
    Some()
    Some(count=1, factor=-3.0, share=0.0, weight=0.0, heat=1e-9, pairs=(("a", ()), ("b", (1, 2))))


@pytest.mark.parametrize(
    "task",
    [copy, listops, pathfinder, recall, selective_copying, series, state_tracking, text, text_classification],
    ids=lambda task: task.__name__,
)
def test_tasks_check_the_types_of_theirs(task):
    name = {listops: "depth", pathfinder: "size", recall: "pairs", series: "context"}.get(task, "length")
    with pytest.raises(TypeError, match=f"{name} must be int, got '16'"):
        task.Config(**{name: "16"})

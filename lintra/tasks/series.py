"""Forecast numeric series: the distribution of what comes next, row by row.

A CSV file (.csv) or JSON lines (.jsonl) has one series per column or, with a column of ids, one for each id.
Rows are in the order of time, equally far apart, without gaps; a column of times, if it is named, is checked
for that. Without --data the series are made up: a season of 24 rows, a trend, noise.

The last tenth of each series, at least a horizon, is for `lintra evaluate` alone, the tenth before it for
validation. Nothing of either enters an estimated season.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.generation import check_recurrent
from lintra.models import Forecaster, forecaster
from lintra.nn.real_distributions import Gaussian, Quantiles, StudentT
from lintra.tasks.base import Batch, DataError, Task, TaskConfig
from lintra.tasks.datasets import text_files, time_series
from lintra.tasks.datasets.seasons import season_of, seasonal_series
from lintra.tasks.datasets.time_series import ALL, Columns, Series
from lintra.tasks.datasets.windows import HeldOutWindows, RandomWindows, check_rows, held_out

Head = Literal["gaussian", "student-t", "quantile"]
OUTPUTS: dict[Head, Any] = {"gaussian": Gaussian, "student-t": StudentT, "quantile": Quantiles}
FARTHEST = 100.0  # deviations of a target: a larger one, as after a constant, would dominate the learning
_MADE_UP, _ROWS, _SEASON = 8, 1_000, 24  # series, rows of each, and their season


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Forecast numeric series (your own: --data CSV)."""

    PATHS: ClassVar = ("data",)

    data: str | None = None  # .csv or .jsonl (.gz, .xz); none: made-up series
    columns: tuple[str, ...] = ()  # of values: a b, or a,b; none: all others
    time_column: str | None = None  # numbers or dates, equally far apart
    id_column: str | None = None  # rows of one id are one series
    context: int = 96  # rows that a forecast looks back on
    horizon: int = 24  # rows ahead that are scored
    season: int | None = None  # rows; 1: there is none; None: estimated
    head: Head = "student-t"  # the distribution of the next value
    data_seed: int = 0  # another seed, other windows

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, context=4, horizon=1, season=1)
        if self.season is not None and self.season > self.context:
            raise ValueError(
                f"season must be at most the context of {self.context} rows, got {self.season}: take a "
                "longer --context"
            )
        fields.seed(self, "data_seed")

    def with_data(self, data: str) -> "Config":
        return replace(self, data=data)

    def training_preset(self) -> dict[str, Any]:
        """Settings for about two minutes on two cores."""
        return {
            "steps": 2_000,
            "batch": 32,
            "lr": 2e-3,
            "weight_decay": 0.01,
            "schedule": "cosine",
            "warmup": 50,
        }

    def build(self) -> "SeriesTask":
        return SeriesTask(self)


class SeriesTask(Task):
    name = "series"

    def __init__(self, config: Config):
        self.config = config
        self.loss_unit = "pinball loss" if config.head == "quantile" else "nats a row"

    @property
    def length(self) -> int:
        return self.config.context + self.config.horizon

    @property
    def judged_by(self) -> Literal["test", "validate"]:
        return "test"

    @cached_property
    def train(self) -> RandomWindows:  # pyright: ignore[reportIncompatibleMethodOverride]
        return RandomWindows(self.series, *self._sizes, self.config.data_seed)

    @cached_property
    def validate(self) -> HeldOutWindows:  # pyright: ignore[reportIncompatibleMethodOverride]
        return HeldOutWindows(self.series, *self._sizes, 2)

    @cached_property
    def test(self) -> HeldOutWindows:  # pyright: ignore[reportIncompatibleMethodOverride]
        return HeldOutWindows(self.series, *self._sizes, 1)

    @property
    def least(self) -> int:
        """The fewest rows that a forecast needs: training rows are counted from there."""
        return self.config.context // 2

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.config.context, self.config.horizon

    @cached_property
    def series(self) -> list[Series]:
        """The series, each long enough. Raises DataError."""
        config = self.config
        if config.data is None:
            if config.columns or config.time_column or config.id_column:
                raise DataError("columns are for a file: name it with --data PATH")
            made = (seasonal_series(_ROWS, _SEASON, (config.data_seed + i) % 2**64) for i in range(_MADE_UP))
            found = [Series(f"made-up {i}", values) for i, values in enumerate(made, 1)]
        else:
            found = self.read(text_files.named("data", config.data, "a CSV file or JSON lines"))
        check_rows(found, *self._sizes, config.data or "the made-up series")
        return found

    def read(self, path: Path, named: Columns = ALL) -> list[Series]:
        """Return the series of a file; columns that are not named are those of this task. Raises
        DataError."""
        config = self.config
        time, id_ = named.time or config.time_column, named.id or config.id_column
        return time_series.read(path, Columns(named.values or config.columns, time, id_))

    def known(self, series: int) -> np.ndarray:
        """Return the rows of a series before those of the test."""
        values = self.series[series].values
        return values[: len(values) - held_out(len(values), self.config.horizon)]

    @cached_property
    def season(self) -> int:
        """The rows from one season to the next, 1 for none: given, or estimated from the training rows."""
        if self.config.season is not None:
            return self.config.season
        return season_of(self._trained, self.config.context)

    @property
    def _trained(self) -> list[np.ndarray]:
        """The rows of each series before those held out."""
        horizon = self.config.horizon
        return [x.values[: len(x.values) - 2 * held_out(len(x.values), horizon)] for x in self.series]

    def notices(self, folder: Path) -> list[str]:
        rows = sum(len(x.values) for x in self.series)
        season = "no season" if self.season == 1 else f"a season of {self.season:,} rows"
        how = " (estimated)" if self.config.season is None else ""
        return [f"{len(self.series):,} series, {rows:,} rows, {season}{how}"]

    def freeze_config(self, config: Config) -> Config:
        return replace(config, season=self.season)

    def model(self, attention: AttentionPattern) -> forecaster.Config:
        """Return a network small enough for two cores: 2 layers, 4 heads of 16; each value is seen with the
        three before it, and those around the place of the next one a season and two seasons earlier."""
        season = self.season
        lags = {1, 2, 3} | ({season - 1, season, 2 * season - 1} if season > 1 else set())
        return forecaster.Config(
            attention=attention,
            layers=2,
            heads=4,
            width=64,
            mlp_ratio=4,
            dropout=0.1,
            output=OUTPUTS[self.config.head](),
            lags=tuple(sorted(lag for lag in lags if 1 <= lag < self.config.context)),
            scale_rows=self.config.context,
        )

    @torch.no_grad()
    def prepare(self, model: Forecaster) -> None:
        """Set the scale of series that have been 0 so far to a typical one of the others."""
        sizes = [np.abs(values).mean() for values in self._trained]
        if positive := [x for x in sizes if x > 0]:
            model.scaling.typical.fill_(float(np.median(positive)))

    def check(self, model: forecaster.Config) -> None:
        """Raise ValueError for a mechanism without a recurrent form, by which forecasts are made."""
        with torch.device("meta"):
            check_recurrent(model.build())

    def loss(self, model: Forecaster, batch: Batch) -> Tensor:
        losses = self._predicted(model, batch)[0]
        return losses[batch["counted"][:, 1:]].mean()

    def weight(self, batch: Batch) -> Tensor:
        return batch["counted"].sum()

    @torch.no_grad()
    def per_sample(self, model: Forecaster, batch: Batch) -> dict[str, Tensor]:
        """The loss of the rows that count, each predicted from those before it, and the absolute error of the
        medians, both in units of the scale of what came before."""
        losses, params, target = self._predicted(model, batch)
        error = (target - model.output.median(params)).abs()
        counted = batch["counted"][:, 1:]
        return {
            "loss": losses.where(counted, 0).sum(1),
            "scaled_error": error.where(counted, 0).sum(1),
            "weight": counted.sum(1),
        }

    def _predicted(self, model: Forecaster, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses of all rows but the first, the parameters and the targets, [b t-1 ...]."""
        values = batch["values"]
        prediction = model(values[:, :-1])
        target = prediction.standardised(values[:, 1:]).clamp(-FARTHEST, FARTHEST)
        return model.output.loss(prediction.params, target), prediction.params, target

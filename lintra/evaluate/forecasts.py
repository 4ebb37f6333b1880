"""Scores of forecasts, beside those without a model: the last value, or the value of a season ago."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch

from lintra.evaluate.estimates import Estimate, Stopped
from lintra.generation.forecasting import sample_paths
from lintra.generation.uniforms import sequence_seed
from lintra.models import Forecaster
from lintra.tasks import Report
from lintra.tasks.series import SeriesTask

LEVELS = tuple(i / 10 for i in range(1, 10))
PATHS = 100  # sampled of each window, the usual number for judging distributions

# past values, season, rows ahead -> quantiles [rows levels]
Baseline = Callable[[np.ndarray, int, int], np.ndarray]


class ForecastScores(NamedTuple):
    """weighted_quantile_loss: twice the pinball losses, mean of LEVELS, in parts of the absolute values,
    about a normalised CRPS; None where all values are 0. mase: the absolute error of the medians in parts of
    that of last season's value in the past; None where no series varies. coverage: how many values lie in the
    interval of 80 %."""

    weighted_quantile_loss: Estimate | None
    mase: Estimate | None
    coverage: Estimate


def naive(past: np.ndarray, season: int, rows: int) -> np.ndarray:
    """The last value, with the spread of a random walk, [rows levels].

    Hyndman and Athanasopoulos, Forecasting: Principles and Practice, 3rd edition, section 5.5."""
    spread = _deviation(past, 1) * np.sqrt(np.arange(1, rows + 1))
    return past[-1] + spread[:, None] * _NORMAL


def seasonal_naive(past: np.ndarray, season: int, rows: int) -> np.ndarray:
    """The values of the last season, with a spread that grows from season to season. As for `naive`."""
    ahead = np.arange(rows)
    spread = _deviation(past, season) * np.sqrt(ahead // season + 1)
    return (past[len(past) - season + ahead % season])[:, None] + spread[:, None] * _NORMAL


BASELINES: dict[str, Baseline] = {"seasonal naive": seasonal_naive, "naive": naive}
_NORMAL = np.array([NormalDist().inv_cdf(level) for level in LEVELS])


def forecast_scores(
    model: Forecaster,
    task: SeriesTask,
    indices: Sequence[int],
    *,
    batch: int,
    seed: int = 0,
    report: Report = lambda done: None,
    stopped: Stopped = lambda: False,
) -> dict[str, ForecastScores]:
    """Score forecasts of the test windows at these places -> by "model" and the names of BASELINES.

    Of each window `context` rows are seen and `horizon` forecast, by PATHS sampled paths. The baselines see
    all rows before them; a task without a season has only "naive". Errors are over windows, which are
    taken to be independent.
    """
    context, horizon = task.config.context, task.config.horizon
    baselines = {name: x for name, x in BASELINES.items() if task.season > 1 or x is naive}
    found: dict[str, list[np.ndarray]] = {"model": [], **{name: [] for name in baselines}}
    done = 0
    for first in range(0, len(indices), batch):
        windows = task.test.__getitems__(indices[first : first + batch])
        values = windows["values"].numpy()
        paths = sample_paths(
            model,
            windows["values"][:, :context],
            horizon=horizon,
            samples=PATHS,
            seed=sequence_seed(seed, first),
        )
        sampled = np.moveaxis(np.quantile(paths.numpy(), LEVELS, axis=1), 0, -1)  # [windows rows levels]
        for i, (which, start) in enumerate(
            zip(windows["series"].tolist(), windows["first"].tolist(), strict=True)
        ):
            series, truth = task.series[which].values, values[i, context:]
            scale = seasonal_error(task.known(which), task.season)
            past = series[: start + context]
            forecasts = {name: x(past, task.season, horizon) for name, x in baselines.items()}
            for name, quantiles in {"model": sampled[i], **forecasts}.items():
                found[name].append(_measured(quantiles, truth, scale))
        done += len(values)
        report(done)
        if stopped():
            break
    return {name: _together(np.stack(rows), horizon) for name, rows in found.items()}


def seasonal_error(past: np.ndarray, season: int) -> float:
    """Return the mean absolute difference from one season to the next, the unit of MASE.
    Hyndman and Koehler 2006, International Journal of Forecasting 22(4)."""
    return float(np.abs(past[season:] - past[:-season]).mean())


def pinball(quantiles: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the pinball losses of quantiles [rows levels] at LEVELS, for values [rows]."""
    away, levels = truth[:, None] - quantiles, np.array(LEVELS)
    return np.maximum(levels * away, (levels - 1) * away)


def _deviation(past: np.ndarray, lag: int) -> float:
    return float(np.sqrt(np.square(past[lag:] - past[:-lag]).mean()))


def _measured(quantiles: np.ndarray, truth: np.ndarray, scale: float) -> np.ndarray:
    """Return sums over the rows of a window: pinball losses, absolute values, errors in parts of `scale` (nan
    where that is 0), values inside of the interval."""
    error = np.abs(truth - quantiles[:, len(LEVELS) // 2])
    inside = (quantiles[:, 0] <= truth) & (truth <= quantiles[:, -1])
    scaled = error.sum() / scale if scale > 0 else np.nan
    return np.array([2 * pinball(quantiles, truth).mean(1).sum(), np.abs(truth).sum(), scaled, inside.sum()])


def _together(rows: np.ndarray, horizon: int) -> ForecastScores:
    losses, sizes, scaled, inside = torch.from_numpy(rows).T
    predictions = torch.full_like(losses, horizon)
    loss = None
    if float(sizes.sum()) > 0:
        loss = replace(Estimate.of(losses, sizes), predictions=len(rows) * horizon)
    some = ~scaled.isnan()
    mase = Estimate.of(scaled[some], predictions[some]) if bool(some.any()) else None
    return ForecastScores(loss, mase, Estimate.of(inside, predictions))

"""Scores of forecasts: compared with loops, and with known values for simple series."""

import numpy as np
import pytest
import torch

from lintra.attention import linear
from lintra.evaluate import forecast_scores
from lintra.evaluate.forecasts import LEVELS, naive, pinball, seasonal_error, seasonal_naive
from lintra.generation.forecasting import sample_paths
from lintra.tasks import series


@pytest.fixture
def task(tmp_path):
    """Four series of noise around a season of 5 rows, one of them zeros."""
    draw, place = np.random.default_rng(0), np.arange(200)[:, None]
    values = 10 + 5 * np.sin(2 * np.pi * place / 5) + draw.normal(size=(200, 4)) * [0.5, 1, 2, 0]
    values[:, 3] = 0
    lines = ["a,b,c,zero", *(",".join(map(str, row)) for row in values)]
    (tmp_path / "data.csv").write_text("\n".join(lines))
    return series.Config(data=str(tmp_path / "data.csv"), context=20, horizon=5, season=5).build()


def test_scores_are_those_of_a_loop(task, one_thread):
    torch.manual_seed(0)
    model = task.model(linear.Config()).build().eval()
    places = range(len(task.test))
    found = forecast_scores(model, task, places, batch=3, seed=3)
    batch = task.test.__getitems__(places)
    values = batch["values"]
    paths = sample_paths(model, values[:, :20], horizon=5, samples=100, seed=3)
    losses = sizes = inside = 0.0
    scaled = []
    for path, value, which in zip(paths.numpy(), values.numpy(), batch["series"].tolist(), strict=True):
        past = task.series[which].values[:180]
        differences = [abs(past[i] - past[i - 5]) for i in range(5, 180)]
        for row in range(5):
            y, at = value[20 + row], [np.quantile(path[:, row], level) for level in LEVELS]
            for level, q in zip(LEVELS, at, strict=True):
                losses += 2 * (level * (y - q) if y >= q else (1 - level) * (q - y)) / 9
            sizes += abs(y)
            inside += at[0] <= y <= at[-1]
            if which < 3:
                scaled.append(abs(y - at[4]) / np.mean(differences))
    own = found["model"]
    assert own.weighted_quantile_loss.mean == pytest.approx(losses / sizes)
    assert own.coverage.mean == pytest.approx(inside / values[:, 20:].numel())
    assert own.mase.mean == pytest.approx(np.mean(scaled))  # a series of zeros has no scale to divide by
    assert (own.mase.samples, own.coverage.samples) == (12, 16)
    assert own.weighted_quantile_loss.predictions == own.coverage.predictions == 80
    assert list(found) == ["model", "seasonal naive", "naive"]


def test_baselines_are_scored_on_what_came_before(task, one_thread):
    """On every row before a window's horizon, and on none after it."""
    model = task.model(linear.Config()).build().eval()
    places = range(len(task.test))
    found, batch = forecast_scores(model, task, places, batch=3), task.test.__getitems__(places)
    for name, baseline in (("naive", naive), ("seasonal naive", seasonal_naive)):
        losses = sizes = inside = 0.0
        for which, first in zip(batch["series"].tolist(), batch["first"].tolist(), strict=True):
            past, truth = np.split(task.series[which].values[: first + 25], [first + 20])
            quantiles = baseline(past, 5, 5)
            for level, q in zip(LEVELS, quantiles.T, strict=True):
                losses += 2 * np.where(truth >= q, level * (truth - q), (1 - level) * (q - truth)).sum() / 9
            sizes += np.abs(truth).sum()
            inside += ((quantiles[:, 0] <= truth) & (truth <= quantiles[:, -1])).sum()
        assert found[name].weighted_quantile_loss.mean == pytest.approx(losses / sizes)
        assert found[name].coverage.mean == pytest.approx(inside / (5 * len(places)))


def test_baselines_are_what_they_say():
    past = np.arange(12.0) % 4 + np.array([0.0] * 8 + [1.0] * 4)
    middle = len(LEVELS) // 2
    assert naive(past, 4, 3)[:, middle].tolist() == [4.0, 4.0, 4.0]
    assert seasonal_naive(past, 4, 6)[:, middle].tolist() == [1.0, 2.0, 3.0, 4.0, 1.0, 2.0]
    assert seasonal_naive(past, 1, 3) == pytest.approx(naive(past, 1, 3))
    spread = naive(past, 4, 9)[:, -1] - 4
    assert spread / spread[0] == pytest.approx(np.sqrt(np.arange(1, 10)))
    assert seasonal_error(past, 4) == pytest.approx(0.5)


def test_the_intervals_of_baselines_cover_what_they_are_made_for():
    """On a random walk, or one from season to season, they cover four values in five."""
    draw = np.random.default_rng(0)
    for baseline, make in (
        (naive, lambda: draw.normal(size=160).cumsum()),
        (seasonal_naive, lambda: draw.normal(size=(32, 5)).cumsum(0).ravel()),
    ):
        inside = []
        for _ in range(400):
            values = make()
            quantiles = baseline(values[:150], 5, 10)
            inside.append((quantiles[:, 0] <= values[150:]) & (values[150:] <= quantiles[:, -1]))
        assert np.mean(inside) == pytest.approx(0.8, abs=0.04)


def test_the_pinball_loss_is_least_at_the_quantile():
    values = np.random.default_rng(0).normal(size=4_001)
    at = np.quantile(values, LEVELS)
    best = pinball(np.broadcast_to(at, (4_001, 9)), values).mean(0)
    for moved in (at + 0.05, at - 0.05):
        assert (pinball(np.broadcast_to(moved, (4_001, 9)), values).mean(0) > best).all()


def test_a_perfect_series_and_zeros_alone(tmp_path):
    (tmp_path / "data.csv").write_text("y\n" + "0\n" * 100)
    task = series.Config(data=str(tmp_path / "data.csv"), context=10, horizon=4).build()
    model = task.model(linear.Config()).build().eval()
    found = forecast_scores(model, task, range(len(task.test)), batch=2)
    assert task.season == 1
    assert list(found) == ["model", "naive"]
    assert found["naive"].weighted_quantile_loss is None
    assert found["naive"].mase is None
    assert found["naive"].coverage.mean == 1


def test_it_stops_when_it_is_told_to(task):
    model = task.model(linear.Config()).build().eval()
    reported = []
    found = forecast_scores(
        model, task, range(9), batch=2, report=reported.append, stopped=lambda: len(reported) == 2
    )
    assert reported == [2, 4]
    assert found["model"].coverage.samples == 4

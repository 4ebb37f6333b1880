"""Seasons are found in series that have one, and not in those without."""

import numpy as np
import pytest

from lintra.tasks.datasets.seasons import season_of, seasonal_series


@pytest.mark.parametrize("season", [4, 7, 12, 24, 52])
def test_the_season_of_a_made_up_series_is_found(season):
    series = [seasonal_series(600, season, seed) for seed in range(3)]
    assert season_of(series, 96) == season


def test_a_season_behind_a_trend_and_noise():
    draw, place = np.random.default_rng(0), np.arange(400)
    values = 0.5 * place + 3 * (place % 7 == 0) + draw.normal(size=400)
    assert season_of([values], 60) == 7


@pytest.mark.parametrize("seed", range(3))
def test_what_has_no_season(seed):
    draw = np.random.default_rng(seed)
    assert season_of([draw.normal(size=500)], 96) == 1
    assert season_of([np.full(500, 3.0), np.arange(500.0)], 96) == 1
    assert season_of([draw.normal(size=5)], 96) == 1


def test_a_season_is_no_longer_than_asked():
    assert season_of([seasonal_series(600, 24, 0)], 20) != 24


def test_made_up_series_follow_from_their_seed():
    assert np.array_equal(seasonal_series(50, 7, 1), seasonal_series(50, 7, 1))
    assert not np.array_equal(seasonal_series(50, 7, 1), seasonal_series(50, 7, 2))

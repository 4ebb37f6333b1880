"""Series to forecast: what is held out, what may be learned, and what is too short."""

import csv

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lintra.attention import linear
from lintra.checkpoint import from_json, to_json
from lintra.nn import Gaussian, Quantiles, StudentT
from lintra.tasks import DataError, series
from lintra.tasks.datasets.windows import rows_needed

SHORT = {"context": 12, "horizon": 4}


@pytest.fixture
def file(tmp_path):
    """Two series of 90 rows; each value is its position."""
    with (tmp_path / "data.csv").open("w", newline="") as place:
        writer = csv.writer(place)
        writer.writerows([["a", "b"], *([i, 1000 + i] for i in range(90))])
    return tmp_path / "data.csv"


def built(file=None, **settings):
    return series.Config(data=None if file is None else str(file), **SHORT | settings).build()


def windows(samples, count):
    batch = samples.__getitems__(range(count))
    return batch, batch["values"]


def test_parts_are_held_out_in_time(file):
    """Training ends where validation begins, which ends where the test begins; contexts reach back."""
    task = built(file)
    held = 9  # a tenth of 90
    trained = windows(task.train, 500)[1] % 1000
    assert trained.max() == 90 - 2 * held - 1
    assert trained.min() == 0
    for samples, last in ((task.validate, 90 - held - 1), (task.test, 89)):
        batch, values = windows(samples, len(samples))
        assert len(samples) == 2 * (held // 4)
        scored = values[:, 12:] % 1000
        assert scored.max() == last
        assert scored.min() == last + 1 - 2 * 4
        assert torch.equal(batch["counted"], (torch.arange(16) >= 12).expand(len(samples), 16))
        places = {tuple(x) for x in zip(batch["series"].tolist(), batch["first"].tolist(), strict=True)}
        assert len(places) == len(samples)
        expected = 1000 * batch["series"] + batch["first"]
        assert torch.equal(values[:, 0], expected.double())
    assert (task.known(0) == np.arange(81)).all()


def test_what_counts_in_training_begins_in_the_middle_of_the_context(file):
    batch, values = windows(built(file).train, 3)
    assert torch.equal(batch["counted"], (torch.arange(16) >= 6).expand(3, 16))
    assert (values.diff(dim=1) == 1).all()
    again, other = windows(built(file).train, 3)[1], windows(built(file, data_seed=1).train, 3)[1]
    assert torch.equal(values, again)
    assert not torch.equal(values, other)


@pytest.mark.parametrize("rows", [rows_needed(12, 4) - 1, rows_needed(12, 4)])
def test_a_series_that_is_too_short_says_how_many_rows_it_takes(tmp_path, rows):
    (tmp_path / "data.csv").write_text("y\n" + "1\n" * rows)
    task = built(tmp_path / "data.csv")
    if rows == rows_needed(12, 4):
        assert all(len(x) for x in (task.train, task.validate, task.test))
        assert windows(task.train, 1)[1].shape == (1, 16)
        return
    with pytest.raises(
        DataError, match=r"the series 'y' has 23 rows, and a context of 12 .* need 24: take more"
    ):
        _ = task.train


@pytest.mark.parametrize(("context", "horizon"), [(12, 4), (200, 1), (96, 24), (4, 1), (16, 1), (31, 2)])
def test_rows_that_are_needed(context, horizon):
    """From that number of rows on there is always a window; with one row fewer there is none."""

    def left(rows):
        return rows - 2 * max(horizon, rows // 10) - context - horizon

    rows = rows_needed(context, horizon)
    assert left(rows - 1) < 0 <= min(left(rows + more) for more in range(100))
    assert rows_needed(10**12, horizon) < 2 * 10**12  # computed at once


@pytest.mark.parametrize(
    ("head", "output"), [("gaussian", Gaussian), ("student-t", StudentT), ("quantile", Quantiles)]
)
def test_the_loss_is_the_mean_over_rows_that_count(head, output):
    task = built(head=head, season=6)
    config = task.model(linear.Config())
    assert type(config.output) is output
    assert config.lags == (1, 2, 3, 5, 6, 11)
    model = config.build().eval()
    batch = windows(task.train, 3)[0]
    prediction = model(batch["values"][:, :-1])
    target = prediction.standardised(batch["values"][:, 1:])
    total, count = 0.0, 0
    for b in range(3):
        for t in range(6, 16):
            total += config.output.loss(prediction.params[b, t - 1], target[b, t - 1]).item()
            count += 1
    assert task.loss(model, batch).item() == pytest.approx(total / count, rel=1e-5)
    assert task.weight(batch) == count == 30
    each = task.per_sample(model, batch)
    assert each["weight"].tolist() == [10, 10, 10]
    assert each["loss"].sum().item() == pytest.approx(total, rel=1e-5)
    error = (target - config.output.median(prediction.params)).abs()[:, 5:]
    assert_close(each["scaled_error"], error.sum(1))


def test_a_loss_has_no_part_of_what_does_not_count():
    task = built()
    model = task.model(linear.Config()).build().eval()
    batch = windows(task.validate, 2)[0]
    values = batch["values"].clone().requires_grad_()
    task.loss(model, batch | {"values": values}).backward()
    assert task.weight(batch) == 8
    assert values.grad is not None
    assert values.grad.isfinite().all()


def test_a_jump_counts_no_more_than_the_farthest():
    """Whatever its height: after a constant, each would be millions of deviations away."""
    task = built(head="gaussian")
    model = task.model(linear.Config()).build().eval()
    low, high = (torch.cat((torch.ones(1, 15), torch.full((1, 1), x)), 1).double() for x in (2.0, 2e6))
    counted = torch.arange(16)[None] == 15
    losses = [task.loss(model, {"values": values, "counted": counted}) for values in (low, high)]
    assert losses[0] == losses[1]
    assert losses[0].isfinite()


def test_a_season_is_estimated_once_and_kept(file):
    made = built(context=48, horizon=8)
    assert made.season == 24
    kept = made.freeze_config(made.config)
    assert kept.season == 24
    assert from_json(series.Config, to_json(kept), "task") == kept
    assert made.notices(file.parent) == ["8 series, 8,000 rows, a season of 24 rows (estimated)"]
    assert built(file).season == 1
    assert built(file).notices(file.parent) == ["2 series, 180 rows, no season (estimated)"]
    assert built(file, season=3).notices(file.parent) == ["2 series, 180 rows, a season of 3 rows"]


def test_what_is_held_out_changes_no_season_and_no_scale(tmp_path):
    """Both are those of the training rows, whatever comes after them."""
    place = np.arange(200)
    rows = 10 + 5 * np.sin(place * 2 * np.pi / 6)
    found = []
    for name, held_out in (("a.csv", rows), ("b.csv", 1e6 * np.sin(place * 2 * np.pi / 9))):
        values = np.concatenate((rows[:160], held_out[160:]))
        (tmp_path / name).write_text("y\n" + "".join(f"{x}\n" for x in values))
        task = built(tmp_path / name)
        model = task.model(linear.Config()).build()
        task.prepare(model)
        found.append((task.season, float(model.scaling.typical), windows(task.train, 50)[1]))
    (season, typical, values), other = found
    assert (season, typical) == other[:2] == (6, pytest.approx(10, rel=0.1))
    assert torch.equal(values, other[2])


def test_the_scale_of_zeros_is_that_of_the_others(tmp_path):
    (tmp_path / "data.csv").write_text("a,b,c\n" + "0,5,300\n" * 90)
    task = built(tmp_path / "data.csv")
    model = task.model(linear.Config()).build()
    task.prepare(model)
    assert model.scaling.typical == 152.5
    assert task.loss(model, windows(task.train, 9)[0]).isfinite()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": 3}, "context must be at least 4, got 3"),
        ({"horizon": 0}, "horizon must be at least 1, got 0"),
        ({"season": 0}, "season must be at least 1, got 0"),
        ({"season": 97}, "season must be at most the context of 96 rows, got 97: take a longer --context"),
        ({"data_seed": -1}, "data_seed must lie in"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        series.Config(**settings)


def test_columns_without_a_file_and_a_file_that_is_not_there():
    with pytest.raises(DataError, match="columns are for a file: name it with --data PATH"):
        _ = built(columns=("a",)).series
    with pytest.raises(DataError, match="data nowhere does not exist"):
        _ = built("nowhere").series

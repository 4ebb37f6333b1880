"""Distributions over real numbers: compared with those of PyTorch and with their definitions."""

import math

import pytest
import torch
from torch import distributions
from torch.nn import functional
from torch.testing import assert_close

from lintra.nn import Gaussian, Quantiles, StudentT
from lintra.nn.real_distributions import SHARPEST, t_cumulative
from lintra.testing.laws import EXACT

KINDS = [Gaussian(), StudentT(), Quantiles(), Quantiles(levels=(0.1, 0.5))]


def params_of(kind, *shape):
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.randn(*shape, kind.size, generator=generator, dtype=torch.float64)


def theirs(kind, params):
    loc, *others = params.unbind(-1)
    scale, *rest = (functional.softplus(x) + SHARPEST for x in others)
    return distributions.Normal(loc, scale) if not rest else distributions.StudentT(2 + rest[0], loc, scale)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: type(kind).__name__)
def test_a_likelihood_is_that_of_pytorch(kind):
    params = params_of(kind, 5, 40).requires_grad_()
    target = 3 * torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, expected = kind.loss(params, target), -theirs(kind, params).log_prob(target)
    assert_close(ours, expected, **EXACT)
    (a,) = torch.autograd.grad(ours.sum(), params)
    (b,) = torch.autograd.grad(expected.sum(), params)
    assert_close(a, b, **EXACT)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: type(kind).__name__)
def test_no_noise_has_a_finite_likelihood(kind):
    params = torch.full((3, kind.size), -1e4).index_fill(1, torch.tensor([0]), 0.0).requires_grad_()
    loss = kind.loss(params, torch.tensor([0.0, 1.0, -1e4]))
    (gradient,) = torch.autograd.grad(loss.sum(), params)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda kind: str(kind.size))
def test_quantile_losses_are_those_of_a_loop(kind):
    params = params_of(kind, 7)
    target = torch.linspace(-4, 4, 7, dtype=torch.float64)
    found = kind.quantiles(params)
    for row, y, loss in zip(found.tolist(), target.tolist(), kind.loss(params, target).tolist(), strict=True):
        assert row == sorted(row)
        total = 0.0
        for level, at in zip(kind.levels, row, strict=True):
            total += level * (y - at) if y >= at else (1 - level) * (at - y)
        assert loss == pytest.approx(2 * total / len(row))


@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda kind: str(kind.size))
def test_quantiles_beyond_the_levels_follow_exponential_tails(kind):
    """As far beyond the last level as it is from the one before, where the probability left falls as much."""
    params = params_of(kind, 7)
    at, levels = kind.quantiles(params), kind.levels
    lowest = kind.quantile(params, torch.full((7,), levels[0] ** 2 / levels[1], dtype=torch.float64))
    assert_close(lowest, 2 * at[:, 0] - at[:, 1], **EXACT)
    left = (1 - levels[-1]) ** 2 / (1 - levels[-2])
    highest = kind.quantile(params, torch.full((7,), 1 - left, dtype=torch.float64))
    assert_close(highest, 2 * at[:, -1] - at[:, -2], rtol=1e-9, atol=1e-9)


def test_a_gaussian_quantile_is_that_of_pytorch():
    params, level = params_of(Gaussian(), 50), torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    expected = theirs(Gaussian(), params).icdf(level)
    assert_close(Gaussian().quantile(params, level), expected, **EXACT)


def test_the_cumulative_of_student_by_closed_forms():
    """Closed forms exist for 2 and 4 degrees of freedom; with very many it is a normal distribution."""
    t = torch.linspace(0, 12, 60, dtype=torch.float64)
    two = 0.5 + t / (2 * (2 + t.square()).sqrt())
    u = t / (4 + t.square()).sqrt()
    four = 0.5 + 0.75 * (u - u**3 / 3)
    assert_close(t_cumulative(t, torch.full_like(t, 2)), two, rtol=1e-12, atol=0)
    assert_close(t_cumulative(t, torch.full_like(t, 4)), four, rtol=1e-12, atol=0)
    near = t[t < 5]
    normal = torch.special.ndtr(near)
    assert_close(t_cumulative(near, torch.full_like(near, 1e6)), normal, rtol=2e-6, atol=0)  # about 1 / df


def test_a_quantile_of_student_is_where_its_cumulative_is():
    """Both sides of the middle, up to one in ten thousand; 2.228 is in every table (10 degrees, 97.5 %)."""
    kind, params = StudentT(), params_of(StudentT(), 40, 30)
    level = torch.linspace(1e-4, 1 - 1e-4, 40, dtype=torch.float64)[:, None].expand(40, 30)
    loc, spread, freedom = params.unbind(-1)
    z = (kind.quantile(params, level) - loc) / (functional.softplus(spread) + SHARPEST)
    below = t_cumulative(z.abs(), 2 + functional.softplus(freedom) + SHARPEST)
    assert_close(torch.where(z < 0, 1 - below, below), level, rtol=1e-9, atol=1e-12)
    ten = math.log(math.expm1(8 - SHARPEST))
    one = math.log(math.expm1(1 - SHARPEST))
    known = torch.tensor([0.0, one, ten], dtype=torch.float64)
    assert kind.quantile(known, torch.tensor(0.975)) == pytest.approx(2.228139, abs=1e-6)


def test_a_quantile_far_out_is_finite():
    """A level of float64 keeps its digits, whatever the dtype of the parameters."""
    for level in (1e-9, 1 - 1e-9):
        level = torch.tensor([level], dtype=torch.float64)
        found = StudentT().quantile(torch.zeros(1, 3), level)
        assert_close(found, StudentT().quantile(torch.zeros(1, 3).double(), level).float(), rtol=1e-4, atol=0)


def test_the_quantile_function_of_quantiles():
    """It passes through each, rises everywhere, and has exponential tails: equal factors, equal steps."""
    kind, params = (
        Quantiles(levels=(0.1, 0.3, 0.5, 0.8)),
        params_of(Quantiles(levels=(0.1, 0.3, 0.5, 0.8)), 6),
    )
    at = kind.quantiles(params)
    for i, level in enumerate(kind.levels):
        assert_close(kind.quantile(params, torch.full((6,), level, dtype=torch.float64)), at[:, i])
    grid = torch.linspace(1e-6, 1 - 1e-6, 500, dtype=torch.float64)
    assert bool((kind.quantile(params[:, None].expand(6, 500, 4), grid.expand(6, 500)).diff() > 0).all())
    for levels in ([1e-3, 1e-4, 1e-5], [1 - 1e-3, 1 - 1e-4, 1 - 1e-5]):
        a, b, c = (kind.quantile(params, torch.full((6,), x, dtype=torch.float64)) for x in levels)
        assert_close(b - a, c - b)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{type(kind).__name__}-{kind.size}")
def test_samples_fall_below_a_quantile_as_often_as_it_says(kind):
    params = params_of(kind, 3)[:, None].expand(3, 40_000, kind.size)
    generator = torch.Generator().manual_seed(0)
    sampled = kind.sample(params, generator)
    again = kind.sample(params, torch.Generator().manual_seed(0))
    assert torch.equal(sampled, again)
    for level in (0.01, 0.2, 0.5, 0.9, 0.99):
        at = kind.quantile(params[:, 0], torch.full((3,), level, dtype=torch.float64))
        share = (sampled < at[:, None]).double().mean(1)
        # Four standard deviations of a share of 40,000.
        assert (share - level).abs().max() < 4 * math.sqrt(level * (1 - level) / 40_000)
    assert_close(kind.median(params[:, 0]), kind.quantile(params[:, 0], torch.full((3,), 0.5).double()))


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_samples_are_finite_whatever_number_is_drawn(number, monkeypatch):
    """The smallest and the largest number that float64 can draw; in float32 the latter would be 1."""
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.full(size, number, dtype=torch.float64))
    for kind in KINDS:
        assert kind.sample(params_of(kind, 5).float()).isfinite().all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{type(kind).__name__}-{kind.size}")
def test_targets_are_checked(kind):
    params = params_of(kind, 2)
    with pytest.raises(ValueError, match="one row a target"):
        kind.loss(params[:, :-1], torch.zeros(2))
    with pytest.raises(ValueError, match=r"targets must be of a floating type, got torch\.int64"):
        kind.loss(params, torch.tensor([0, 1]))


@pytest.mark.parametrize("levels", [(0.5,), (0.5, 0.1), (0.0, 0.5), (0.5, 1.0), (0.5, 0.5)])
def test_levels_are_checked(levels):
    with pytest.raises(ValueError, match="levels must be two or more, rising, above 0 and below 1"):
        Quantiles(levels=levels)

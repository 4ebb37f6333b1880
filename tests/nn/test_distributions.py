"""Distributions over symbols: each compared with its definition, and numbers close to 0."""

import pytest
import torch
from torch.testing import assert_close

from lintra.nn import LogisticMixture, Logits
from lintra.nn.distributions import quantile
from lintra.testing.laws import EXACT


@pytest.mark.parametrize("vocabulary", [2, 3, 17, 256])
def test_levels_of_a_mixture_sum_to_one(vocabulary):
    """In float64, for any parameters, including the edges and the narrowest scales."""
    distribution = LogisticMixture(components=4).build(vocabulary)
    generator = torch.Generator().manual_seed(0)
    for spread in (0.1, 1.0, 10.0, 100.0):
        params = spread * torch.randn(50, distribution.size, generator=generator, dtype=torch.float64)
        total = distribution.log_probs(params).exp().sum(-1)
        assert_close(total, torch.ones_like(total), rtol=1e-12, atol=1e-12)


def test_a_mixture_is_the_difference_of_its_cumulatives():
    """Compared with the textbook formula where it is numerically safe: values and gradients."""
    distribution = LogisticMixture(components=3).build(11)
    params = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    logits, mean, log_scale = params.chunk(3, -1)
    edges = (torch.arange(10, dtype=torch.float64) + 0.5) / 5 - 1
    below = torch.sigmoid((edges - mean[..., None]) / log_scale.exp()[..., None])
    below = torch.cat((torch.zeros_like(below[..., :1]), below, torch.ones_like(below[..., :1])), -1)
    expected = (logits.softmax(-1)[..., None] * below.diff(dim=-1)).sum(-2).log()
    found = distribution.log_probs(params)
    assert_close(found, expected, **EXACT)
    weights = torch.randn(7, 11, dtype=torch.float64)
    (a,) = torch.autograd.grad((found * weights).sum(), params, retain_graph=True)
    (b,) = torch.autograd.grad((expected * weights).sum(), params)
    assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_a_mixture_stays_finite_far_from_its_mean():
    """In float32 at the edges, with finite gradients."""
    distribution = LogisticMixture(components=1).build(256)
    params = torch.tensor([[0.0, 1.0, -9.0], [0.0, -50.0, -7.0], [0.0, 3.0, 40.0]], requires_grad=True)
    for target in (0, 1, 128, 254, 255):
        log_prob = distribution.log_prob(params, torch.full((3,), target))
        (gradient,) = torch.autograd.grad(log_prob.sum(), params)
        assert log_prob.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", [Logits(), LogisticMixture(components=2)])
def test_targets_are_checked(kind):
    distribution = kind.build(9)
    params = torch.zeros(2, distribution.size)
    for target in (torch.tensor([0, 9]), torch.tensor([-100, 3])):
        with pytest.raises(ValueError, match="targets must be between 0 and 8, got"):
            distribution.log_prob(params, target)
    with pytest.raises(ValueError, match="targets must be int64, int32 or uint8"):
        distribution.log_prob(params, torch.zeros(2))
    with pytest.raises(ValueError, match="one row a target"):
        distribution.log_prob(params[:, :-1], torch.tensor([0, 1]))


@pytest.mark.parametrize("kind", [Logits(), LogisticMixture(components=2)])
def test_a_target_is_a_level_whatever_its_type_and_shape(kind):
    """There are more levels than 8 bits can count: the largest number of 8 bits is not the last level."""
    distribution = kind.build(512)
    params = torch.randn(3, distribution.size, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 200, 255])
    expected = distribution.log_probs(params).gather(1, target[:, None])[:, 0]
    for dtype in (torch.uint8, torch.int32, torch.int64):
        assert_close(distribution.log_prob(params, target.to(dtype)), expected)
    assert_close(distribution.log_prob(params[1], target[1]), expected[1])


@pytest.mark.parametrize("kind", [Logits(), LogisticMixture(components=1), LogisticMixture(components=4)])
@pytest.mark.parametrize("vocabulary", [2, 3, 5, 17, 256, 257])
def test_a_quantile_is_that_of_the_probabilities(kind, vocabulary):
    """In float64, with the narrowest scales and means beyond both ends, and any leading axes."""
    distribution = kind.build(vocabulary)
    generator = torch.Generator().manual_seed(0)
    for spread in (0.1, 1.0, 10.0):
        params = spread * torch.randn(40, 50, distribution.size, generator=generator, dtype=torch.float64)
        level = torch.rand(40, 50, generator=generator, dtype=torch.float64)
        expected = quantile(distribution.log_probs(params).softmax(-1), level)
        found = distribution.quantile(params, level)
        assert torch.equal(found, expected)


def test_a_quantile_keeps_its_share():
    """Evenly spaced numbers in [0, 1) draw each symbol as often as it is probable, in float32."""
    distribution = LogisticMixture(components=3).build(11)
    params = torch.tensor([1.0, 0.0, -1.0, -0.9, 0.1, 2.0, -2.0, -1.0, 0.5])
    level = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    drawn = distribution.quantile(params.expand(100_000, -1), level).bincount(minlength=11)
    assert (drawn / 100_000 - distribution.log_probs(params).exp()).abs().max() < 2e-5


def test_a_symbol_of_no_probability_is_not_drawn():
    """Not even at level 0, which uniform numbers reach."""
    distribution = LogisticMixture(components=1).build(256)
    params = torch.tensor([[0.0, 1.0, -7.0]], dtype=torch.float64)
    probs = distribution.log_probs(params).exp()
    assert probs[0, 0] == 0
    assert probs[0, distribution.quantile(params, torch.zeros(1))] > 0


@pytest.mark.parametrize("kind", [Logits(), LogisticMixture(components=2)])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_drawn_from(kind, number):
    distribution = kind.build(9)
    for place in range(distribution.size):
        params = torch.zeros(2, distribution.size)
        params[1, place] = number
        with pytest.raises(ValueError, match="probabilities to draw from are no numbers"):
            distribution.quantile(params, torch.tensor([0.5, 0.5]))


def test_a_quantile_is_mapped():
    params, level = torch.randn(3, 5), torch.rand(3)
    quantile = Logits().build(5).quantile
    assert torch.equal(torch.vmap(quantile)(params, level), quantile(params, level))

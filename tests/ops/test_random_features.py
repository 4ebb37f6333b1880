"""Random features: the rows they draw, and that their products estimate the kernels in their names."""

import math

import pytest
import torch
from torch.testing import assert_close

from lintra.ops.random_features import (
    arc_cosine,
    independent_gaussian,
    orthogonal_gaussian,
    project,
    softmax_offset,
    softmax_projection,
    trigonometric,
)

DRAWS = {"independent": independent_gaussian, "orthogonal": orthogonal_gaussian}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def two_vectors(distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two vectors of dimension 4 and length 1, [1 1 1 4]."""
    q = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    k = torch.tensor([math.cos(distance), 0.0, math.sin(distance), 0.0], dtype=torch.float64)
    return q[None, None, None], k[None, None, None]


def estimates(kernel: str, q, k, rows: int = 4, draws: int = 4000, draw=independent_gaussian):
    """An estimate [draws] of kernel(q, k) from each draw of `rows` rows: blocks of 4 are independent."""
    weight = draw(draws * rows, 4, "chi", generator(1)).unflatten(0, (draws, rows))  # one head per draw
    q, k = q.expand(-1, -1, draws, -1), k.expand(-1, -1, draws, -1)
    if kernel in ("positive", "hyperbolic"):
        features = []
        for x in (q, k):
            projection = softmax_projection(x, weight, kernel == "hyperbolic")
            features.append((projection - softmax_offset(x)[..., None]).exp())
        return (features[0] * features[1]).mean(-1).flatten()
    function = {"trigonometric": trigonometric, "arc_cosine": arc_cosine}[kernel]
    return (function(q, weight) * function(k, weight)).sum(-1).flatten() / rows


def kernel_of(kernel: str, q, k) -> float:
    product, square = float((q * k).sum()), float((q - k).square().sum())
    if kernel == "trigonometric":
        return math.exp(-square / 2)
    if kernel == "arc_cosine":
        angle = math.acos(product)
        return (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / math.tau
    return math.exp(product / 2)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("kernel", ["positive", "hyperbolic", "trigonometric", "arc_cosine"])
@pytest.mark.parametrize("distance", [0.0, 0.7, 2.2])
def test_estimates_are_unbiased(kernel, draw, distance):
    q, k = two_vectors(distance)
    found = estimates(kernel, q, k, draw=draw)
    error = found.std() / len(found) ** 0.5
    assert abs(found.mean() - kernel_of(kernel, q, k)) < 3 * error + 1e-12


def test_variances_are_those_of_the_paper():
    """For independent rows, with x and y the scaled q and k; hyperbolic features have at most half of it."""
    q, k = two_vectors(0.7)
    both = float((q + k).square().sum()) / 2
    expected = math.exp(both) * kernel_of("positive", q, k) ** 2 * (1 - math.exp(-both)) / 4
    positive = estimates("positive", q, k, draws=20_000)
    hyperbolic = estimates("hyperbolic", q, k, draws=20_000)
    assert_close(float(positive.var()), expected, rtol=0.15, atol=0)  # a variance of 20,000 skewed draws
    assert_close(float(hyperbolic.var()), expected * (1 - math.exp(-both)) / 2, rtol=0.15, atol=0)


@pytest.mark.parametrize("kernel", ["positive", "trigonometric"])
def test_orthogonal_rows_vary_less(kernel):
    q, k = two_vectors(0.7)
    independent = estimates(kernel, q, k).var()
    assert estimates(kernel, q, k, draw=orthogonal_gaussian).var() < 0.9 * independent


def test_the_error_falls_as_the_root_of_the_rows():
    q, k = two_vectors(0.7)
    spread = [estimates("positive", q, k, rows=rows, draws=1000).std() for rows in (8, 128)]
    slope = math.log(spread[1] / spread[0]) / math.log(128 / 8)
    assert abs(slope + 0.5) < 0.05  # a standard deviation of 1,000 draws is right to about 5 %


def test_rows_of_a_block_are_orthogonal():
    weight = orthogonal_gaussian(14, 6, "chi", generator())
    for block in weight.split(6):
        unit = block / block.norm(dim=1, keepdim=True)
        assert_close(unit @ unit.T, torch.eye(len(block), dtype=torch.float64), rtol=0, atol=1e-12)
    assert weight.shape == (14, 6)
    assert (weight[:6] @ weight[6:12].T).abs().max() > 0.1


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_lengths_of_rows(draw):
    constant = draw(20, 6, "constant", generator()).norm(dim=1)
    assert_close(constant, torch.full_like(constant, 6**0.5), rtol=1e-12, atol=0)
    squares = draw(6000, 6, "chi", generator()).square().sum(1)
    assert abs(squares.mean() - 6) < 3 * (12 / 6000) ** 0.5  # chi^2 of 6 degrees has variance 12
    assert abs(squares.var() - 12) < 1.5


def test_lengths_and_directions_are_independent():
    """For all rows of a block, and their squares: drawn together, some would be correlated by 0.4."""
    blocks = orthogonal_gaussian(4 * 4000, 4, "chi", generator()).unflatten(0, (4000, 4))
    length = blocks.norm(dim=2)
    direction = (blocks / length[..., None]).flatten(1)
    drawn = torch.cat((length, length.square(), direction, direction.square()), 1).T
    found = drawn.corrcoef()
    limit = 4.5 / 4000**0.5  # standard deviations of a correlation of 4,000 independent pairs
    assert found[:8, 8:].abs().max() < limit
    assert (found[:4, :4] - torch.eye(4)).abs().max() < limit


def test_defect_05_directions_lean_to_no_side():
    """Every entry of the first row has mean 0; with the signs of LAPACK the first is never positive."""
    first = orthogonal_gaussian(16_000, 8, "constant", generator())[::8]
    assert (first.mean(0).abs() < 3.5 / 2000**0.5).all()  # entries have variance 1
    assert 0.45 < (first[:, 0] > 0).double().mean() < 0.55


def test_a_draw_is_of_its_generator_alone():
    before = torch.get_rng_state()
    one, same, other = (orthogonal_gaussian(9, 4, "chi", generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_heads_project_by_rows_of_their_own():
    x = torch.randn(2, 3, 6, 4, generator=generator())
    weight = torch.randn(3, 5, 4, generator=generator(1))
    expected = torch.stack([x[:, :, head] @ weight[head // 2].T for head in range(6)], 2)
    assert_close(project(x, weight), expected)
    shared = torch.stack([x[:, :, head] @ weight[0].T for head in range(6)], 2)
    assert_close(project(x, weight[:1]), shared)

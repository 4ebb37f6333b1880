"""Segments of any length, and the inverse that needs only products."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.ops.landmarks import Segments, exact_inverse, iterative_inverse, segment_means
from lintra.testing.laws import EXACT, gradients


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def attention_matrix(*shape, seed=0):
    return draw(*shape, seed=seed).softmax(-1)


@given(mask=st.lists(st.booleans(), min_size=1, max_size=30), count=st.integers(1, 12))
def test_segments_are_even_and_none_is_empty(mask, count):
    mask = torch.tensor([mask])
    segments, n = Segments.of(mask, count), int(mask.sum())
    index = segments.index[mask]
    sizes = torch.bincount(index, minlength=segments.used.shape[1])[: min(count, n)]
    assert segments.used.sum() == min(count, n)
    assert (index.diff() >= 0).all()
    assert index.tolist() == [p * min(count, n) // n for p in range(n)]
    assert n == 0 or 0 < sizes.min() >= sizes.max() - 1
    assert segments.index.min() >= 0  # padded places too, so that they are valid indices


@given(mask=st.lists(st.booleans(), min_size=1, max_size=30), count=st.integers(1, 12))
def test_means_are_of_the_real_tokens_of_a_segment(mask, count):
    mask = torch.tensor([mask, [True] * len(mask)])
    x = draw(2, mask.shape[1], 3, 2) * mask[..., None, None]
    means = segment_means(x, count, Segments.of(mask, count))
    assert means.shape == (2, min(count, mask.shape[1]), 3, 2)
    for i in range(2):
        real, n = x[i, mask[i]], int(mask[i].sum())
        for j in range(means.shape[1]):
            members = [real[p] for p in range(n) if p * min(count, n) // n == j]
            expected = torch.stack(members).mean(0) if members else torch.zeros(3, 2, dtype=x.dtype)
            assert_close(means[i, j], expected, **EXACT)


@pytest.mark.parametrize("time", [1, 4, 11, 12, 24, 25])
def test_all_real_is_no_mask(time):
    x = draw(2, time, 3, 2).requires_grad_()
    with_mask = segment_means(x, 4, Segments.of(torch.ones(2, time, dtype=torch.bool), 4))
    without = segment_means(x, 4)
    assert_close(without, with_mask, **EXACT)
    assert_close(gradients(without, [x]), gradients(with_mask, [x]), **EXACT)
    if time == 24:
        assert_close(without, torch.stack([part.mean(1) for part in x.split(6, 1)], 1), **EXACT)


def test_means_of_sixteen_bits_are_summed_in_float32():
    x = torch.full((1, 4096, 1, 1), 1.0, dtype=torch.bfloat16)
    for segments in (None, Segments.of(torch.ones(1, 4096, dtype=torch.bool), 1)):
        means = segment_means(x, 1, segments)
        assert means.dtype == torch.float32
        assert means.item() == 1.0  # a sum of ones in bfloat16 stops at 256


def test_each_token_gets_what_its_segment_has():
    mask = torch.tensor([[True, False, True, True, True, False], [False, True, False, False, True, True]])
    segments = Segments.of(mask, 2)
    y = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    assert segments.spread(y)[..., 0][mask].tolist() == [1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("shape", [(8, 8), (3, 5), (5, 3), (1, 4), (4, 1)])
def test_the_iteration_ends_at_the_pseudo_inverse(shape):
    """In float64, 30 iterations are more than enough for the condition of these matrices."""
    a = attention_matrix(2, 3, *shape)
    assert_close(iterative_inverse(a, 30), torch.linalg.pinv(a), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("time", [64, 128, 1024, 4096])
def test_six_iterations_leave_some_percent(time):
    """For the attention among 64 unstructured landmarks, which are means of one token or of many. Ten
    iterations leave less than one percent, still far from the inverse."""
    q, k = (segment_means(draw(1, time, 64, seed=seed), 64) for seed in (0, 1))
    a = (q @ k.mT / 8).softmax(-1)
    z = {n: iterative_inverse(a, n) for n in (6, 10, 25)}
    errors = {n: float((a @ z[n] @ a - a).norm() / a.norm()) for n in z}
    assert 0.01 < errors[6] < 0.1
    assert errors[10] < 0.01
    assert errors[25] < 1e-6
    assert (a @ z[6] - torch.eye(64)).norm() > 0.3 * 64**0.5


def test_an_iteration_does_what_is_said_of_eigenvalues():
    """1 - r becomes 1 - r^3 (3 + r) / 4; where 1 - r is small, that is 13/4 of it."""
    a = torch.diag(torch.tensor([1.0, 0.5, 1e-6], dtype=torch.float64))
    r = 1 - torch.diagonal(a @ iterative_inverse(a, 0))
    after = 1 - torch.diagonal(a @ iterative_inverse(a, 1))
    assert_close(after, r**3 * (3 + r) / 4, **EXACT)
    assert_close((1 - after[2]) / (1 - r[2]), torch.tensor(3.25, dtype=torch.float64), rtol=1e-3, atol=0)


def test_where_iterations_begin():
    """By each matrix's own norm, or by the largest among a sample's heads, which is that of one head."""
    a = attention_matrix(2, 3, 6, 6)
    alone, together = iterative_inverse(a, 2), iterative_inverse(a, 2, alone=False)
    heads = a.sum(-2).amax(-1).argmax(1)
    for sample, head in enumerate(heads):
        assert_close(together[sample, head], alone[sample, head], **EXACT)
    assert (alone - together).abs().max() > 1e-3
    assert_close(together[:1], iterative_inverse(a[:1], 2, alone=False), **EXACT)
    assert_close(iterative_inverse(a, 40, alone=False), torch.linalg.pinv(a), rtol=1e-8, atol=1e-8)


def test_zero_rows_and_columns_stay_apart():
    """For both methods, the inverse of a padded matrix is the padded inverse: values and gradients."""
    small = attention_matrix(2, 3, 4).requires_grad_()
    for inverse in (lambda a: iterative_inverse(a, 6), exact_inverse):
        z = inverse(torch.nn.functional.pad(small, (0, 3, 0, 2)))
        assert_close(z[:, :4, :3], inverse(small), **EXACT)
        assert (z[:, 4:].abs() < 1e-12).all()
        assert (z[:, :, 3:].abs() < 1e-12).all()
        expected = gradients(torch.nn.functional.pad(inverse(small), (0, 2, 0, 3)), [small])
        assert_close(gradients(z, [small]), expected, **EXACT)
        assert (inverse(torch.zeros(1, 2, 2)) == 0).all()


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 2), (torch.float64, 4)])
def test_small_singular_values_are_cut_off(dtype, kept):
    """The inverse is that of the remaining part; for the gradient, the rest is 0."""
    u, _, v = torch.linalg.svd(draw(5, 5))
    sizes = torch.tensor([2.0, 4e-3, 1e-3, 1e-6, 1e-9], dtype=torch.float64)
    a = (u @ sizes.diag() @ v).to(dtype)
    inverted = torch.where(torch.arange(5) < kept, 1 / sizes, 0.0)
    # An error in the smallest value that is kept is multiplied by its inverse, twice.
    error = torch.finfo(dtype).eps / sizes[kept - 1] ** 2
    expected = v.mT @ inverted.diag() @ u.mT
    assert (exact_inverse(a[None])[0] - expected).abs().max() < 4 * error
    (slope,) = gradients(exact_inverse(a.requires_grad_()), [a])
    assert slope.isfinite().all()


@pytest.mark.parametrize("inverse", [lambda a: iterative_inverse(a, 4), exact_inverse])
def test_gradients_are_those_of_finite_differences(inverse):
    a = (torch.eye(3, dtype=torch.float64) + attention_matrix(2, 3, 3)).requires_grad_()
    assert torch.autograd.gradcheck(inverse, a)


@pytest.mark.parametrize("inverse", [lambda a: iterative_inverse(a, 6), exact_inverse])
def test_defect_03_a_matrix_does_not_see_the_others(inverse):
    """Norms over the whole batch would scale every first guess by the largest matrix in it."""
    a = attention_matrix(4, 5, 5)
    alone = inverse(a[:1])
    for neighbour in (1e6, 1e-6, torch.nan, torch.inf):
        batch = torch.cat((a[:1], a[1:] * neighbour))
        assert_close(inverse(batch)[:1], alone, **EXACT)
        if neighbour != neighbour:
            assert inverse(batch)[1:].isnan().all()


def test_equal_rows_do_not_overflow():
    """A matrix of rank one, in float32, with more iterations than necessary."""
    a = torch.full((1, 64, 64), 1 / 64).requires_grad_()
    z = iterative_inverse(a, 30)
    assert_close(a @ z @ a, a, rtol=1e-4, atol=1e-6)  # float32
    assert gradients(z, [a])[0].isfinite().all()

"""Running sums of exp(k) v equal their definition at any length, whatever the size of the keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.ops.running import decayed_sum, no_sums, running_max, running_sums, total_sums
from lintra.testing.laws import EXACT, gradients


def draw(time, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, time, *shape, generator=generator, dtype=torch.float64).requires_grad_()


@given(time=st.sampled_from([0, 1, 2, 15, 16, 17, 33, 255, 256, 257, 300]))
def test_a_decayed_sum_is_its_recurrence(time):
    added = draw(time, 3, 2)
    decay = draw(time, 1, 2, seed=1).detach().sigmoid()
    y, ys = added.new_zeros(2, 3, 2), [added[:, :0]]
    for i in range(time):
        y = decay[:, i] * y + added[:, i]
        ys.append(y[:, None])
    expected, found = torch.cat(ys, 1), decayed_sum(added, decay)
    assert_close(found, expected, **EXACT)
    assert_close(gradients(found, [added]), gradients(expected, [added]), **EXACT)


@pytest.mark.parametrize("time", [1, 16, 40])
def test_running_sums_are_totals_of_beginnings(time):
    k, v = draw(time, 2, 3), draw(time, 2, 3, seed=1)
    mask = torch.rand(2, time, generator=torch.Generator().manual_seed(2)) > 0.4
    running = running_sums(k, v, mask, no_sums(2, 2, 3, dtype=torch.float64))
    for t in range(time):
        here = total_sums(k[:, : t + 1], v[:, : t + 1], mask[:, : t + 1])
        assert_close([x[:, t] for x in running], list(here), **EXACT)
    weight = k.exp() * mask[..., None, None]
    expected = (weight * v).cumsum(1) / weight.cumsum(1).clamp(min=1e-300)
    assert_close(running.mean(), expected, **EXACT)
    assert_close(gradients(running.mean(), [k, v]), gradients(expected, [k, v]), **EXACT)


def test_keys_that_rise_and_fall_by_hundreds():
    """exp(k) and exp(-highest) overflow in float32; the mean follows the largest key so far."""
    k = torch.tensor([0.0, 300.0, -300.0, 299.0, 900.0, 0.0])[None, :, None, None]
    v = torch.arange(6.0)[None, :, None, None]
    mean = running_sums(k, v, None, no_sums(1, 1, 1, dtype=torch.float32)).mean().flatten()
    e = torch.e
    expected = torch.tensor([0.0, 1.0, 1.0, (e + 3) / (e + 1), 4.0, 4.0])
    assert_close(mean, expected)


def test_no_token_gives_zero_without_gradient():
    k, v = draw(4, 1, 2), draw(4, 1, 2, seed=1)
    mask = torch.tensor([[False] * 4, [False, False, True, False]])
    for sums in (total_sums(k, v, mask), running_sums(k, v, mask, no_sums(2, 1, 2, dtype=torch.float64))):
        mean = sums.mean()
        assert (mean[0] == 0).all()
        for g in gradients(mean, [k, v]):
            assert g.isfinite().all()
            assert (g[~mask] == 0).all()
    assert (total_sums(k[:, :0], v[:, :0], None).mean() == 0).all()


def test_65_536_equal_keys_still_count():
    k = torch.zeros(1, 65_536, 1, 1)
    sums = running_sums(k, torch.ones_like(k), None, no_sums(1, 1, 1, dtype=torch.float32))
    assert sums.denominator[0, -1].item() == 65_536


@given(time=st.sampled_from([0, 1, 2, 15, 16, 17, 33]))
def test_a_running_max_is_its_definition(time):
    x = draw(time, 3).detach()
    highest = [x[:, : i + 1].amax(1, keepdim=True) for i in range(time)]
    assert torch.equal(running_max(x), torch.cat([x[:, :0], *highest], 1))


def test_an_exported_running_max_is_of_any_length():
    class Largest(torch.nn.Module):
        def forward(self, x):
            return running_max(x)

    shapes = ({1: torch.export.Dim("time", min=17)},)
    options = {"dynamic_shapes": shapes, "prefer_deferred_runtime_asserts_over_guards": True}
    graph = torch.export.export(Largest(), (draw(20, 3).detach(),), **options).module()
    for time in (
        17,
        33,
        100,
    ):  # whole blocks: tests/export/test_onnx.py, where what is assumed is not asserted
        x = draw(time, 3).detach()
        assert torch.equal(graph(x), running_max(x))

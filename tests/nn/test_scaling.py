"""Standardisation by the past: compared with a loop, in pieces, and with nothing to divide by."""

import math

import pytest
import torch
from torch.testing import assert_close

from lintra.nn.scaling import FLATTEST, RunningScale
from lintra.testing.laws import EXACT


def walk(batch, rows, offset=0.0):
    generator = torch.Generator().manual_seed(0)
    return offset + torch.randn(batch, rows, generator=generator, dtype=torch.float64).cumsum(1)


def standardised(values, rows=10):
    scaling = RunningScale(rows)
    location, scale, _ = scaling(values, scaling.start(len(values)))
    return location, scale


def test_means_and_deviations_are_those_of_a_loop():
    values, rows = walk(2, 50), 7
    location, scale = standardised(values, rows)
    for series in range(2):
        for end in range(50):
            past = values[series, : end + 1].tolist()
            weights = [math.exp(-(end - i) / rows) for i in range(end + 1)]
            mean = sum(w * x for w, x in zip(weights, past, strict=True)) / sum(weights)
            square = sum(w * (x - mean) ** 2 for w, x in zip(weights, past, strict=True)) / sum(weights)
            size = sum(w * abs(x) for w, x in zip(weights, past, strict=True)) / sum(weights)
            assert location[series, end].item() == pytest.approx(mean)
            # The deviation of a single value is rounding noise.
            expected = max(math.sqrt(square), FLATTEST * size)
            assert scale[series, end].item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("cuts", [[1] * 40, [13, 27], [0, 40, 0]])
def test_pieces_are_the_whole(cuts):
    scaling, values = RunningScale(10), walk(3, 40)
    state, parts = scaling.start(3), []
    for piece in values.split(cuts, 1):
        *found, state = scaling(piece, state)
        parts.append(found)
    for i, whole in enumerate(standardised(values)):
        assert_close(torch.cat([part[i] for part in parts], 1), whole, **EXACT)


def test_nothing_of_the_future_is_in_it():
    values = walk(2, 30)
    changed = torch.cat((values[:, :20], torch.full((2, 10), 1e9)), 1)
    for a, b in zip(standardised(values), standardised(changed), strict=True):
        assert torch.equal(a[:, :20], b[:, :20])


def test_an_offset_costs_no_digits():
    location, scale = standardised(walk(2, 60))
    moved_location, moved_scale = standardised(walk(2, 60, offset=2.0**9))
    assert_close(moved_location - 2.0**9, location, rtol=1e-9, atol=1e-9)
    above = scale > FLATTEST * 2**10
    assert above[:, 10:].all()
    assert_close(moved_scale[above], scale[above], rtol=1e-9, atol=1e-9)


def test_a_constant_series_has_a_scale():
    location, scale = standardised(torch.tensor([[5.0] * 9, [-5.0] * 9, [0.0] * 9]))
    assert_close(location[:, -1], torch.tensor([5.0, -5.0, 0.0], dtype=torch.float64))
    assert_close(scale[:, -1], torch.tensor([5 * FLATTEST, 5 * FLATTEST, 1.0], dtype=torch.float64))
    scaling = RunningScale(10)
    scaling.typical.fill_(40.0)
    assert scaling(torch.zeros(1, 3), scaling.start(1))[1].tolist() == [[40.0] * 3]

"""Exchanges between ranks, compared with one process that has all pieces: states, gradients, bytes."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from lintra.ops.ranks import Ranks, compose

SIZES = {"factor": (2, 3), "feature": (2, 3, 4), "matrix": (2, 3, 4, 4)}


def pieces(ranks, sizes):
    """The sums that pieces add [b g f e], their transitions, and weights of a loss."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.rand(ranks, *shape, dtype=torch.float64, generator=generator)

    return random(2, 3, 4, 5), random(*sizes), random(2, 3, 4, 5)


def scan_on_rank(sizes):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    ranks = Ranks(mesh.get_group())
    added, transition, weight = (x[ranks.rank] for x in pieces(ranks.size, sizes))
    added.requires_grad_(True)
    between = 0 < ranks.rank < ranks.size - 1
    given = transition.requires_grad_(True) if between else None
    before = ranks.scan(added, given, sizes)
    sent = ranks.bytes_sent
    (weight * before).sum().backward()
    return before.detach(), added.grad, transition.grad, sent, ranks.bytes_sent


def check_scan(ranks, sizes):
    """The states are those of a loop over all pieces, and the gradients those of autograd."""
    added, transition, weight = (x.requires_grad_(True) for x in pieces(ranks.count, sizes))
    states = [torch.zeros_like(added[0])]
    for i in range(ranks.count - 1):
        states.append(compose(transition[i], states[-1]) + added[i])
    before = torch.stack(states)
    (weight * before).sum().backward()
    found = ranks.call(scan_on_rank, sizes)
    for i, (state, dadded, dtransition, _, _) in enumerate(found):
        assert_close(state, before[i].detach(), rtol=1e-12, atol=1e-12)
        assert_close(dadded, added.grad[i], rtol=1e-12, atol=1e-12)
        if dtransition is not None:
            assert_close(dtransition, transition.grad[i], rtol=1e-12, atol=1e-12)
    return [(forward, both) for *_, forward, both in found]


@pytest.mark.parametrize("kind", SIZES)
def test_a_scan_over_two_ranks_sends_one_state_and_no_transition(two_ranks, kind):
    state = 8 * 2 * 3 * 4 * 5
    assert check_scan(two_ranks, SIZES[kind]) == [(state, state), (0, state)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
def test_a_scan_over_four_ranks_sends_two_states_and_a_transition_from_between(four_ranks, kind):
    state, transition = 8 * 2 * 3 * 4 * 5, 8 * torch.Size(SIZES[kind]).numel()
    forward = [2 * state, 2 * state + transition, state + transition, 0]
    back = forward[::-1]
    assert check_scan(four_ranks, SIZES[kind]) == [(a, a + b) for a, b in zip(forward, back, strict=True)]


def halo_on_rank(hops):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    ranks = Ranks(mesh.get_group())
    x = torch.full((1, 2), ranks.rank + 1.0, requires_grad=True)
    found = ranks.halo([x, torch.full((1,), ranks.rank)], hops)
    sum((10.0**ranks.rank * y).sum() for y, _ in found).backward()
    return [(y[0, 0].item(), n.item()) for y, n in found], x.grad[0, 0].item()


def test_a_halo_brings_the_places_of_the_rank_before(two_ranks):
    assert two_ranks.call(halo_on_rank, 1) == [([(0.0, 0)], 10.0), ([(1.0, 0)], 0.0)]


@pytest.mark.slow
def test_a_halo_of_several_ranks_brings_the_nearest_first(four_ranks):
    found = four_ranks.call(halo_on_rank, 2)
    assert found[3] == ([(3.0, 2), (2.0, 1)], 0.0)
    assert [gradient for _, gradient in found] == [110.0, 1100.0, 1000.0, 0.0]

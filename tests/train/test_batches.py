"""The batch of a step: every sample once an epoch, from any step on, in any number of processes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintra.train._batches import StepSampler, seed_of


@given(samples=st.integers(1, 40), batch=st.integers(1, 24), epochs=st.integers(1, 3), seed=st.integers(0, 9))
def test_each_epoch_is_a_permutation(samples, batch, epochs, seed):
    sampler = StepSampler(samples, batch, seed=seed)
    line = itertools.chain.from_iterable(sampler)
    for _ in range(epochs):
        assert sorted(itertools.islice(line, samples)) == list(range(samples))


@given(start=st.integers(0, 50), samples=st.integers(1, 40), batch=st.integers(1, 24))
def test_starting_late_is_skipping(start, samples, batch):
    whole = itertools.islice(StepSampler(samples, batch, seed=3), start, start + 5)
    assert list(itertools.islice(StepSampler(samples, batch, seed=3, start=start), 5)) == list(whole)


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_processes_share_the_batch(world):
    whole = StepSampler(10, 6, seed=0)
    shares = [StepSampler(10, 6, seed=0, rank=rank, world=world) for rank in range(world)]
    for step in range(7):
        assert [i for share in shares for i in share.of_step(step)] == whole.of_step(step)


def test_epochs_and_seeds_differ():
    orders = [StepSampler(100, 100, seed=seed).of_step(epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert len({seed_of(a, b) for a in range(20) for b in range(20)}) == 400


def test_refusals():
    with pytest.raises(ValueError, match="at least 1 sample"):
        StepSampler(0, 4, seed=0)
    with pytest.raises(ValueError, match="multiple of the 3 devices, got 4"):
        StepSampler(10, 4, seed=0, world=3)

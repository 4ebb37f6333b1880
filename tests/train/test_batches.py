"""The batch of a step: every sample once per epoch, from any step on, in any number of processes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lintra.train import batches
from lintra.train.batches import LengthSampler, Permutation, StepSampler, parts, seed_of, share


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


some_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=40)


@given(lengths=some_lengths, tokens=st.integers(1, 90), seed=st.integers(0, 9), epochs=st.integers(1, 3))
def test_epochs_by_length_are_permutations_within_the_tokens(lengths, tokens, seed, epochs):
    """Padding included; a sample longer than the limit is alone."""
    batches = iter(LengthSampler(lengths, tokens, seed=seed))
    for _ in range(epochs):
        seen = []
        while len(seen) < len(lengths):
            seen += (batch := next(batches))
            assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens
        assert sorted(seen) == list(range(len(lengths)))


@given(lengths=some_lengths, start=st.integers(0, 50), world=st.integers(1, 4), tokens=st.integers(8, 60))
def test_by_length_too_starting_late_is_skipping_and_processes_share(lengths, start, world, tokens):
    one = list(itertools.islice(LengthSampler(lengths, tokens // world, seed=3), (start + 5) * world))
    for rank in range(world):
        sampler = LengthSampler(lengths, tokens, seed=3, start=start, rank=rank, world=world)
        assert list(itertools.islice(sampler, 5)) == one[start * world + rank :: world]


@given(batches=st.integers(1, 20), world=st.integers(1, 8))
def test_a_validation_takes_as_many_steps_in_every_process(batches, world):
    """Each batch counts once; no process is without one, however few there are."""
    shares = [share([[i] for i in range(batches)], rank, world) for rank in range(world)]
    assert {len(own) for own, _ in shares} == {-(-batches // world)}
    assert sorted(i for own, counted in shares for (i,) in own[:counted]) == list(range(batches))


def test_batches_by_length_hold_similar_ones():
    """For random lengths up to 1,000 at most a tenth is padding; epochs differ in order and composition."""
    lengths = np.random.default_rng(0).integers(1, 1_000, 2_000)
    sampler = LengthSampler(lengths, 16_000, seed=0)
    epochs = [sampler.epoch(0), sampler.epoch(1)]
    padded = sum(len(batch) * lengths[batch].max() for batch in epochs[0])
    assert lengths.sum() > 0.9 * padded
    assert {frozenset(batch) for batch in epochs[0]} != {frozenset(batch) for batch in epochs[1]}
    firsts = [lengths[batch[0]] for batch in epochs[0]]
    assert sorted(firsts) != firsts


def test_refusals():
    with pytest.raises(ValueError, match="at least 1 sample"):
        LengthSampler([], 4, seed=0)
    with pytest.raises(ValueError, match="at least 1 token for each of 3 devices, got 2"):
        LengthSampler([1], 2, seed=0, world=3)
    with pytest.raises(ValueError, match="at least 1 sample"):
        StepSampler(0, 4, seed=0)
    with pytest.raises(ValueError, match="multiple of the 3 devices, got 4"):
        StepSampler(10, 4, seed=0, world=3)


@pytest.mark.parametrize(("samples", "count"), [(6, 1), (6, 2), (7, 3), (2, 5), (1, 2)])
def test_parts_of_a_batch_are_all_of_it_once(samples, count):
    """As many as requested, since processes must agree; with too few samples, some have weight 0."""
    batch = {"tokens": torch.arange(samples)[:, None], "counted": torch.ones(samples, 1, dtype=torch.bool)}
    found = parts(batch, count, lambda part: part["counted"].sum())
    assert len(found) == count
    counted = [part["tokens"] for part, weight in found if weight]
    assert torch.equal(torch.cat(counted), batch["tokens"])
    assert max(map(len, counted)) - min(map(len, counted)) <= 1
    assert int(sum(weight for _, weight in found)) == samples
    assert all(len(part["tokens"]) for part, _ in found)


@given(n=st.integers(1, 3_000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_that_is_not_kept_is_one(n, key):
    order = Permutation(n, key, 0)
    assert sorted(order[i] for i in range(n)) == list(range(n))
    with pytest.raises(IndexError, match="place must lie in 0"):
        order[n]


def test_a_permutation_that_is_not_kept_is_random():
    """Chi-square over 64 bins, for the first places and for the distances between neighbours, is within
    5 standard deviations of its 63 degrees of freedom; another key gives another order."""
    n, looked_at, bins = 10**12 + 7, 8_192, 64
    found = np.array([[Permutation(n, key)[i] for i in range(looked_at)] for key in range(2)])
    differences = [found[0], found[1], np.diff(found[0], append=0) % n, (found[0] - found[1]) % n]
    for each in differences:
        counts = np.bincount(each * bins // n, minlength=bins)
        assert abs(((counts - looked_at / bins) ** 2).sum() * bins / looked_at - 63) < 5 * (2 * 63) ** 0.5


def test_many_samples_are_in_the_order_of_such_a_permutation(monkeypatch):
    """Each once per epoch, from any step on, in any number of processes."""
    monkeypatch.setattr(batches, "SHUFFLED", 50)
    whole = StepSampler(60, 6, seed=1)
    line = [i for step in range(20) for i in whole.of_step(step)]
    for epoch in range(2):
        order = Permutation(60, 1, epoch)
        assert line[60 * epoch : 60 * (epoch + 1)] == [order[i] for i in range(60)]
    shares = [StepSampler(60, 6, seed=1, start=7, rank=rank, world=3).of_step(7) for rank in range(3)]
    assert [i for own in shares for i in own] == whole.of_step(7)


def test_an_order_of_more_samples_than_memory_holds():
    """A trillion samples: at once, and without a list."""
    sampler = StepSampler(10**12, 4, seed=0)
    assert len({*sampler.of_step(0), *sampler.of_step(10**9), *sampler.of_step(10**12)}) > 4

"""Random numbers for generation: SplitMix64, with a generator for each sequence."""

import pytest
import torch

from lintra import runtime
from lintra.export import runtime as export
from lintra.generation.uniforms import sequence_seed, uniforms
from tests.kinds import build


def numbers(steps, batch, seed):
    return torch.stack(list(uniforms(steps, batch, seed)))


def split_mix(state):
    """The authors' program in Python integers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        x = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        yield ((x ^ x >> 31) >> 11) / 2**53


@pytest.mark.parametrize("seed", [0, 3, 2**64 - 1, -(2**63)])
def test_every_sequence_has_its_generator(seed):
    found = numbers(150, 3, seed)
    assert found.dtype == torch.float64
    for i in range(3):
        own = split_mix((seed + i * 2**32) % 2**64)
        assert found[:, i].tolist() == [next(own) for _ in range(150)]


def test_the_generator_is_that_of_the_runtime():
    if not runtime.available():
        pytest.skip(f"no runtime: {runtime.why_not()}")
    sequence = runtime.Sequence(runtime.Model(export.to_bytes(build())))
    found = numbers(70, 2, 5)
    for i in range(2):
        sequence.seed(sequence_seed(5, i))
        assert [sequence.uniform() for _ in range(70)] == found[:, i].tolist()


def test_neither_the_batch_nor_the_length_changes_a_number():
    whole = numbers(130, 4, 9)
    assert torch.equal(numbers(130, 2, 9), whole[:, :2])
    assert torch.equal(numbers(63, 4, 9), whole[:63])
    assert torch.equal(numbers(130, 2, sequence_seed(9, 2)), whole[:, 2:])
    assert numbers(1, 0, 9).shape == (1, 0)
    assert list(uniforms(0, 3, 9)) == []


def test_numbers_are_uniform_and_sequences_unrelated():
    """Within 4 standard errors, and 5 for each of 1,225 correlations."""
    found = numbers(2000, 50, 1)
    assert found.min() >= 0
    assert found.max() < 1
    assert abs(found.mean() - 0.5) < 4 / (12 * found.numel()) ** 0.5
    related = torch.corrcoef(found.T) - torch.eye(50, dtype=torch.float64)
    assert related.abs().max() < 5 / 2000**0.5


def test_without_a_seed_others_each_time():
    assert not torch.equal(numbers(2, 2, None), numbers(2, 2, None))

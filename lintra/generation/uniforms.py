"""Random numbers of a generation: a generator for each sequence, that of the C runtime."""

import secrets
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_STEPS = 64  # made at once
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def uniforms(steps: int, batch: int, seed: int | None) -> Iterator[Float[Tensor, "b"]]:
    """Yield one number in [0, 1) for each sequence and step, float64, the same on every device.

    Sequence i has a generator of its own, SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators") from `sequence_seed(seed, i)`, so that its numbers do not depend on how
    many others there are: those of `lrt_seed` and `lrt_uniform` in C. seed None: another one each time.
    """
    seed = secrets.randbits(64) if seed is None else seed
    states = np.array([sequence_seed(seed, i) for i in range(batch)], np.uint64)
    for begin in range(0, steps, _STEPS):
        turns = np.arange(begin + 1, min(begin + _STEPS, steps) + 1, dtype=np.uint64)
        x = states + turns[:, None] * _GAMMA
        for shift, factor in _MIX:
            x = (x ^ x >> shift) * factor
        x ^= x >> np.uint64(31)
        yield from torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sequence_generator(seed: int, sequence: int) -> torch.Generator:
    """Return a PyTorch generator on the CPU for one of the sequences of a request.

    It takes 32 bits of a seed, to which those of `sequence_seed` are mixed."""
    (mixed,) = np.random.SeedSequence(sequence_seed(seed, sequence)).generate_state(1)
    return torch.Generator().manual_seed(int(mixed))


def sequence_seed(seed: int, sequence: int) -> int:
    """Return the seed of one of the sequences of a request, of 64 bits: neighbouring seeds share none."""
    return (seed + (sequence << 32)) % 2**64

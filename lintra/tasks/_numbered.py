"""Samples made up on the spot: each follows from a seed and its number, so that no order matters."""

import numpy as np

FIRST_VALIDATION = 2**32  # samples are numbered: training from 0, validation from here


def generator(seed: int, number: int) -> np.random.Generator:
    """The source of randomness of one sample."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))


def check(train_samples: int, validate_samples: int, data_seed: int) -> None:
    """Raises ValueError unless there are that many numbers and such a seed."""
    if not 1 <= train_samples <= FIRST_VALIDATION:
        raise ValueError(f"train_samples must lie in 1 .. {FIRST_VALIDATION}, got {train_samples}")
    if validate_samples < 1:
        raise ValueError(f"validate_samples must be at least 1, got {validate_samples}")
    if not 0 <= data_seed < 2**64:
        raise ValueError(f"data_seed must lie in 0 .. 2^64 - 1, got {data_seed}")

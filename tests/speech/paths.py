"""CTC by its definition, with every path enumerated."""

import itertools
import math
from collections import defaultdict

import torch


def draw(time, symbols, seed=0, sharp=2.0):
    """log_probs [t n+1] in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(time, symbols + 1, generator=generator, dtype=torch.float64)
    return (sharp * x).log_softmax(-1)


def collapsed(path):
    """The text of a path: repeats are merged, then blanks removed."""
    return tuple(symbol for symbol, _ in itertools.groupby(path) if symbol)


def every(log_probs):
    """(path, log-probability) of all (n+1)^t paths."""
    time, columns = log_probs.shape
    rows = log_probs.tolist()
    for path in itertools.product(range(columns), repeat=time):
        yield path, sum(row[symbol] for row, symbol in zip(rows, path, strict=True))


def texts(log_probs):
    """Each possible text with its log-probability, summed over its paths."""
    found = defaultdict(float)
    for path, log_prob in every(log_probs):
        found[collapsed(path)] += math.exp(log_prob)
    return {text: math.log(probability) for text, probability in found.items()}

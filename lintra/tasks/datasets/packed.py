"""Documents packed into sequences of one length: no token is padding, and attention stays in a document."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from lintra.tasks.base import Batch, Samples
from lintra.tasks.datasets.token_shards import Line


class Packed(Samples):
    """A line of documents cut into samples {"tokens": [length], "documents": [length] the number of each
    token's document}, int64.

    Every token is in one sample. The last sample may be shorter than the others: it is filled up with
    document -1, and its batch marks the real tokens in "counted" [length] bool. spread: samples do not follow
    the order of the line but are spread evenly over it, so that the first ones cover all of it.
    """

    def __init__(self, line: Line, length: int, *, spread: bool = False):
        self.line, self.length, self.spread = line, length, spread
        self._stride = _golden(len(self)) if spread else 1

    def __len__(self) -> int:
        return -(-len(self.line) // self.length)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        tokens = np.zeros((len(indices), self.length), np.int64)
        documents = np.full_like(tokens, -1)
        for row, index in enumerate(indices):
            first = range(len(self))[index] * self._stride % len(self) * self.length
            size = min(self.length, len(self.line) - first)
            tokens[row, :size], documents[row, :size] = self.line.read(first, first + size)
        batch = {"tokens": torch.from_numpy(tokens), "documents": torch.from_numpy(documents)}
        if documents[:, -1].min() < 0:
            batch["counted"] = batch["documents"] >= 0
        return batch


def _golden(n: int) -> int:
    """Return a step that visits all of 0 .. n - 1, modulo n, each time far from where it was: about the
    golden section of n."""
    step = max(1, round(n * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, n) > 1:
        step += 1
    return step

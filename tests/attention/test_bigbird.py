"""BigBird: its sets of blocks, their limits, what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import bigbird, softmax
from lintra.attention.bigbird import BigBirdAttention
from lintra.ops.blocks import dice
from tests.laws import BATCH, DIM, EXACT, TIME, Case, gradients

SMALL = bigbird.Config(block=2, random_blocks=2)
VARIANTS = [
    SMALL,
    bigbird.Config(block=3, random_blocks=1, window_blocks=1, left_blocks=2, scale=0.3, random_limit=12),
]


def row_of(attention: BigBirdAttention, head: int, i: int, number: int) -> set[int]:
    """The blocks that block i of `number` sees, from the definition."""
    config = attention.config
    last = i + 1 if attention.causal else number
    ends = set(range(config.left_blocks)) | set(range(number - attention.right, number))
    window = set(range(i - config.window_blocks // 2, i + config.window_blocks // 2 + 1))
    limit = last if config.random_limit is None else config.random_limit // config.block
    if i in ends and not attention.causal:
        return set(range(number))
    others = sorted(set(range(min(last, limit))) - ends - window)
    found = (ends | window) & set(range(last))
    for fallen in dice(attention.seeds, torch.tensor([[i]]))[0, head, 0].tolist():
        if others:
            found.add(others.pop(fallen * len(others) >> 32))
    return found


def pattern(attention: BigBirdAttention, time: int) -> Tensor:
    """Which keys a query sees [g t t]."""
    block = attention.config.block
    number = -(-time // block)
    seen = torch.zeros(attention.kv_heads, time, time, dtype=torch.bool)
    for head in range(attention.kv_heads):
        for t in range(time):
            blocks = row_of(attention, head, t // block, number)
            for s in range(t + 1 if attention.causal else time):
                seen[head, t, s] = s // block in blocks
    return seen


def dense(attention: BigBirdAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every score; what no set has struck out."""
    group = attention.heads // attention.kv_heads
    scale = q.shape[-1] ** -0.5 if attention.config.scale is None else attention.config.scale
    scores = scale * torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(group, 2))
    hidden = ~pattern(attention, q.shape[1]).repeat_interleave(group, 0)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshe->bthe", weights, v.repeat_interleave(group, 2))

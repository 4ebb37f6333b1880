"""Long-Short Transformer: its dense definition, its limits, its summaries, its segments, what it refuses."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import longshort, map_state, softmax
from lintra.attention.longshort import LongShortAttention
from lintra.nn import Heads
from tests.laws import BATCH, DIM, EXACT, TIME, VALUE_DIM, Case, forward, gradients

VARIANTS = [
    longshort.Config(window=4, rank=3, segment=4),
    longshort.Config(window=5, rank=2, segment=3, segment_rank=2, scale=0.3, dual_norm=False),
    longshort.Config(window=0, rank=3),
    longshort.Config(window=3, rank=0, segment_rank=0),
]
PLAIN = {"dual_norm": False}


def dense(attention: LongShortAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The two equations for each query: its window and its summaries side by side, one softmax."""
    config, time, group = attention.config, q.shape[1], attention.heads // attention.kv_heads
    scale = q.shape[-1] ** -0.5 if config.scale is None else config.scale
    near_k, near_v = norm(attention.window_key, k), norm(attention.window_value, v)
    size = config.segment if attention.causal else time
    summaries = []
    for first in range(0, time - size + 1, size):
        segment = slice(first, first + size)
        share = torch.einsum("bsgd,gdr->bsgr", k[:, segment], attention.project).softmax(1)
        long_k = norm(attention.long_key, torch.einsum("bsgr,bsgd->brgd", share, k[:, segment]))
        long_v = norm(attention.long_value, torch.einsum("bsgr,bsge->brge", share, v[:, segment]))
        summaries.append((long_k, long_v))
    ys = []
    for i in range(time):
        if attention.causal:
            first, last, finished = max(0, i - config.window + 1), i + 1, i // size
        else:
            side, start = math.ceil(config.window / 2), i // max(config.window, 1) * config.window
            first, last, finished = max(0, start - side), start + config.window + side, 1
            last = last if config.window else 0
        keys = torch.cat([near_k[:, first:last], *(x for x, _ in summaries[:finished])], 1)
        values = torch.cat([near_v[:, first:last], *(x for _, x in summaries[:finished])], 1)
        scores = scale * torch.einsum("bhd,bshd->bhs", q[:, i], keys.repeat_interleave(group, 2))
        ys.append(torch.einsum("bhs,bshe->bhe", scores.softmax(-1), values.repeat_interleave(group, 2)))
    return torch.stack(ys, 1)


def norm(module: torch.nn.Module, x: Tensor) -> Tensor:
    """Layer normalisation written out, over the features of all heads [g f]."""
    if not isinstance(module, longshort.Norm):
        return x
    centred = x - x.mean((-2, -1), keepdim=True)
    deviation = (centred.square().mean((-2, -1), keepdim=True) + 1e-5).sqrt()
    return centred / deviation * module.weight + module.bias

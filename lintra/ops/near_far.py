"""Means over time with a weight for every pair of places that are near: the sums of AFT-local.

    sum_ts exp(k_s + w_ts) [v_s, 1]      w_ts = 0 unless |t - s| < window

for every channel, in memory and time linear in t. Time is cut into blocks of `window` tokens. What a block
reads of itself and of the blocks beside it is a product of exp(w) with exp(k) [v, 1]; one more row of it is
the sum of all keys that are farther away. Nothing is subtracted. When causal the sums of token t are kept
times exp(-highest_t), the largest key up to t. That splits where two runs of tokens meet,
exp(border - highest_t) for the later and exp(k_s - border) for the earlier one, both at most 1: so each block
is read by halves, as in ops/linear_attention/chunked.py.

Letters: b batch, t time, g heads, d channels, n blocks, c tokens to a block.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional

from lintra.ops.padding import real_tokens
from lintra.ops.running import ExpSums, decayed_sum, running_max


def near_and_far(
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g d"],
    learned: Sequence[Float[Tensor, "t _"]],
    mask: Bool[Tensor, "b t"] | None,
    *,
    window: int,
    causal: bool,
) -> ExpSums:
    """The sums at every token [b t g d]; both are 0 where no key is real. k and v are in the dtype of sums.

    `learned` is w: a table [t w], column j of row t for the place t - (w - 1) + j, w = window when causal and
    2 window - 1 otherwise; or two matrices [t r], w_ts = one_t . other_s. With a mask the real tokens come
    first."""
    time = k.shape[1]
    if not time:
        return ExpSums(k, k, k)
    c = min(window, time)
    if causal:
        c = 1 << (c - 1).bit_length()  # to be halved
    k, v, mask = (_blocks(x, c) for x in (k, v, real_tokens(mask, k)))
    blocks = 1 if len(k) == 1 else 2 if causal else 3  # that a block reads with a weight for each key
    weight = _weights(learned, time, len(k), c, blocks, window, causal)
    sums, highest = (_causal if causal else _bidirectional)(k, v, mask, weight)
    sums, highest = (x.flatten(0, 1)[:time].transpose(0, 1) for x in (sums, highest))
    return ExpSums(sums[:, :, 0], sums[:, :, 1], highest)


def _blocks(x: Shaped[Tensor, "b t *r"], c: int) -> Shaped[Tensor, "n c b *r"]:
    """Cut time into blocks of c tokens, the last filled up with zeros.

    All sequences have the same weights: with the batch beside the channels a block has one product."""
    x = x.transpose(0, 1)
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, -x.shape[0] % c)).unflatten(0, (-1, c))


def _weights(
    learned: Sequence[Tensor], time: int, n: int, c: int, blocks: int, window: int, causal: bool
) -> Float[Tensor, "n c m+1"]:
    """exp(w - shift) of each block's tokens for the m keys in the blocks around and, last, for all those that
    are farther away; 0 where there are none. The shift is the largest w of a row, which cancels."""
    learned = [functional.pad(x, (0, 0, 0, n * c - x.shape[0])).unflatten(0, (n, c)) for x in learned]
    place = torch.arange(c, device=learned[0].device)
    key = torch.arange(blocks * c, device=place.device) - (c if blocks > 1 else 0)
    column = window - 1 - (place[:, None] - key)
    near = (column >= 0) & (column < (window if causal else 2 * window - 1))
    block = torch.arange(n, device=place.device)[:, None, None]
    there = block * c + key  # [n 1 m]
    seen = (there >= 0) & (there < time)
    if causal:
        seen = seen & (key <= place[:, None])
    far = (block >= 2) if causal else (block >= 2) | (block < n - 2)
    if len(learned) == 1:
        column = column.clamp(0, learned[0].shape[-1] - 1).expand(n, -1, -1)
        w = learned[0].gather(2, column)
    else:
        w = learned[0] @ _around(learned[1], blocks).mT
    w = functional.pad(w.masked_fill(~near, 0.0), (0, 1))
    w = w.masked_fill(~torch.cat((seen.expand(n, c, -1), far.expand(n, c, 1)), -1), -math.inf)
    shift = w.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(w.dtype).min)
    return (w - shift).exp()


def _around(x: Float[Tensor, "n c *r"], blocks: int) -> Float[Tensor, "n m *r"]:
    """The block before each, itself and, with three blocks, the one after; zeros beyond the ends."""
    if blocks == 1:
        return x
    edge = torch.zeros_like(x[:1])
    shifted = [torch.cat((edge, x[:-1])), x, torch.cat((x[1:], edge))]
    return torch.cat(shifted[:blocks], 1)


def _bidirectional(k: Tensor, v: Tensor, real: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sums [n c b 2 g d] relative to the largest key of all, which every token sees."""
    highest = _hidden(k, real).amax((0, 1))
    x = _times_exp(k - highest, v, real)
    total = functional.pad(x.sum(1), (0, 0) * 4 + (2, 2))
    past, future = total.cumsum(0)[:-4], total.flip(0).cumsum(0).flip(0)[4:]
    x = torch.cat((_around(x, (weight.shape[2] - 1) // x.shape[1]), (past + future)[:, None]), 1)
    return _product(weight, x), highest.expand_as(k)


def _causal(k: Tensor, v: Tensor, real: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sums [n c b 2 g d] relative to the largest key up to each token."""
    c = k.shape[1]
    highest = running_max(_hidden(k, real).flatten(0, 1)[None])[0].view_as(k)
    before, own, far = weight.split((weight.shape[2] - c - 1, c, 1), 2)
    sums = own.diagonal(dim1=1, dim2=2)[..., None, None, None, None] * _times_exp(k - highest, v, real)
    if k.shape[0] > 1:  # the block before, then all blocks before that one, relative to its largest key
        border = highest[:-1, -1:]
        x = _times_exp(k[:-1] - border, v[:-1], real[:-1])
        decay = functional.pad((border[:-1] - border[1:]).exp(), (0, 0) * 4 + (1, 0)).transpose(1, 2)
        total = decayed_sum(x.sum(1)[None], decay[None])[0]
        passed = functional.pad(total[:-1], (0, 0) * 4 + (1, 0)) * decay  # [n-1 b 2 g d]
        x = torch.cat((x, passed[:, None]), 1)
        found = _read(torch.cat((before, far), 2)[1:], x, border, highest[1:])
        sums = sums + functional.pad(found, (0, 0) * 5 + (1, 0))
    half = 1
    while half < c:
        # own [n c c] as pairs of runs against pairs of runs: the later run of a pair against its earlier one.
        pairs = own.unflatten(2, (-1, 2, half))[..., 0, :].unflatten(1, (-1, 2, half))[:, :, 1]
        pairs = pairs.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)  # [n*m half half]
        runs = (x.flatten(0, 1).unflatten(0, (-1, 2, half)) for x in (k, v, real, highest))
        (k_early, _), (v_early, _), (real_early, _), (early, late) = (x.unbind(1) for x in runs)
        border = early[:, -1:]
        found = _read(pairs, _times_exp(k_early - border, v_early, real_early), border, late)
        found = torch.stack((torch.zeros_like(found), found), 1)
        sums = sums + found.view_as(sums)
        half *= 2
    return sums, highest


def _read(weight: Tensor, x: Tensor, border: Tensor, highest: Tensor) -> Float[Tensor, "n c b 2 g d"]:
    """Return what tokens read of x: x is relative to `border`, the result to each one's `highest`."""
    return _product(weight, x) * (border - highest).exp()[..., None, :, :]


def _product(weight: Float[Tensor, "n c m"], x: Float[Tensor, "n m *r"]) -> Float[Tensor, "n c *r"]:
    return (weight @ x.flatten(2)).unflatten(2, x.shape[2:])


def _hidden(k: Tensor, real: Tensor) -> Tensor:
    """Keys with the least float where not real, without a gradient."""
    return k.detach().masked_fill(~real[..., None, None], torch.finfo(k.dtype).min)


def _times_exp(k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """exp(k) [v, 1] on a new axis before the last two; 0 where not real, whatever is there."""
    weight = k.masked_fill(~real[..., None, None], -math.inf).exp()
    return torch.stack((weight * v, weight), -3)

"""Means over time with a weight for every pair of places that are near: the sums of AFT-local.

    sum_ts exp(k_s + w_ts) [v_s, 1]      w_ts = 0 unless |t - s| < window

for every channel, in memory and time linear in t. The far keys are a running sum that ends `window` tokens
away; the near ones are products of exp(w) in blocks with exp(k) [v, 1], and nothing is subtracted. When
causal the sums of token t are kept times exp(-highest_t), the largest key up to t. That splits where two runs
of tokens meet, exp(border - highest_t) for the later and exp(k_s - border) for the earlier one, both at most
1: so each block is read by halves, as in ops/linear_attention/chunked.py.

Letters: b batch, t time, g heads, d channels, n blocks, c tokens to a block.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from lintra.ops.padding import real_tokens
from lintra.ops.running import ExpSums, no_sums, running_sums, total_sums


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
    k, v, mask = _fill(k, v, mask, c)
    weight, shift = _weights(learned, time, k.shape[1] // c, c, window, causal)
    sums = _causal if causal else _bidirectional
    near, far, highest = sums(k, v, mask, weight, window, c)
    both = near + shift[:, None, None, None] * far  # [b t 2 g d]
    return ExpSums(both[:, :time, 0], both[:, :time, 1], highest[:, :time])


def _fill(k: Tensor, v: Tensor, mask: Tensor | None, c: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole blocks, the places that are missing padded."""
    missing = -k.shape[1] % c
    mask = real_tokens(mask, k)
    k, v = (functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in (k, v))
    return k, v, functional.pad(mask, (0, missing))


def _weights(
    learned: Sequence[Tensor], time: int, n: int, c: int, window: int, causal: bool
) -> tuple[Float[Tensor, "n c m"], Float[Tensor, " t"]]:
    """exp(w - shift) of each block's tokens for the m keys in the blocks around, 0 outside the band and the
    sequence; exp(-shift), the weight of the keys beyond the band, 0 where there are none. The largest w of a
    row, theirs of 0 too, is taken out of the whole row, where it cancels."""
    blocks = 2 if causal else 3
    learned = [functional.pad(x, (0, 0, 0, n * c - x.shape[0])).unflatten(0, (n, c)) for x in learned]
    place = torch.arange(c, device=learned[0].device)
    key = torch.arange(-c, (blocks - 1) * c, device=place.device)
    column = window - 1 - (place[:, None] - key)
    inside = (column >= 0) & (column < (window if causal else 2 * window - 1))
    token = torch.arange(n * c, device=place.device).unflatten(0, (n, c))[..., None]
    there = token[:, :1] + key  # [n 1 m]
    inside = inside & (there >= 0) & (there < time)
    far = (token >= window) if causal else (token >= window) | (token < time - window)
    if len(learned) == 1:
        column = column.clamp(0, learned[0].shape[-1] - 1).expand(n, -1, -1)
        w = learned[0].gather(2, column)
    else:
        w = learned[0] @ _around(learned[1][None], blocks)[0].mT
    w = w.masked_fill(~inside, -math.inf)
    shift = w.detach().amax(-1, keepdim=True)
    shift = torch.where(far, shift.clamp(min=0), shift.clamp(min=torch.finfo(w.dtype).min))
    return (w - shift).exp(), (-shift).masked_fill(~far, -math.inf).exp().flatten()


def _around(x: Float[Tensor, "b n c *r"], blocks: int) -> Float[Tensor, "b n m *r"]:
    """The block before each, itself and, with three blocks, the one after; zeros beyond the ends."""
    edge = torch.zeros_like(x[:, :1])
    shifted = [torch.cat((edge, x[:, :-1]), 1), x, torch.cat((x[:, 1:], edge), 1)]
    return torch.cat(shifted[:blocks], 2)


def _bidirectional(
    k: Tensor, v: Tensor, mask: Tensor, weight: Tensor, window: int, c: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Near and far sums [b t 2 g d] relative to the largest key of all, which every token sees."""
    highest = total_sums(k, v, mask).highest[:, None]
    x = _times_exp(k - highest, v, mask)
    blocks = x.flatten(2).unflatten(1, (-1, c))
    near = (weight @ _around(blocks, 3)).flatten(1, 2).view_as(x)
    ends = (0, 0) * (x.dim() - 2)
    past = functional.pad(x.cumsum(1), (*ends, window, 0))[:, : x.shape[1]]
    future = functional.pad(x.flip(1).cumsum(1), (*ends, window, 0))[:, : x.shape[1]].flip(1)
    return near, past + future, highest.expand_as(k)


def _causal(
    k: Tensor, v: Tensor, mask: Tensor, weight: Tensor, window: int, c: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Near and far sums [b t 2 g d] relative to the largest key up to each token."""
    b, time, g, d = k.shape
    so_far = running_sums(k, v, mask, no_sums(b, g, d, device=k.device, dtype=k.dtype))
    highest = so_far.highest
    # Beyond the window: the running sums of `window` tokens earlier, as they stand to the largest key now.
    far = torch.stack(so_far[:2], 2)[:, : max(0, time - window)]
    fallen = (highest[:, : far.shape[1]] - highest[:, time - far.shape[1] :]).exp()
    far = functional.pad(far * fallen[:, :, None], (0, 0, 0, 0, 0, 0, time - far.shape[1], 0))

    k, v, high = (x.unflatten(1, (-1, c)) for x in (k, v, highest))
    real = mask.unflatten(1, (-1, c))
    before, own = weight[:, :, :c], weight[:, :, c:]
    near = own.diagonal(dim1=1, dim2=2)[..., None, None, None] * _times_exp(k - high, v, real)
    reach = _read(before[1:], k[:, :-1], v[:, :-1], real[:, :-1], high[:, :-1, -1:], high[:, 1:])
    near = near + functional.pad(reach, (0, 0) * 4 + (1, 0))
    half = 1
    while half < c:
        # own [n c c] as pairs of runs against pairs of runs: the later run of a pair against its earlier one.
        pairs = own.unflatten(2, (-1, 2, half))[..., 0, :].unflatten(1, (-1, 2, half))[:, :, 1]
        pairs = pairs.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)  # [n*m half half]
        runs = [x.flatten(1, 2).unflatten(1, (-1, 2, half)) for x in (k, v, real, high)]
        early, late = runs[3][:, :, 0], runs[3][:, :, 1]
        found = _read(pairs, *(x[:, :, 0] for x in runs[:3]), early[:, :, -1:], late)
        found = torch.stack((torch.zeros_like(found), found), 2)
        near = near + found.flatten(1, 3).view_as(near)
        half *= 2
    return near.flatten(1, 2), far, highest


def _read(
    weight: Tensor, k: Tensor, v: Tensor, real: Tensor, border: Tensor, highest: Tensor
) -> Float[Tensor, "b n c 2 g d"]:
    """Return what runs of tokens, with the largest keys `highest`, read of the runs that end at `border`."""
    x = _times_exp(k - border, v, real)
    found = (weight @ x.flatten(3)).view(*x.shape[:2], weight.shape[-2], *x.shape[3:])
    return found * (border - highest).exp()[..., None, :, :]


def _times_exp(k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """exp(k) [v, 1] on a new axis before the last two; 0 where not real, whatever is there."""
    weight = k.masked_fill(~real[..., None, None], -math.inf).exp()
    return torch.stack((weight * v, weight), -3)

"""Sums over time of exp(k) v and exp(k), channel by channel, of the whole sequence or of each prefix.

Each is kept times exp(-highest), where highest is the largest key summed up to that token: no key overflows,
and none that comes later makes an earlier sum vanish. The largest key so far acts as a decay,

    sum_t = exp(highest_{t-1} - highest_t) sum_{t-1} + exp(k_t - highest_t) [v_t, 1]

and carries no gradient: it cancels in every ratio. Letters: b batch, t time, g heads, d channels.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

STEPS = 16  # tokens a block is walked through one by one, all blocks at once
LONGEST = 24  # rounds in an exported graph: 2^24 tokens


class ExpSums(NamedTuple):
    """exp(k) v and exp(k) summed, both times exp(-highest), which is the least float where there is no key.

    [b g d] of a whole sequence, [b t g d] of its beginnings; float32 (float64 for float64 inputs)."""

    numerator: Tensor
    denominator: Tensor
    highest: Tensor

    def mean(self) -> Tensor:
        """The values weighted by exp(k); 0 where there is none, with no gradient."""
        nothing = self.denominator == 0
        return (self.numerator / self.denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


def no_sums(
    batch: int, heads: int, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype
) -> ExpSums:
    """The sums before any token."""
    zero = torch.zeros(batch, heads, dim, device=device, dtype=dtype)
    return ExpSums(zero, zero.clone(), torch.full_like(zero, torch.finfo(dtype).min))


def total_sums(
    k: Float[Tensor, "b t g d"], v: Float[Tensor, "b t g d"], mask: Bool[Tensor, "b t"] | None
) -> ExpSums:
    """Over all real tokens -> [b g d]."""
    k, lowest = _hidden(k, mask)
    highest = torch.cat((k.new_full((k.shape[0], 1, *k.shape[2:]), lowest), k.detach()), 1).amax(1)
    weight = _weight(k, highest[:, None], mask)
    return ExpSums((weight * v).sum(1), weight.sum(1), highest)


def running_sums(
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g d"],
    mask: Bool[Tensor, "b t"] | None,
    state: ExpSums,
) -> ExpSums:
    """Over `state` and the real tokens up to each one's own -> [b t g d]."""
    k, _ = _hidden(k, mask)
    highest = torch.cat((state.highest[:, None], k.detach()), 1).cummax(1).values
    decay = (highest[:, :-1] - highest[:, 1:]).exp()
    weight = _weight(k, highest[:, 1:], mask)
    added = torch.stack((weight * v, weight), 2)  # [b t 2 g d]
    first = torch.stack(state[:2], 1)[:, None]
    # The state acts as a token before the first one, with nothing to decay.
    decay = torch.cat((torch.ones_like(highest[:, :1]), decay), 1)[:, :, None]
    sums = decayed_sum(torch.cat((first, added), 1), decay)[:, 1:]
    return ExpSums(sums[:, :, 0], sums[:, :, 1], highest[:, 1:])


def running_max(x: Float[Tensor, "b t *c"]) -> Float[Tensor, "b t *c"]:
    """The largest so far, without a gradient.

    In an exported graph of any length, where t is a symbol, in rounds that look twice as far back each time:
    ONNX has no operator for it."""
    t = x.shape[1]
    if not isinstance(t, int):
        x, places = x.detach(), torch.arange(t, device=x.device)
        for i in range(LONGEST):  # the first token stands for what would be before it
            x = torch.maximum(x, x.index_select(1, (places - 2**i).clamp(min=0)))
        return x
    if t == 2:  # a token after a state
        return torch.stack((x[:, 0], torch.maximum(x[:, 0], x[:, 1])), 1).detach()
    return x.detach().cummax(1).values


def decayed_sum(added: Float[Tensor, "b t *c"], decay: Float[Tensor, "b t ..."]) -> Float[Tensor, "b t *c"]:
    """y_t = decay_t y_{t-1} + added_t, decay in [0, 1] broadcast against added: O(t), in about log t rounds.

    Blocks of a few tokens are walked through side by side; their ends are a shorter sum of the same kind."""
    time = added.shape[1]
    steps = min(STEPS, time)
    if not time:
        return added
    missing = -time % steps
    if missing:
        added = torch.cat((added, added.new_zeros(added.shape[0], missing, *added.shape[2:])), 1)
        decay = torch.cat((decay, decay.new_ones(decay.shape[0], missing, *decay.shape[2:])), 1)
    sums, left = [], []
    for new, kept in zip(*(x.unflatten(1, (-1, steps)).unbind(2) for x in (added, decay)), strict=True):
        sums.append(kept * sums[-1] + new if sums else new)
        left.append(kept * left[-1] if left else kept)
    y = torch.stack(sums, 2)  # [b n steps *c]
    if y.shape[1] > 1:
        ends = decayed_sum(sums[-1][:, :-1], left[-1][:, :-1])
        before = torch.cat((torch.zeros_like(ends[:, :1]), ends), 1)
        y = y + torch.stack(left, 2) * before[:, :, None]
    return y.flatten(1, 2)[:, :time]


def _hidden(k: Tensor, mask: Tensor | None) -> tuple[Tensor, float]:
    """Keys with the least float in padded places, and that float."""
    lowest = torch.finfo(k.dtype).min
    return (k if mask is None else k.masked_fill(~mask[..., None, None], lowest)), lowest


def _weight(k: Tensor, highest: Tensor, mask: Tensor | None) -> Tensor:
    weight = (k - highest).exp()
    return weight if mask is None else weight.masked_fill(~mask[..., None, None], 0.0)

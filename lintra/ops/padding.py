"""Padding made zero, or moved after the real tokens where places matter."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lintra.ops import checks


class LeftAlign(NamedTuple):
    """`gather` brings the real tokens of each sample to the front, in their order; `restore` undoes it."""

    order: Int[Tensor, "b t"] | None  # None: they are in front already, as far as can be seen
    inverse: Int[Tensor, "b t"] | None
    mask: Bool[Tensor, "b t"]  # True for the tokens in front

    @classmethod
    def of(cls, mask: Bool[Tensor, "b t"]) -> "LeftAlign":
        if checks.readable(mask) and not bool((mask[:, 1:] > mask[:, :-1]).any()):
            return cls(None, None, mask)
        count, places = mask.sum(1, keepdim=True), torch.arange(mask.shape[1], device=mask.device)
        # Counted, not sorted: a real token goes after the earlier real ones, a padded one after all of them.
        inverse = torch.where(mask, mask.cumsum(1), count + (~mask).cumsum(1)) - 1
        order = torch.zeros_like(inverse).scatter(1, inverse, places.expand_as(inverse))
        return cls(order, inverse, places < count)

    def gather(self, x: Tensor) -> Tensor:
        """x [b t ...], which must be 0 in padded places, as the inputs of hooks are."""
        return x if self.order is None else take(x, self.order)

    def restore(self, y: Tensor) -> Tensor:
        """y [b t ...] in the tokens' original places; padded places are zero."""
        (y,) = zero_padding(self.mask, y)
        return y if self.inverse is None else take(y, self.inverse)


def connected_zeros(shape: Sequence[int], *inputs: Tensor) -> Tensor:
    """Return zeros of the last input's dtype that depend on all inputs, so that all have gradients: training
    in several processes waits for those of every parameter."""
    y = inputs[-1].new_zeros(shape)
    for x in inputs:
        y = y + x[:0].sum().to(y.dtype)
    return y


def zero_padding(mask: Bool[Tensor, "b t"] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors [b t ...] with zeros, and no gradient, where mask is False; NaN there is removed."""
    if mask is None:
        return tensors
    if checks.readable(mask):  # filling whole rows is faster on CPUs, and free if there are none
        padded = (~mask).flatten().nonzero()[:, 0]
        return tuple(_fill_rows(x, padded) for x in tensors) if len(padded) else tensors
    return tuple(x.masked_fill(~expand_mask(mask, x), 0) for x in tensors)


def _fill_rows(x: Tensor, rows: Int[Tensor, "n"]) -> Tensor:
    """x [b t ...] with zeros in some of its b t rows."""
    return x.flatten(0, 1).index_fill(0, rows, 0).unflatten(0, x.shape[:2])


def expand_mask(mask: Bool[Tensor, "b t"], x: Tensor) -> Tensor:
    """Return the mask with axes of size 1 after its own, so that it broadcasts with x [b t ...]."""
    return mask.reshape(*mask.shape, *[1] * (x.dim() - 2))


def real_tokens(mask: Bool[Tensor, "b t"] | None, x: Tensor) -> Bool[Tensor, "b t"]:
    """Return which tokens of x [b t ...] are real: all of them without a mask."""
    return x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask


def last_real(mask: Bool[Tensor, "b t"]) -> Int[Tensor, "b"]:
    """Return the place of each sample's last real token, 0 where it has none; t must be at least 1."""
    return mask.cumsum(1).argmax(1)  # the first place at which all real tokens are counted


def put_last(late: Bool[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The places of each sample that are not `late`, then those that are, both in their order."""
    return late.to(torch.uint8).argsort(dim=1, stable=True)


def take(x: Tensor, order: Int[Tensor, "b n"]) -> Tensor:
    """x [b t ...] at places of each sample -> [b n ...]."""
    first = x.shape[1] * torch.arange(x.shape[0], device=x.device)[:, None]
    rows = x.flatten(0, 1).index_select(0, (first + order).flatten())  # on CPUs, gather is ten times slower
    return rows.unflatten(0, order.shape)


def take_by_head(x: Tensor, places: Int[Tensor, "b h n"]) -> Tensor:
    """x [b t h ...] at places of each sample and head -> [b h n ...]."""
    batch, time, heads = x.shape[:3]
    sample, head = (torch.arange(n, device=x.device) for n in (batch, heads))
    rows = heads * (time * sample[:, None, None] + places) + head[:, None]
    return x.flatten(0, 2).index_select(0, rows.flatten()).unflatten(0, places.shape)

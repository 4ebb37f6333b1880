"""Real tokens to the front, for methods in which the place of a token matters: padding is then absence."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class RealFirst(NamedTuple):
    """`gather` brings the real tokens of each sample to the front, in their order; `restore` undoes it."""

    order: Int[Tensor, "b t"]
    inverse: Int[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]  # True for the tokens in front

    @classmethod
    def of(cls, mask: Bool[Tensor, "b t"]) -> "RealFirst":
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
        places = torch.arange(mask.shape[1], device=mask.device)
        return cls(order, order.argsort(1), places < mask.sum(1, keepdim=True))

    def gather(self, x: Tensor) -> Tensor:
        """x [b t ...], the padded places zero whatever stood there."""
        x = take(x, self.order)
        return x.masked_fill(~self.mask.reshape(*self.mask.shape, *[1] * (x.dim() - 2)), 0)

    def restore(self, y: Tensor) -> Tensor:
        """y [b t ...] in the places the tokens had; padded places are zero."""
        y = y.masked_fill(~self.mask.reshape(*self.mask.shape, *[1] * (y.dim() - 2)), 0)
        return take(y, self.inverse)


def take(x: Tensor, order: Int[Tensor, "b n"]) -> Tensor:
    """x [b t ...] at places of each sample -> [b n ...]."""
    return x.gather(1, order.reshape(*order.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))

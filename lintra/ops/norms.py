"""Norms of heads: of queries and keys before attention, and after it, with a gate."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from lintra.ops.checks import sum_dtype

SHORTEST = 1e-6  # vectors below this length have no direction
EPS = 1e-6  # added to the square of a length, or to the mean square: a head of zeros stays 0


def unit(x: Tensor) -> Tensor:
    """Return x [... d] divided by its length; 0, without a gradient, where that is below SHORTEST."""
    wide = x.to(sum_dtype(x.dtype))
    square = wide.square().sum(-1, keepdim=True)
    short = square < SHORTEST**2
    # 1 in the place of a square near 0, whose root would have a gradient of infinity, or NaN times 0.
    return (wide * square.masked_fill(short, 1).rsqrt().masked_fill(short, 0)).to(x.dtype)


def l2_norm(x: Tensor, *, eps: float = EPS) -> Tensor:
    """Return x [... d] divided by its length, which is sqrt(x . x + eps)."""
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def gated_norm(
    y: Tensor,
    gate: Tensor | None,
    *,
    norm: bool = True,
    centre: bool = False,
    weight: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] = functional.silu,
) -> Tensor:
    """norm(y) * activation(gate) in the dtype of y [b t h e]; gate [b t h*e], the weight of the norm [e].

    The norm is that of the mean square of each head: Zhang and Sennrich 2019, arXiv:1910.07467. With `centre`
    the mean of the head is subtracted first, which makes it GroupNorm: Wu and He 2018, arXiv:1803.08494."""
    if centre:
        y = y - y.mean(-1, keepdim=True)
    if norm:
        y = y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt()
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y if gate is None else y * activation(gate.to(y.dtype)).view(y.shape)

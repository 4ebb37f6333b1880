"""A norm for each head and a gate, which recurrences without a denominator put behind their sum."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

EPS = 1e-6  # added to the mean square of a head: a head of zeros stays 0


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
    the mean of the head is taken away first, which makes it GroupNorm: Wu and He 2018, arXiv:1803.08494."""
    if centre:
        y = y - y.mean(-1, keepdim=True)
    if norm:
        y = y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt()
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y if gate is None else y * activation(gate.to(y.dtype)).view(y.shape)

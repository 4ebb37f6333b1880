"""What recurrences without a denominator put around their sum: gates that are read, a norm for each head."""

from typing import Any

from torch import Tensor
from torch.nn import functional

from lintra.attention._base import Attention
from lintra.ops import _check

EPS = 1e-6  # added to the mean square of a head: a head of zeros stays 0


def check_reads(attention: Attention, q: Tensor, **given: Tensor | None) -> list[Any]:
    """What was given, [b t width], in its order; None for what `attention.reads()` does not name.

    Raises ValueError or TypeError unless that is what was given."""
    widths = attention.reads()
    for name, x in given.items():
        if x is None and name in widths:
            raise TypeError(f"attention {attention.name!r} reads {name} [b t {widths[name]}], got None")
        if x is not None:
            if name not in widths:
                raise TypeError(f"attention {attention.name!r} reads no {name} with {attention.config}")
            _check.shape(name, x, "b t w", {"b": q.shape[0], "t": q.shape[1], "w": widths[name]})
            _check.floating(name, x)
    return list(given.values())


def finish(y: Tensor, gate: Tensor | None, *, norm: bool = True, weight: Tensor | None = None) -> Tensor:
    """norm(y) * silu(gate) in the dtype of y [b t h e]; gate [b t h*e], the weight of the norm [e].

    The norm is that of the mean square of each head: Zhang and Sennrich 2019, arXiv:1910.07467."""
    if norm:
        y = y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt()
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y if gate is None else y * functional.silu(gate.to(y.dtype)).view(y.shape)


def exact(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the dtype of sums, out of reach of autocast: a norm afterwards magnifies what was rounded."""
    return tuple(x.to(_check.sum_dtype(x.dtype)) for x in tensors)

"""The gate of an MLP: Shazeer 2020, arXiv:2002.05202."""

from torch import Tensor
from torch.nn import functional


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Return x sigmoid(x) y."""
    return functional.silu(x) * y


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear map of x sigmoid(x) y, [... d] -> [... c], weight [c d] and bias [c]."""
    return functional.linear(swiglu(x, y), weight, bias)

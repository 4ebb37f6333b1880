"""The norm of the mean square: Zhang and Sennrich 2019, arXiv:1910.07467."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.ops import checks
from lintra.ops.autocast import no_autocast


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return (x + residual) / sqrt(mean square + eps) * weight + bias in x's dtype, x and residual [... d].

    With `prenorm` the sum x + residual too, in the dtype of the residual; where there is none it is x, with
    `residual_in_fp32` in float32. Everything between is in the dtype of sums.
    """
    y, summed = wide_rms_norm(x, weight, bias, residual, eps, residual_in_fp32)
    return (y.to(x.dtype), summed) if prenorm else y.to(x.dtype)


def wide_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    residual_in_fp32: bool,
) -> tuple[Tensor, Tensor]:
    """Return the norm in the dtype of sums, and what it is the norm of: see `rms_norm`."""
    dtype = checks.sum_dtype(x.dtype)
    with no_autocast(x):
        wide = x.to(dtype)
        if residual is not None:
            wide = wide + residual.to(dtype)
            summed = wide.to(residual.dtype)
        else:
            summed = x.to(torch.float32) if residual_in_fp32 else x
        weight = None if weight is None else weight.to(dtype)
        y = functional.rms_norm(wide, wide.shape[-1:], weight, eps)
        return y if bias is None else y + bias.to(dtype), summed


class RMSNorm(nn.Module):
    """`rms_norm` of a width, with weights of 1 and, with `bias`, biases of 0 to begin with."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
            if bias:
                self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to 1 and the biases to 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)

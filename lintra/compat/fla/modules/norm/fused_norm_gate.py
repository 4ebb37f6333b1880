"""The norm of the mean square followed by a gate, as at the end of recurrent layers."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.compat.fla._arguments import known
from lintra.compat.fla.modules.norm.layernorm import wide_rms_norm
from lintra.ops.autocast import no_autocast

_ACTIVATIONS = {"swish": functional.silu, "silu": functional.silu, "sigmoid": torch.sigmoid}


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return rms_norm(x) times the activation of the gate g, x and g [... d], in x's dtype.

    `activation`: "swish" or "silu", g sigmoid(g), or "sigmoid". `rms_norm` says what the others do. Raises
    ValueError for another activation.
    """
    known("activation", activation, tuple(_ACTIVATIONS))
    y, summed = wide_rms_norm(x, weight, bias, residual, eps, residual_in_fp32)
    with no_autocast(x):
        y = (y * _ACTIVATIONS[activation](g.to(y.dtype))).to(x.dtype)
    return (y, summed) if prenorm else y


class FusedRMSNormGated(nn.Module):
    """`rms_norm_gated` of a width, with weights of 1 to begin with."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        known("activation", activation, tuple(_ACTIVATIONS))
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to 1."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return rms_norm_gated(
            x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps
        )

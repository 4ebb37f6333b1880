"""The short causal convolution of FLA's layers."""

from lintra.compat.fla.modules.causal_conv1d.ops import (
    ShortConvolution,
    causal_conv1d,
    causal_conv1d_update,
)

__all__ = ["ShortConvolution", "causal_conv1d", "causal_conv1d_update"]

"""The parts of FLA's layers that programs take from it beside the recurrences."""

from lintra.compat.fla.modules.causal_conv1d import ShortConvolution
from lintra.compat.fla.modules.norm import FusedRMSNormGated, L2Norm, RMSNorm

__all__ = ["FusedRMSNormGated", "L2Norm", "RMSNorm", "ShortConvolution"]

"""The parts of FLA's layers that programs take from it beside the recurrences."""

from lintra.compat.fla.modules.convolution import ShortConvolution
from lintra.compat.fla.modules.fused_norm_gate import FusedRMSNormGated
from lintra.compat.fla.modules.l2norm import L2Norm
from lintra.compat.fla.modules.layernorm import RMSNorm

__all__ = ["FusedRMSNormGated", "L2Norm", "RMSNorm", "ShortConvolution"]

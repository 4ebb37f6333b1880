"""Norms of FLA's layers, with a gate and without."""

from lintra.compat.fla.modules.norm.fused_norm_gate import FusedRMSNormGated
from lintra.compat.fla.modules.norm.l2norm import L2Norm
from lintra.compat.fla.modules.norm.layernorm import RMSNorm

__all__ = ["FusedRMSNormGated", "L2Norm", "RMSNorm"]

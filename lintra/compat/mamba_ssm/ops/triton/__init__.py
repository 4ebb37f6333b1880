"""Functions that mamba_ssm keeps under `triton`. Nothing here needs Triton."""

from lintra.compat.mamba_ssm.ops.triton import (
    layer_norm,
    layernorm_gated,
    selective_state_update,
    ssd_combined,
)

__all__ = ["layer_norm", "layernorm_gated", "selective_state_update", "ssd_combined"]

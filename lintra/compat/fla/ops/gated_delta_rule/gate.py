"""The decays of the gated delta rule as its layers make them."""

import torch
from torch import Tensor

from lintra.compat.fla._recurrence import decay_gate


def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return -exp(A_log) softplus(g + dt_bias) of g [... o], A_log [o] and dt_bias [o], in `output_dtype`."""
    return decay_gate(g, A_log, dt_bias).to(output_dtype)

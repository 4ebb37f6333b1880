"""The decays of Kimi delta attention as its layers make them."""

import torch
from torch import Tensor

from lintra.compat.fla._recurrence import decay_gate


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the logarithms of decays [... o d] of g [... o d], A_log of o numbers and dt_bias of o d.

    -exp(A_log) softplus(g + dt_bias), or with a lower bound l < 0 l sigmoid(exp(A_log) (g + dt_bias)), where
    A_log may be missing. In `output_dtype`. Raises ValueError where neither A_log nor a bound is given.
    """
    return log_decay(g, A_log, dt_bias, lower_bound).to(output_dtype)


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Return what `fused_kda_gate` does, in the dtype of sums."""
    rate = None if A_log is None else A_log.reshape(g.shape[-2], 1)
    bias = None if dt_bias is None else dt_bias.reshape(g.shape[-2:])
    return decay_gate(g, rate, bias, lower_bound)

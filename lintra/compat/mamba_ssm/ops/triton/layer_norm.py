"""Norms of a residual stream, by the names of mamba_ssm: `layer_norm_fn`, `rms_norm_fn` and `RMSNorm`.

Dropout, row scales and a second branch (`x1`) are not served.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.compat.arguments import refuse
from lintra.compat.mamba_ssm.ops.triton.layernorm_gated import layernorm_fn


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return the norm of x + residual [... d] in x's dtype and, with `prenorm`, that sum beside it.

    weight, bias [d]; the sum is returned in residual's dtype or, without a residual, in float32 with
    `residual_in_fp32`. Raises NotImplementedError for x1, weight1, bias1, rowscale, dropout_p above 0 and
    return_dropout_mask, ValueError for shapes that disagree.
    """
    for name, given in {"x1": x1, "weight1": weight1, "bias1": bias1, "rowscale": rowscale}.items():
        if given is not None:
            refuse(name, "it must be None")
    if dropout_p:
        refuse("dropout_p", f"it must be 0, got {dropout_p}")
    if return_dropout_mask:
        refuse("return_dropout_mask", "there is no dropout")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {list(x.shape)}, got {list(residual.shape)}")
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    y = layernorm_fn(total, weight, bias, None, eps, None, True, is_rms_norm).to(x.dtype)
    if not prenorm:
        return y
    kept = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    return y, total.to(kept)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return what `layer_norm_fn` does with the root mean square norm."""
    branch = (x1, weight1, bias1)
    options = (eps, dropout_p, rowscale, prenorm, residual_in_fp32, True, return_dropout_mask)
    return layer_norm_fn(x, weight, bias, residual, *branch, *options)


class RMSNorm(nn.Module):
    """Root mean square norm of a residual stream: see `rms_norm_fn`."""

    bias: None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0 else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        """Return the norm of x + residual [... d] and, with `prenorm`, that sum beside it."""
        if self.drop is not None:
            x = functional.dropout(x, self.drop.p, self.training)
        options = {"eps": self.eps, "prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
        return rms_norm_fn(x, self.weight, self.bias, residual, **options)

"""Division by the length."""

import torch
from torch import Tensor, nn

from lintra.ops import checks
from lintra.ops.autocast import no_autocast
from lintra.ops.norms import l2_norm as divided


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Return x [... d] divided by sqrt(x . x + eps), computed in the dtype of sums and rounded once, to
    `output_dtype` or x's."""
    with no_autocast(x):
        return divided(x.to(checks.sum_dtype(x.dtype)), eps=eps).to(output_dtype or x.dtype)


l2_norm = l2norm


class L2Norm(nn.Module):
    """`l2norm` as a module."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None):
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)

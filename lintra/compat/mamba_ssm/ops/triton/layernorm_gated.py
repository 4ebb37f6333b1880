"""Norms with a gate, by the names of mamba_ssm: `rmsnorm_fn`, `layernorm_fn` and their modules.

Zhang and Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.ops import checks


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Return the root mean square norm of x [... d] in x's dtype, as `layernorm_fn` without the mean."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Return the norm of x [... d] in x's dtype: norm(x) silu(z) or, unless `norm_before_gate`, norm(x
    silu(z)).

    weight and bias (None: 0) [d]; z like x (None: no gate). Each `group_size` neighbours are normed by
    themselves (None: all d). `eps` is added to the variance or, with `is_rms_norm`, to the mean square.
    Computed in the dtype of sums. Raises ValueError for shapes that disagree.
    """
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise ValueError("x must be a tensor [... d] of at least 1 axis")
    d = x.shape[-1]
    for name, given in {"weight": weight, "bias": bias}.items():
        if given is not None:
            checks.shape(name, given, "d", {"d": d})
    if z is not None and z.shape != x.shape:
        raise ValueError(f"z must have the shape of x, {list(x.shape)}, got {list(z.shape)}")
    size = d if group_size is None else group_size
    if size < 1 or d % size:
        raise ValueError(f"group_size must divide the width of x, {d}, got {group_size}")
    total = checks.sum_dtype(x.dtype)
    y = x.to(total)
    gate = None if z is None else functional.silu(z.to(total))
    if gate is not None and not norm_before_gate:
        y = y * gate
    groups = y if size == d else y.unflatten(-1, (d // size, size))
    if not is_rms_norm:
        groups = groups - groups.mean(-1, keepdim=True)
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).reshape(x.shape) * weight.to(
        total
    )
    y = y if bias is None else y + bias.to(total)
    y = y * gate if gate is not None and norm_before_gate else y
    return y.to(x.dtype)


class LayerNorm(nn.Module):
    """Layer norm with a gate, of weights and biases: see `layernorm_fn`."""

    rms = False
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        bias = None if self.rms else nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", bias)
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the norm of x [... d], gated by z [... d] if it is given."""
        options = (self.eps, self.group_size, self.norm_before_gate, self.rms)
        return layernorm_fn(x, self.weight, self.bias, z, *options)


class RMSNorm(LayerNorm):
    """Root mean square norm with a gate, of weights alone: see `rmsnorm_fn`."""

    rms = True

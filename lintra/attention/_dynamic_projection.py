"""Summaries of tokens: means of keys, and the same means of values, with weights that the keys decide.

Zhu et al. 2021, arXiv:2107.02192, "dynamic projection": P = softmax over the tokens of K W, K' = P^T K and
V' = P^T V. That is softmax attention of the columns of W to the keys, so the means over parts of a segment
merge. A bias beside W would be the same for all tokens and change nothing.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.ops.softmax_attention import PartialAttention, softmax_attention


class Norm(nn.Module):
    """Layer normalisation over the features of all heads together, x [... g f]."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.bias = nn.Parameter(torch.zeros(heads, width))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.layer_norm(x, weight.shape, weight, bias).to(x.dtype)


class DynamicProjection(nn.Module):
    """`rank` summaries of tokens k [... s g d], v [... s g e]; with `norm` they are normalised."""

    def __init__(self, heads: int, dim: int, value_dim: int, *, rank: int, norm: bool):
        super().__init__()
        self.widths = (dim, value_dim)
        bound = math.sqrt(6 / (dim + rank))  # Glorot and Bengio 2010
        self.weight = nn.Parameter(torch.empty(heads, dim, rank).uniform_(-bound, bound))
        norm = norm and rank > 0
        self.key_norm = Norm(heads, dim) if norm else nn.Identity()
        self.value_norm = Norm(heads, value_dim) if norm else nn.Identity()

    def forward(self, k: Tensor, v: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """The summaries k [... r g d], v [... r g e] of the tokens that are `real` [... s]."""
        return self.vectors(self.means(k, v, real), k.dtype)

    def means(self, k: Tensor, v: Tensor, real: Tensor) -> PartialAttention:
        """The mean keys beside the mean values, o [... g r d+e], and the logarithm of their weights' sum."""
        k, both = k.movedim(-2, -3), torch.cat((k, v), -1).movedim(-2, -3)
        columns = self.weight.mT.to(k.dtype)
        return softmax_attention(columns, k, both, visible=real[..., None, None, :], scale=1.0)

    def of_one(self, k: Tensor, v: Tensor) -> PartialAttention:
        """Return the means of a single token, k [... g d], v [... g e]."""
        both = torch.cat((k, v), -1)[..., None, :].expand(*k.shape[:-1], self.weight.shape[2], -1)
        return PartialAttention(both, torch.einsum("...gd,gdr->...gr", k, self.weight.to(k.dtype)))

    def vectors(self, means: PartialAttention, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The summaries k [... r g d], v [... r g e] that means [... g r d+e] make."""
        k, v = means.o.transpose(-2, -3).split(self.widths, -1)
        return self.key_norm(k).to(dtype), self.value_norm(v).to(dtype)

"""The feature maps as parts of a configuration: `build(heads, dim)` gives x [b t h d] -> [b t h f]."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lintra.config import fields
from lintra.ops import features
from lintra.ops.features import FeatureMapName


class FeatureMap:
    """Base of the maps. `size(d)` is f. `fused` names the map inside the sum that makes `build` an identity.
    `positive`: phi(q) . phi(k) is never negative, which a denominator needs. `never_zero`: it is above 0 for
    all q and k that rounding does not take to 0. That is no lower bound: it may be any fraction of
    |phi(q)| |phi(k)|, which products of rotated features may reach."""

    fused: ClassVar[FeatureMapName | None] = None
    positive: ClassVar[bool] = True
    never_zero: ClassVar[bool] = False

    def size(self, dim: int) -> int:
        return dim

    def build(self, heads: int, dim: int) -> nn.Module:
        return nn.Identity()


class Function(nn.Module):
    """A feature map without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@dataclass(frozen=True, kw_only=True)
class EluPlusOne(FeatureMap):
    """elu(x) + 1. Katharopoulos et al. 2020, arXiv:2006.16236, equation 7."""

    fused = "elu+1"
    never_zero = True


@dataclass(frozen=True, kw_only=True)
class Relu(FeatureMap):
    """max(x, 0)."""

    fused = "relu"


@dataclass(frozen=True, kw_only=True)
class SquaredRelu(FeatureMap):
    """max(x, 0)^2."""

    def build(self, heads: int, dim: int) -> nn.Module:
        return Function(features.squared_relu)


@dataclass(frozen=True, kw_only=True)
class Identity(FeatureMap):
    """x itself: signed weights, so only without a denominator."""

    positive = False


@dataclass(frozen=True, kw_only=True)
class Dpfp(FeatureMap):
    """Deterministic parameter-free projection. Schlag et al. 2021, arXiv:2102.11174, section 5.3."""

    nu: int = 1  # products kept for each entry; f = 2 d nu, of which those from nu = d on repeat others

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, nu=1)

    def size(self, dim: int) -> int:
        if self.nu >= 2 * dim:
            raise ValueError(
                f"nu must be below twice the head size {dim}, got {self.nu}; from nu={dim} on products repeat"
            )
        return 2 * dim * self.nu

    def build(self, heads: int, dim: int) -> nn.Module:
        return Function(partial(features.dpfp, nu=self.nu))


@dataclass(frozen=True, kw_only=True)
class Taylor2(FeatureMap):
    """The exponential to second order. Arora et al. 2024, arXiv:2402.18668, section 4.1."""

    never_zero = True

    def size(self, dim: int) -> int:
        return 1 + dim + dim * (dim + 1) // 2

    def build(self, heads: int, dim: int) -> nn.Module:
        return Function(features.taylor2)


@dataclass(frozen=True, kw_only=True)
class Hedgehog(FeatureMap):
    """softmax or exp of both signs of a learned projection. Zhang et al. 2024, arXiv:2402.04347, section 4.2.

    The paper prints exp, with which the length of a key counts too. The default is softmax, as in later code
    by the authors: the features of every key sum to 1, and nothing can overflow.
    """

    kind: Literal["softmax", "exp"] = "softmax"  # softmax over a token's features, or exp of each
    never_zero = True

    def __post_init__(self):
        fields.check(self)

    def size(self, dim: int) -> int:
        return 2 * dim

    def build(self, heads: int, dim: int) -> nn.Module:
        function = features.hedgehog if self.kind == "softmax" else features.hedgehog_exp
        return Projected(function, torch.eye(dim).repeat(heads, 1, 1))


@dataclass(frozen=True, kw_only=True)
class T2R(FeatureMap):
    """relu of a learned projection. Kasai et al. 2021, arXiv:2103.13076, section 2.2."""

    width: int = 32  # features per head

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, width=1)

    def size(self, dim: int) -> int:
        return self.width

    def build(self, heads: int, dim: int) -> nn.Module:
        weight = torch.empty(heads, dim, self.width)
        for head in weight:
            nn.init.kaiming_uniform_(head.mT, nonlinearity="relu")
        return Projected(features.t2r, weight)


class Projected(nn.Module):
    """A feature map of x W + b with W [h d f] and b [h f] learned."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], weight: Tensor):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(weight.new_zeros(weight.shape[0], weight.shape[2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

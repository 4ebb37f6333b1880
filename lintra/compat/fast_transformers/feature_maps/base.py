"""The interface of feature maps, and those that are a function of each number."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lintra.ops.features import FeatureMapName, elu_plus_one


class FeatureMap(nn.Module):
    """Base of feature maps, x [... d] -> [... f]. One of your own defines `forward`, or both of the others.

    `fused` names the map inside the sum that does the same, if there is one.
    """

    fused: ClassVar[FeatureMapName | None] = None

    def __init__(self, query_dims: int):
        super().__init__()
        self.query_dims = query_dims

    @classmethod
    def factory(cls, *args: Any, **kwargs: Any) -> "Callable[[int], FeatureMap]":
        """A function of query_dimensions, for a builder's `feature_map`; other arguments are given here."""

        def build(query_dims: int) -> FeatureMap:
            return cls(query_dims, *args, **kwargs)

        return build

    def new_feature_map(self, device: torch.device | str | None = None) -> None:
        """Sample a random map again: attention calls it before each sequence. Any other map stays."""

    def forward_queries(self, x: Tensor) -> Tensor:
        return self(x)

    def forward_keys(self, x: Tensor) -> Tensor:
        return self(x)


class ActivationFunctionFeatureMap(FeatureMap):
    """A function applied to each number."""

    def __init__(self, query_dims: int, activation_function: Callable[[Tensor], Tensor]):
        super().__init__(query_dims)
        self.activation_function = activation_function

    def forward(self, x: Tensor) -> Tensor:
        return self.activation_function(x)


class EluFeatureMap(ActivationFunctionFeatureMap):
    """elu(x) + 1, without its cancellation below 0."""

    fused = "elu+1"

    def __init__(self, query_dims: int):
        super().__init__(query_dims, elu_plus_one)


elu_feature_map = EluFeatureMap

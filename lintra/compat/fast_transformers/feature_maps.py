"""Feature maps: `map(query_dimensions)` gives a module of x [n l h d] -> [n l h f].

Random ones are drawn when they are built and kept in the buffer `omega`, which is saved; the forward pass
draws nothing. `new_feature_map(device)` draws anew.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from lintra.ops.features import FeatureMapName, elu_plus_one
from lintra.ops.random_features import independent_gaussian, orthogonal_gaussian


class FeatureMap(nn.Module):
    """Base. `fused` names the map inside the sum that does the same, if there is one."""

    fused: ClassVar[FeatureMapName | None] = None

    def __init__(self, query_dims: int):
        super().__init__()
        self.query_dims = query_dims

    def new_feature_map(self, device: torch.device | str = "cpu") -> None:
        """Draws a random map anew; the others stay."""

    def forward_queries(self, x: Tensor) -> Tensor:
        return self(x)

    def forward_keys(self, x: Tensor) -> Tensor:
        return self(x)


class ActivationFunctionFeatureMap(FeatureMap):
    """A function applied to each number."""

    def __init__(self, activation_function: Callable[[Tensor], Tensor], query_dims: int):
        super().__init__(query_dims)
        self.activation_function = activation_function

    @classmethod
    def factory(cls, activation_function: Callable[[Tensor], Tensor]) -> Callable[[int], FeatureMap]:
        """What a builder's `feature_map` is set to."""
        return partial(cls, activation_function)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation_function(x)


class EluFeatureMap(ActivationFunctionFeatureMap):
    """elu(x) + 1, without its cancellation below 0."""

    fused = "elu+1"

    def __init__(self, query_dims: int):
        super().__init__(elu_plus_one, query_dims)


elu_feature_map = EluFeatureMap


class RandomFourierFeatures(FeatureMap):
    """cos and sin of random projections: estimates exp(-t |x - y|^2 / 2), t being `softmax_temp`.

    n_dims features (default query_dimensions). `redraw` and `deterministic_eval`, which say when the forward
    pass draws anew, must say never: see `new_feature_map`.
    """

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = False,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        super().__init__(query_dimensions)
        self.n_dims = n_dims or query_dimensions
        self.query_dimensions = query_dimensions
        self.softmax_temp = query_dimensions**-0.5 if softmax_temp is None else softmax_temp
        self.orthogonal = orthogonal
        self.redraw, self.deterministic_eval = redraw, deterministic_eval
        self.omega: Tensor
        self.register_buffer("omega", torch.zeros(query_dimensions, self.n_dims // 2))
        self.new_feature_map()

    @classmethod
    def factory(cls, **options) -> Callable[[int], FeatureMap]:
        """What a builder's `feature_map` is set to."""
        return partial(cls, **options)

    def new_feature_map(self, device: torch.device | str = "cpu") -> None:
        # The seed comes from the global generator, so that torch.manual_seed decides the map.
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        draw = orthogonal_gaussian if self.orthogonal else independent_gaussian
        omega = draw(self.omega.shape[1], self.query_dimensions, "chi", generator)
        self.omega = omega.mT.to(self.omega.device, self.omega.dtype)

    def forward(self, x: Tensor) -> Tensor:
        u = self._project(x)
        return torch.cat((u.cos(), u.sin()), -1) * math.sqrt(2 / self.n_dims)

    def _project(self, x: Tensor) -> Tensor:
        return x * math.sqrt(self.softmax_temp) @ self.omega


class SmoothedRandomFourierFeatures(RandomFourierFeatures):
    """The same with one more feature, `smoothing`: keeps the estimate away from 0."""

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = False,
        smoothing: float = 1.0,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        count = (n_dims or query_dimensions) - 1
        super().__init__(query_dimensions, count, softmax_temp, orthogonal, redraw, deterministic_eval)
        self.smoothing = smoothing

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat((y, torch.full_like(y[..., :1], self.smoothing)), -1)


class Favor(RandomFourierFeatures):
    """exp of random projections of both signs: estimates exp(t x . y).

    With `stabilize` the largest exponent of each sequence is subtracted, keys and queries each by their own;
    that of keys looks at the whole sequence, so it is refused where attention is causal.
    """

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = True,
        stabilize: bool = False,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        super().__init__(query_dimensions, n_dims, softmax_temp, orthogonal, redraw, deterministic_eval)
        self.stabilize = stabilize

    def forward(self, x: Tensor) -> Tensor:
        u = self._project(x)
        offset = self.softmax_temp * x.square().sum(-1, keepdim=True) / 2 + math.log(self.n_dims) / 2
        exponents = torch.cat((u - offset, -u - offset), -1)
        if self.stabilize:
            exponents = exponents - exponents.amax((1, 3), keepdim=True).detach()
        return exponents.exp()


class GeneralizedRandomFeatures(RandomFourierFeatures):
    """Any function of random projections; n_dims of them (default query_dimensions)."""

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float = 1.0,
        orthogonal: bool = True,
        kernel_fn: Callable[[Tensor], Tensor] = torch.relu,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        count = 2 * (n_dims or query_dimensions)
        super().__init__(query_dimensions, count, softmax_temp, orthogonal, redraw, deterministic_eval)
        self.kernel_fn = kernel_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel_fn(self._project(x))

"""Random features. They are sampled when a map is built and kept in the buffer `omega`, which is saved."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lintra.compat.fast_transformers.feature_maps.base import FeatureMap
from lintra.ops.random_features import independent_gaussian, orthogonal_gaussian


def orthogonal_random_matrix_(w: Tensor) -> None:
    """Fill w [rows columns] with columns as long as normal vectors, orthogonal in each block of `rows`."""
    rows, columns = w.shape
    with torch.no_grad():
        w.copy_(orthogonal_gaussian(columns, rows, "chi", _generator()).mT)


def _generator() -> torch.Generator:
    """A generator seeded from the global one, so that torch.manual_seed determines its draws."""
    return torch.Generator().manual_seed(int(torch.randint(2**62, ())))


class RandomFourierFeatures(FeatureMap):
    """cos and sin of random projections: estimates exp(-t |x - y|^2 / 2), t being `softmax_temp`.

    n_dims features (default query_dimensions), from `omega` [query_dimensions n_dims/2]. Of the calls of
    `new_feature_map` the first and every `redraw`-th after it sample again; none does in evaluation mode with
    `deterministic_eval`.
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
        self._calls = 0
        self._draw()

    def new_feature_map(self, device: torch.device | str | None = None) -> None:
        """Sample again, if `redraw` and `deterministic_eval` say so, on that device (default: where it is).

        Attention never calls it. Do so between steps of training, not in the middle of a sequence.
        """
        if self.deterministic_eval and not self.training:
            return
        if self._calls % self.redraw == 0:
            self._draw(device)
        self._calls += 1

    def _draw(self, device: torch.device | str | None = None) -> None:
        draw = orthogonal_gaussian if self.orthogonal else independent_gaussian
        omega = draw(self.omega.shape[1], self.query_dimensions, "chi", _generator())
        place = self.omega.device if device is None else device
        self.omega = omega.mT.to(place, self.omega.dtype).contiguous()  # as safetensors requires

    def forward(self, x: Tensor) -> Tensor:
        u = self._project(x)
        return torch.cat((u.cos(), u.sin()), -1) * math.sqrt(2 / self.n_dims)

    def _project(self, x: Tensor) -> Tensor:
        return x * math.sqrt(self.softmax_temp) @ self.omega


class SmoothedRandomFourierFeatures(RandomFourierFeatures):
    """Random Fourier features with one more feature, `smoothing`: it keeps the estimate away from 0."""

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
    that of keys looks at the whole sequence, so it is refused where attention is causal, and x must have the
    axis of sequences second, [n l ... d].
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
            if x.dim() < 3:
                raise ValueError(f"stabilize takes sequences [n l ... d], got x of {list(x.shape)}")
            exponents = exponents - exponents.amax((1, -1), keepdim=True).detach()
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


def begin(feature_map: nn.Module, device: torch.device) -> None:
    """Call `new_feature_map`, as attention does before a sequence, unless it is the one above.

    A user's map may draw each time; those of this file are sampled when they are built.
    """
    draw = getattr(feature_map, "new_feature_map", None)
    if draw is not None and getattr(draw, "__func__", None) is not RandomFourierFeatures.new_feature_map:
        draw(device)

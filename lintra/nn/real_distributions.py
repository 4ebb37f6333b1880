"""Output distributions over real numbers, whose parameters are a network's last numbers, the location first.

A network predicts in units of its own (`lintra.nn.scaling`): a target here is such a standardised number. No
scale falls below SHARPEST of these units, so that a series without noise has a finite likelihood.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from lintra.config import fields
from lintra.ops.autocast import widened

SHARPEST = 1e-3
NODES = 64  # of the quadrature of a cumulative distribution
_HALVINGS = 60  # of an interval in float64


class RealDistribution:
    """Base: `size` parameters of a distribution over the real numbers."""

    @property
    def size(self) -> int:
        """The number of parameters."""
        raise NotImplementedError

    def loss(self, params: Float[Tensor, "*b p"], target: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return a proper score of each target, the lower the better: -log p in nats, except for
        quantiles."""
        raise NotImplementedError

    def quantile(self, params: Float[Tensor, "*b p"], level: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return the quantile at the probability `level`, above 0 and below 1."""
        raise NotImplementedError

    def median(self, params: Float[Tensor, "*b p"]) -> Float[Tensor, "*b"]:
        """Return the median of each distribution: of a symmetric one its location."""
        return widened(params)[0][..., 0]

    def sample(
        self, params: Float[Tensor, "*b p"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "*b"]:
        """Return a random number of each distribution."""
        return self.quantile(params, _uniform(params, generator))

    def check(self, params: Tensor, target: Tensor) -> None:
        """Raise ValueError unless there are parameters for each target, a floating number."""
        if params.shape[-1:] != (self.size,) or params.shape[:-1] != target.shape:
            raise ValueError(
                f"params must be [..., {self.size}], one row a target, got {list(params.shape)} for targets "
                f"of shape {list(target.shape)}"
            )
        if not target.is_floating_point():
            raise ValueError(f"targets must be of a floating type, got {target.dtype}")


@dataclass(frozen=True, kw_only=True)
class Gaussian(RealDistribution):
    """Normal distribution. Parameters: the mean, and the standard deviation before a softplus."""

    @property
    def size(self) -> int:
        return 2

    def loss(self, params: Tensor, target: Tensor) -> Tensor:
        self.check(params, target)
        mean, sigma = self._moments(params)
        return 0.5 * ((target - mean) / sigma).square() + sigma.log() + 0.5 * math.log(2 * math.pi)

    def quantile(self, params: Tensor, level: Tensor) -> Tensor:
        mean, sigma = self._moments(params)
        return mean + sigma * torch.special.ndtri(level.double()).to(mean.dtype)

    def _moments(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = widened(params)[0].unbind(-1)
        return mean, _positive(spread)


@dataclass(frozen=True, kw_only=True)
class StudentT(RealDistribution):
    """Student's t-distribution, for data with outliers.

    Parameters: the location, then the scale and the degrees of freedom before a softplus. The degrees of
    freedom are above 2, so that the variance is finite."""

    @property
    def size(self) -> int:
        return 3

    def loss(self, params: Tensor, target: Tensor) -> Tensor:
        self.check(params, target)
        loc, scale, df = self._parts(params)
        z = (target - loc) / scale
        tail = 0.5 * (df + 1) * torch.log1p(z.square() / df)
        normaliser = torch.lgamma(0.5 * df) - torch.lgamma(0.5 * (df + 1)) + 0.5 * (math.pi * df).log()
        return tail + normaliser + scale.log()

    def quantile(self, params: Tensor, level: Tensor) -> Tensor:
        """Find the quantile by bisection between those of a normal distribution and of two degrees of
        freedom, which enclose it."""
        loc, scale, df = self._parts(params)
        level = level.double()
        upper = torch.maximum(level, 1 - level)
        near = torch.special.ndtri(upper)
        far = (2 * upper - 1) / (2 * upper * (1 - upper)).sqrt()
        df64 = df.double()
        for _ in range(_HALVINGS):
            middle = 0.5 * (near + far)
            below = t_cumulative(middle, df64) < upper
            near, far = torch.where(below, middle, near), torch.where(below, far, middle)
        return loc + scale * torch.where(level < 0.5, -near, near).to(loc.dtype)

    def sample(self, params: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample by the polar method of Bailey 1994, Mathematics of Computation 62(206)."""
        loc, scale, df = self._parts(params)
        radius, angle = _uniform(params, generator), _uniform(params, generator)
        squared = df.double() * torch.expm1(-2 / df.double() * radius.log())
        return loc + scale * (squared.sqrt() * torch.cos(2 * math.pi * angle)).to(loc.dtype)

    def _parts(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loc, spread, freedom = widened(params)[0].unbind(-1)
        return loc, _positive(spread), 2 + _positive(freedom)


@dataclass(frozen=True, kw_only=True)
class Quantiles(RealDistribution):
    """Quantiles at some levels, learned by their pinball losses, with no assumption about a shape.

    The parameters are the middle one, then the differences of neighbours before a softplus: quantiles cannot
    cross. Between levels the quantile function is a straight line; beyond the outermost it is an
    exponential tail through the last two (Park et al. 2022, arXiv:2111.06581, section 3).
    """

    # Rising probabilities, of which each has its quantile.
    levels: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)

    def __post_init__(self):
        fields.check(self)
        rising = all(a < b for a, b in pairwise(self.levels))
        if len(self.levels) < 2 or not rising or not 0 < self.levels[0] <= self.levels[-1] < 1:
            raise ValueError(
                f"levels must be two or more, rising, above 0 and below 1, got {fields.shown(self.levels)}"
            )

    @property
    def size(self) -> int:
        return len(self.levels)

    def loss(self, params: Tensor, target: Tensor) -> Tensor:
        """Twice the mean of the pinball losses over the levels: about the continuous ranked probability
        score."""
        self.check(params, target)
        below = target[..., None] - self.quantiles(params)
        levels = self._levels(below)
        return 2 * torch.maximum(levels * below, (levels - 1) * below).mean(-1)

    def quantiles(self, params: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        """Return the quantile at each level, in their order."""
        params = widened(params)[0]
        middle = self.size // 2
        steps = _positive(params[..., 1:])
        down = -steps[..., :middle].flip(-1).cumsum(-1).flip(-1)
        up = steps[..., middle:].cumsum(-1)
        centre = params[..., :1]
        return torch.cat((centre + down, centre, centre + up), -1)

    def quantile(self, params: Tensor, level: Tensor) -> Tensor:
        at = self.quantiles(params)
        levels, level = self._levels(at), level.to(at.dtype)
        right = torch.searchsorted(levels, level.contiguous()).clamp(1, self.size - 1)
        low, high = levels[right - 1], levels[right]
        a, b = (at.gather(-1, place[..., None])[..., 0] for place in (right - 1, right))
        inside = a + (b - a) * (level - low) / (high - low)
        left = a + (b - a) * (level / low).log() / (high / low).log()
        beyond = b + (b - a) * ((1 - high) / (1 - level)).log() / ((1 - low) / (1 - high)).log()
        return torch.where(level < levels[0], left, torch.where(level > levels[-1], beyond, inside))

    def median(self, params: Tensor) -> Tensor:
        return self.quantile(params, torch.full_like(params[..., 0], 0.5))

    def _levels(self, like: Tensor) -> Tensor:
        return torch.tensor(self.levels, dtype=like.dtype, device=like.device)


def t_cumulative(t: Tensor, df: Tensor) -> Tensor:
    """Return the probability below t >= 0 of Student's t-distribution, [*b] both.

    With t = sqrt(df) tan(a) the density is cos(a)^(df - 1), smooth on all of [0, a]: Gauss and Legendre."""
    places, weights = (x.to(t) for x in _quadrature())
    angle = torch.atan(t / df.sqrt())
    inside = torch.cos(0.5 * angle[..., None] * (1 + places)) ** (df[..., None] - 1)
    log_beta = torch.lgamma(0.5 * df) + math.lgamma(0.5) - torch.lgamma(0.5 * (df + 1))
    return 0.5 + 0.5 * angle * (inside * weights).sum(-1) * (-log_beta).exp()


@cache
def _quadrature() -> tuple[Tensor, Tensor]:
    """Return the places of Gauss and Legendre in [-1, 1] and their weights."""
    places, weights = np.polynomial.legendre.leggauss(NODES)
    return torch.from_numpy(places), torch.from_numpy(weights)


def _positive(x: Tensor) -> Tensor:
    return functional.softplus(x) + SHARPEST


def _uniform(params: Tensor, generator: torch.Generator | None) -> Tensor:
    """Numbers above 0 and below 1, in float32 too, one for each distribution of params [*b p]; from the CPU,
    so that every device has the same."""
    number = torch.rand(params.shape[:-1], generator=generator, dtype=torch.float64, device="cpu")
    return number.clamp(2.0**-24, 1 - 2.0**-24).to(params.device)

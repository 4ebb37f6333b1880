"""Output distributions over the symbols 0 .. n-1, whose parameters are a network's last numbers."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from lintra.config import fields
from lintra.ops import checks
from lintra.ops.autocast import widened


class Distribution:
    """Base: `size` parameters for `vocabulary` symbols."""

    def __init__(self, vocabulary: int, size: int):
        self.vocabulary, self.size = vocabulary, size

    def log_prob(self, params: Float[Tensor, "*b p"], target: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """The natural logarithm of the probability of each target."""
        raise NotImplementedError

    def log_probs(self, params: Float[Tensor, "*b p"]) -> Float[Tensor, "*b n"]:
        """The natural logarithms of the probabilities of all symbols."""
        raise NotImplementedError

    def quantile(self, params: Float[Tensor, "*b p"], level: Float[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Return the smallest symbol whose cumulative probability exceeds `level`, in [0, 1).

        Raises ValueError, on a CPU, for params that are no numbers.
        """
        return quantile(self.log_probs(params).softmax(-1), level)

    def check(self, params: Tensor, target: Tensor) -> None:
        """Raise ValueError unless every target is a symbol and has its parameters.

        On a GPU and in a graph the targets' values are not looked at: that would stop the device.
        """
        if params.shape[-1:] != (self.size,) or params.shape[:-1] != target.shape:
            raise ValueError(
                f"params must be [..., {self.size}], one row a target, got {list(params.shape)} for targets "
                f"of shape {list(target.shape)}"
            )
        if target.dtype not in (torch.int64, torch.int32, torch.uint8):
            raise ValueError(f"targets must be int64, int32 or uint8, got {target.dtype}")
        checks.symbols("targets", target, self.vocabulary - 1)


def quantile(probs: Float[Tensor, "*b n"], level: Float[Tensor, "*b"]) -> Int[Tensor, "*b"]:
    """The first symbol at which the cumulative sum of `probs` passes `level` times all of it."""
    cumulative = probs.to(_finest(probs)).cumsum(-1)
    _check_numbers(cumulative[..., -1])
    level = (level.to(cumulative) * cumulative[..., -1])[..., None]
    return torch.searchsorted(cumulative, level, right=True)[..., 0].clamp(max=probs.shape[-1] - 1)


def _finest(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def _check_numbers(total: Tensor) -> None:
    """Raise ValueError for infinite or missing probabilities, where that is readable; not on a GPU, which
    that would stop."""
    if checks.readable(total) and not bool(total.isfinite().all()):
        raise ValueError("the probabilities to draw from are no numbers: is the model sound?")


@dataclass(frozen=True, kw_only=True)
class Logits:
    """One logit for each symbol."""

    def build(self, vocabulary: int) -> Distribution:
        return Categorical(vocabulary, vocabulary)


@dataclass(frozen=True, kw_only=True)
class LogisticMixture:
    """A mixture of logistic densities over levels, each level the mass of its interval.

    Salimans et al. 2017, arXiv:1701.05517, section 2.1.
    """

    components: int = 10  # logistics of the mixture

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, components=1)

    def build(self, vocabulary: int) -> Distribution:
        if vocabulary < 2:
            raise ValueError(f"a mixture over levels needs a vocabulary of at least 2, got {vocabulary}")
        return DiscretisedLogistics(vocabulary, 3 * self.components)


class Categorical(Distribution):
    """params [.. n] are logits."""

    def log_prob(self, params: Tensor, target: Tensor) -> Tensor:
        self.check(params, target)
        loss = functional.cross_entropy(
            widened(params)[0].reshape(-1, self.size), target.flatten().long(), reduction="none"
        )
        return -loss.reshape(target.shape)

    def log_probs(self, params: Tensor) -> Tensor:
        return torch.log_softmax(widened(params)[0], -1)


class DiscretisedLogistics(Distribution):
    """params [.. 3 m]: mixture logits, means and log scales of m components; levels stand on [-1, 1]."""

    min_log_scale, max_log_scale = -7.0, 7.0  # at 256 levels an eighth of one; 550 times the range

    def log_prob(self, params: Tensor, target: Tensor) -> Tensor:
        self.check(params, target)
        params = widened(params)[0]
        logits, mean, log_scale = params.chunk(3, -1)
        sharpness, half = self._sharpness(log_scale), 1 / (self.vocabulary - 1)
        target = target.long()[..., None]  # a level of uint8 would be compared modulo 256
        centre = (2 * half * target.to(params.dtype) - 1 - mean) * sharpness
        reach = half * sharpness
        # sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)): no difference of near numbers.
        # The first level reaches down to -inf, the last one up to inf.
        below_upper = functional.logsigmoid(centre + reach).masked_fill(target == self.vocabulary - 1, 0.0)
        above_lower = functional.logsigmoid(reach - centre).masked_fill(target == 0, 0.0)
        between = torch.log(-torch.expm1(-2 * reach))
        between = between.masked_fill((target == 0) | (target == self.vocabulary - 1), 0.0)
        mass = below_upper + above_lower + between
        return torch.logsumexp(torch.log_softmax(logits, -1) + mass, -1)

    def log_probs(self, params: Tensor) -> Tensor:
        """Return `log_prob` of every level at less than half the cost: each edge is computed once."""
        logits, mean, log_scale = widened(params)[0].chunk(3, -1)
        sharpness = self._sharpness(log_scale)
        half = 1 / (self.vocabulary - 1)
        places = torch.arange(1, self.vocabulary, device=params.device, dtype=mean.dtype)
        edges = (half * (2 * places - 1) - 1 - mean[..., None]) * sharpness[..., None]  # [.. m n-1]
        nearer = functional.logsigmoid(edges.abs())  # the mass on the side of the mean
        below, above = nearer + edges.clamp(max=0), nearer - edges.clamp(min=0)
        between = torch.log(-torch.expm1(-2 * half * sharpness))[..., None]
        mass = functional.pad(below, (0, 1)) + functional.pad(above, (1, 0))
        mass = mass + functional.pad(between.expand(*between.shape[:-1], self.vocabulary - 2), (1, 1))
        return torch.logsumexp(torch.log_softmax(logits, -1)[..., None] + mass, -2)

    def quantile(self, params: Tensor, level: Tensor) -> Tensor:
        """Find the level from the masses below about 2 sqrt(n) of the n edges: a coarse row, then a fine
        one."""
        logits, mean, log_scale = params.to(_finest(params)).chunk(3, -1)
        sharpness = self._sharpness(log_scale)
        weights = logits.softmax(-1)
        _check_numbers((weights + mean + log_scale).sum(-1))
        level = level.to(weights)[..., None]

        def passed(edges: Tensor) -> Tensor:
            """Return how many of the edges, each before a level, [.. e], have no more than `level` below
            them."""
            places = (2 * edges - 1) / (self.vocabulary - 1) - 1
            below = torch.sigmoid((places[..., None] - mean[..., None, :]) * sharpness[..., None, :])
            below = (below @ weights[..., None])[..., 0]
            return ((below <= level) & (edges < self.vocabulary)).sum(-1, keepdim=True)

        stride = math.isqrt(self.vocabulary - 1) + 1
        like = {"dtype": weights.dtype, "device": weights.device}
        coarse = stride * passed(torch.arange(stride, self.vocabulary, stride, **like))
        return (coarse + passed(coarse + torch.arange(1, stride, **like)))[..., 0]

    def _sharpness(self, log_scale: Tensor) -> Tensor:
        """Return the factor of a distance from a mean."""
        return (-log_scale.clamp(self.min_log_scale, self.max_log_scale)).exp()

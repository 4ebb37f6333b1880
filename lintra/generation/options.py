"""GenerationOptions: how symbols are sampled and how far, for Python and the command line alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lintra.config import fields
from lintra.native.quantize import DTYPES, Weights
from lintra.nn.distributions import Distribution, quantile

_ZERO = 2.0**-150  # numbers up to it are 0 in float32


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Rule by which a symbol is sampled from a distribution.

    temperature divides the log-probabilities, 0 takes the most probable symbol; top_k keeps the k most
    probable symbols, and those as probable as the last of them; top_p the fewest that hold at least that
    share of the probability (Holtzman et al. 2020, arXiv:1904.09751, section 3.1). Both filters apply after
    the temperature.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        fields.check(self)
        fields.not_negative(self, "temperature")
        fields.at_least(self, top_k=1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    def probabilities(self, log_probs: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Return the probabilities that are sampled from."""
        if self.temperature <= _ZERO:
            one = 0 * log_probs.amax(1, keepdim=True) + 1  # NaN where there are no numbers
            return torch.zeros_like(log_probs).scatter(1, log_probs.argmax(1, keepdim=True), one)
        # Relative to the largest: a tiny temperature must not make all of them -inf.
        temperature = min(self.temperature, torch.finfo(log_probs.dtype).max)
        log_probs = (log_probs - log_probs.amax(1, keepdim=True)) / temperature
        if self.top_k is not None and self.top_k < log_probs.shape[1]:
            least = log_probs.topk(self.top_k, 1).values[:, -1:]
            log_probs = log_probs.masked_fill(log_probs < least, -torch.inf)
        probs = log_probs.softmax(1)
        if self.top_p is None:
            return probs
        # Stable: of equal ones the first are kept, on every processor.
        ordered, order = probs.sort(dim=1, descending=True, stable=True)
        enough = ordered.cumsum(1) - ordered >= self.top_p
        enough[:, :1] = False  # also where top_p is 0 in float32
        probs = probs.masked_fill(enough.gather(1, order.argsort(1)), 0.0)
        return probs / probs.sum(1, keepdim=True)

    def draw(
        self, output: Distribution, params: Float[Tensor, "b p"], uniform: Float[Tensor, "b"]
    ) -> Int[Tensor, "b"]:
        """The symbol at which the cumulative probability passes `uniform`, numbers in [0, 1)."""
        if self.temperature == 1 and self.top_k is self.top_p is None:
            return output.quantile(params, uniform)
        return quantile(self.probabilities(output.log_probs(params)), uniform)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Settings of a generation, apart from the model and its tensors.

    temperature, top_k and top_p are those of `Sampler`. The global random generator is not used.
    Weights other than float32 are rounded copies, which a fused step on a CPU
    (`lintra.generation.native_decode`) reads in less time; the prompt goes through the model as it is.
    A sequence ends with the symbol `end`, or as soon as its last tokens are one of the sequences `stop`,
    which stays in it; tokens of the prompt do not count. What follows is filled up with `end`, or with -1
    where that is None. Generation ends with the last sequence.
    Raises ValueError for a value out of range and TypeError for one of another type.
    """

    steps: int  # tokens to generate, at most
    temperature: float = 1.0  # below 1: more probable tokens, 0: the most probable
    top_k: int | None = None  # only among the k most probable tokens
    top_p: float | None = None  # only among the fewest that hold this probability
    seed: int | None = None  # a seed gives the same sequences, however many; None: new ones each time
    batch: int | None = None  # sequences; None: as many as prompts or sources, without them 1
    state_dtype: torch.dtype | None = None  # bfloat16, for mechanisms that forget: see `cast_state`
    weights: Weights = "float32"
    end: int | None = None  # the symbol that ends a sequence
    stop: Sequence[Sequence[int]] = ()  # symbols that end one together; of a model of bytes also [b"\n\n"]

    def __post_init__(self):
        object.__setattr__(self, "stop", _sequences(self.stop))
        fields.check_one("end", int | None, self.end)
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise ValueError(f"steps must be an integer of at least 0, got {self.steps}")
        _ = self.sampler  # checks its own settings
        fields.check_one("batch", int | None, self.batch)
        fields.check_one("seed", int | None, self.seed)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must have at most 64 bits, got {self.seed}")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch must be at least 1 sequence, got {self.batch}")
        if self.weights not in DTYPES:
            raise ValueError(f"weights must be one of {', '.join(DTYPES)}, got {self.weights!r}")
        if self.weights != "float32" and self.state_dtype is not None:
            raise ValueError(
                f"a fused step keeps its sums in float32: weights={self.weights!r} needs state_dtype=None"
            )

    @property
    def sampler(self) -> Sampler:
        """Return the sampler of these settings."""
        return Sampler(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    @classmethod
    def of(cls, options: "GenerationOptions | None", keywords: dict[str, Any]) -> "GenerationOptions":
        """Return the options, or those given as keywords. Raises TypeError where both are given."""
        if options is None:
            return cls(**keywords)
        if not isinstance(options, GenerationOptions):
            raise TypeError(f"options must be GenerationOptions, got {type(options).__name__}")
        if keywords:
            raise TypeError(f"options are given: {', '.join(keywords)} must be set in them, not beside them")
        return options


def _sequences(stop: Any) -> tuple[tuple[int, ...], ...]:
    """Return stop sequences as tuples. Raises TypeError or ValueError for anything else."""
    several = isinstance(stop, list | tuple)
    found = tuple(tuple(x) if isinstance(x, list | tuple | bytes) else x for x in stop) if several else stop
    if not fields.fits(tuple[tuple[int, ...], ...], found):
        raise TypeError(
            f"stop must be sequences of symbols, such as [[3, 4]] or [b'\\n'], got {fields.shown(stop)}"
        )
    if () in found:
        raise ValueError("stop must be sequences of at least one symbol, got an empty one")
    return found

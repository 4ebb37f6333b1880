"""Scores over many samples, their uncertainty, and whether they are likelihoods."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from lintra.allocator import release_freed_memory
from lintra.generation.sampling import evaluation
from lintra.models import Decoder, Model
from lintra.nn.parameters import reference_param
from lintra.tasks import Report, Task, predict

# What the probabilities of all symbols may sum to, beside 1: in float32 those of the narrowest mixture of
# logistics miss it by 3e-5, all others by less than 5e-6.
TOLERANCE = 1e-4
SUMMED = 1024  # predictions whose probabilities are

RELEASED = 16  # batches after which memory is released: otherwise it grows by one large tensor a batch

Stopped = Callable[[], bool]  # called after each batch: whether to skip the rest


@dataclass(frozen=True)
class Estimate:
    """A mean over the predictions of all samples, and its standard error over the samples."""

    mean: float
    error: float  # nan for a single sample
    samples: int
    predictions: int  # of all samples together

    @classmethod
    def of(cls, sums: Tensor, weights: Tensor) -> "Estimate":
        """Return the estimate from sums [n] over the predictions of each sample, `weights` [n] in number.

        Where the numbers differ, the error is that of a ratio of two means (Cochran 1977, Sampling
        Techniques, chapter 6).
        """
        sums, weights = sums.double(), weights.double()
        n, mean = len(sums), sums.sum() / weights.sum()
        spread = (sums - mean * weights).square().sum() * (n / (n - 1)) if n > 1 else torch.tensor(math.nan)
        error = spread.sqrt() / weights.sum()
        return cls(float(mean), float(error), n, int(weights.sum()))

    def as_json(self) -> dict[str, float | None]:
        """Return the fields by name, an unknown error as None."""
        return {**asdict(self), "error": None if math.isnan(self.error) else self.error}


def scores(
    model: Model,
    task: Task,
    indices: Sequence[int],
    *,
    batch: int,
    split: Literal["test", "validate"] = "test",
    report: Report = lambda done: None,
    stopped: Stopped = lambda: False,
) -> dict[str, Estimate]:
    """Score a model on the samples of the task's test set at these places -> an estimate for each score.

    report is called with how many samples are done; once `stopped` returns True, the rest is left out.
    split: "validate" for the scores by which models are chosen.
    """
    sums: dict[str, list[Tensor]] = {}
    device = next(model.parameters()).device
    with evaluation(model):
        for chosen in _batches(len(indices), batch, report, stopped):
            samples = getattr(task, split).__getitems__([indices[i] for i in chosen])
            for name, x in task.per_sample(model, {k: v.to(device) for k, v in samples.items()}).items():
                sums.setdefault(name, []).append(x.cpu())
    together = {name: torch.cat(parts) for name, parts in sums.items()}
    weights = together.pop("weight")
    return {name: Estimate.of(x, weights) for name, x in together.items()}


@torch.no_grad()
def nats(
    model: Decoder,
    images: Tensor,
    *,
    batch: int,
    report: Report = lambda done: None,
    stopped: Stopped = lambda: False,
) -> Tensor:
    """Return -log p of every value of images [n t] that the model predicts, given those before it -> [n t']
    float32, of the first of them if stopped.

    t' is t, or t - 1 for a model without a start symbol, which does not predict the first value.
    """
    device, first = reference_param(model).device, 0 if model.start_token is not None else 1
    # One piece of memory: many small ones would lie between the large ones of a pass, and keep their room.
    found, done = torch.empty(len(images), images.shape[1] - first), 0
    with evaluation(model):
        for chosen in _batches(len(images), batch, report, stopped):
            tokens = images[chosen.start : chosen.stop].to(device, torch.int64)
            found[chosen.start : chosen.stop] = -predict(model, {"tokens": tokens})[1]
            done = chosen.stop
    return found[:done]


def of_images(nats: Tensor, values: int, levels: int) -> dict[str, Estimate]:
    """bits/dim of images of `values` values from what `nats` gives, by the two conventions there are: without
    the first value, and with it. A model that does not predict the first one is charged log2(levels) for it.
    """
    bits = nats.double() / math.log(2)
    first = torch.full((len(bits),), math.log2(levels)) if bits.shape[1] < values else bits[:, 0]
    others = bits[:, bits.shape[1] - (values - 1) :].sum(1)
    return {
        name: Estimate.of(sums, torch.full((len(bits),), n))
        for name, sums, n in (
            ("bits_per_dim_without_the_first", others, values - 1),
            ("bits_per_dim", others + first, values),
        )
    }


@torch.no_grad()
def normalisation(model: Decoder, tokens: Tensor, *, seed: int = 0) -> float:
    """Return how far from 1 the probabilities of all symbols sum at most, at SUMMED predictions of tokens
    [n t], all if there are fewer.

    They are summed in float64, and are the very probabilities of the scores.
    """
    with evaluation(model):
        params = predict(model, {"tokens": tokens.to(reference_param(model).device, torch.int64)})[0].flatten(
            0, 1
        )
        if not len(params):  # a single symbol, with nothing before it
            return 0.0
        chosen = torch.randperm(len(params), generator=torch.Generator().manual_seed(seed))[:SUMMED]
        total = model.output.log_probs(params[chosen.to(params.device)]).double().exp().sum(-1)
    return float((total - 1).abs().max())


def _batches(n: int, batch: int, report: Report, stopped: Stopped) -> Iterator[range]:
    """Yield 0 .. n - 1 in pieces until stopped, and report each once it is done."""
    for number, first in enumerate(range(0, n, batch), 1):
        piece = range(first, min(first + batch, n))
        yield piece
        report(piece.stop)
        if stopped():
            return
        if number % RELEASED == 0:
            release_freed_memory()

"""Forecasts as an RNN: the history in parallel, then many paths, each fed what it has sampled before."""

import secrets
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lintra.attention import map_state
from lintra.generation.sampling import check_recurrent, evaluation
from lintra.generation.uniforms import sequence_generator
from lintra.models.forecaster import Forecaster, Prediction
from lintra.nn.parameters import reference_param


@torch.no_grad()
def sample_paths(
    model: Forecaster,
    history: Float[Tensor, "b t"],
    *,
    horizon: int,
    samples: int = 100,
    seed: int | None = None,
) -> Float[Tensor, "b n horizon"]:
    """Sample `samples` continuations of each series, float64 on the CPU.

    The memory is that of a state for each path, whatever the horizon, unless the mechanism's state grows.
    Series i has a generator of its own, `sequence_generator(seed, i)`: its paths do not depend on how many
    others there are. Without a seed they differ each time. Raises ValueError for an empty history, no
    horizon, no samples, a mechanism without a recurrent form, and paths that leave the range of numbers.
    """
    if history.dim() != 2 or not history.shape[1]:
        raise ValueError(f"history must be at least one value of each series, got {list(history.shape)}")
    for name, value in (("horizon", horizon), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    check_recurrent(model)
    if not len(history):
        return torch.empty(0, samples, horizon, dtype=torch.float64)
    seed = secrets.randbits(64) if seed is None else seed
    generators = [sequence_generator(seed, i) for i in range(len(history))]
    with evaluation(model):
        prediction, state = model.extend(history.to(reference_param(model).device))
        state = map_state(lambda x: x.repeat_interleave(samples, 0), state)
        prediction = Prediction(*(x.repeat_interleave(samples, 0) for x in prediction.last()))
        paths = []
        for step in range(horizon):
            parts = zip(prediction.params.split(samples), generators, strict=True)
            values = torch.cat([model.output.sample(part, generator) for part, generator in parts])
            values = prediction.restored(values)
            if not values.isfinite().all():
                raise ValueError(
                    f"the sampled paths are beyond the largest numbers after {step:,} values: forecast fewer"
                )
            paths.append(values.cpu())
            if step < horizon - 1:
                prediction, state = model.extend(values, state)
    return torch.cat(paths, 1).unflatten(0, (len(history), samples))


@torch.no_grad()
def quantiles(model: Forecaster, prediction: Prediction, levels: Sequence[float]) -> Float[Tensor, "b t q"]:
    """Return the quantiles at these levels of each predicted distribution, float64."""
    params, location, scale = (x[..., None] for x in prediction)
    several = params.mT.expand(*params.shape[:2], len(levels), -1)
    at = torch.tensor(levels, dtype=location.dtype, device=params.device).expand(several.shape[:-1])
    return Prediction(several, location, scale).restored(model.output.quantile(several, at))

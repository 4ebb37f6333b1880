"""Standardisation of series by their past: a network sees and predicts values in units of what came before.

The location and the scale at a value are the mean and the standard deviation of all values up to it, of which
those `rows` earlier weigh 1/e: running, so that nothing of the future is in them, a long stream does not
outgrow them, and one value after a state gives what the whole series gives.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lintra.ops.running import decayed_sum

FLATTEST = 1e-4  # of the mean absolute value: no scale is smaller, so that a constant series has one


class ScaleState(NamedTuple):
    """first [b]: the first value, from which the others are measured, so that a large offset costs no digits;
    sums [b 4]: of 1, value - first, its square and the absolute value, decayed. All float64."""

    first: Tensor
    sums: Tensor


class RunningScale(nn.Module):
    """values [b t] -> location [b t] and scale [b t] of the values up to each one's own, float64.

    A series of zeros has the scale `typical`, 1 unless it is set.
    """

    typical: Tensor  # []

    def __init__(self, rows: int):
        super().__init__()
        self.rows = rows
        self.register_buffer("typical", torch.ones(()))

    def start(self, batch: int) -> ScaleState:
        """The state before any value."""
        like = {"dtype": torch.float64, "device": self.typical.device}
        return ScaleState(torch.full((batch,), torch.nan, **like), torch.zeros(batch, 4, **like))

    def forward(
        self, values: Float[Tensor, "b t"], state: ScaleState
    ) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"], ScaleState]:
        """Return locations, scales, and the state after the last value."""
        values = values.double()
        if not values.shape[1]:
            return values, values, state
        first = torch.where(state.first.isnan(), values[:, 0], state.first)
        away = values - first[:, None]
        added = torch.stack((torch.ones_like(away), away, away.square(), values.abs()), -1)
        kept = torch.full_like(added[:, :, :1], -1 / self.rows).exp()
        # The state is a value before the first one.
        kept = torch.cat((torch.ones_like(kept[:, :1]), kept), 1)
        sums = decayed_sum(torch.cat((state.sums[:, None], added), 1), kept)[:, 1:]
        mean, square, size = (sums[..., 1:] / sums[..., :1]).unbind(-1)
        variance = torch.maximum(square - mean.square(), (FLATTEST * size).square())
        scale = torch.where(variance > 0, variance, self.typical.double().square()).sqrt()
        return first[:, None] + mean, scale, ScaleState(first, sums[:, -1].clone())

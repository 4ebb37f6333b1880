"""A causal network over the values of a series: the distribution of each next value, given those before it.

    values [b t] -> standardised by their past, with earlier values beside them -> x [b t c] -> blocks -> norm
    -> params [b t p] of a distribution in the units of the past

`forward` trains in parallel, `extend` runs as an RNN: the same weights give the same numbers.

Paths sampled from such a network, and earlier values as features of it: Salinas et al. 2017,
arXiv:1704.04110. The linear path past the blocks, which sees how large a value is where norms do not: Lai et
al. 2018, arXiv:1703.07015, section 3.6.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lintra.attention import State
from lintra.config import fields
from lintra.models.base import Position, TransformerBase, TransformerConfig, build_blocks
from lintra.nn.parameters import reference_param
from lintra.nn.real_distributions import Gaussian, Quantiles, StudentT
from lintra.nn.scaling import RunningScale, ScaleState
from lintra.ops import checks
from lintra.ops.autocast import no_autocast
from lintra.ops.history import look_back
from lintra.ops.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Config(TransformerConfig):
    """A forecaster of any mechanism, or of several, that have a causal form."""

    output: Gaussian | StudentT | Quantiles = field(default_factory=StudentT)
    lags: tuple[int, ...] = (1, 2, 3)  # rows back of the earlier values read beside each one
    scale_rows: int = 100  # rows after which a value weighs 1/e in the location and the scale
    position: Position = "none"  # the lags say what is near, and a stream has no end

    def __post_init__(self):
        super().__post_init__()
        fields.at_least(self, scale_rows=1)
        fields.offsets(self, "lags")
        if self.position == "concatenated":
            raise ValueError("position 'concatenated' is for symbols: take another one")

    @property
    def look_back(self) -> int:
        """Number of rows that the lags look back; 0: each value is seen alone."""
        return max(self.lags, default=0)

    def build(self) -> "Forecaster":
        return Forecaster(self)


class ForecasterState(NamedTuple):
    """seen [b]: rows so far; recent [b r]: the last values, as far back as lags look, the latest one last;
    scale: of the running location and scale; layers: the state of each block."""

    seen: Tensor
    recent: Tensor
    scale: ScaleState
    layers: tuple[State, ...]


class Prediction(NamedTuple):
    """params [b t p]: of the distribution of (value - location) / scale of the value after each row; location
    and scale [b t], float64."""

    params: Tensor
    location: Tensor
    scale: Tensor

    def standardised(self, following: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
        """Return the values that followed each row as the distributions see them."""
        return ((following - self.location) / self.scale).to(self.params.dtype)

    def restored(self, z: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
        """Return the inverse of `standardised`, in float64."""
        return self.location + self.scale * z.double()

    def last(self) -> "Prediction":
        """Return the prediction of the last row alone."""
        return Prediction(*(x[:, -1:] for x in self))


class Forecaster(TransformerBase):
    """values [b t] -> a `Prediction` of the value after each. Rows are equally far apart, without gaps."""

    def __init__(self, config: Config):
        seen = 1 + len(config.lags)
        super().__init__(config, nn.Linear(seen, config.width), build_blocks(config))
        self.scaling = RunningScale(config.scale_rows)
        self.output = config.output
        self.head = nn.Linear(config.width, config.output.size)
        self.shortcut = nn.Linear(seen, 1, bias=False)
        nn.init.zeros_(self.shortcut.weight)

    def forward(self, values: Float[Tensor, "b t"]) -> Prediction:
        """Predictions of a whole series; those at t are of the value after values[t]."""
        layout = self.input_layout(values)
        z, location, scale, *_ = self._inputs(values, self._before(len(values)), layout)
        x = self._embedded(z, layout)
        run = self.block_runner()
        for block in self.blocks:
            x = run(block, x, layout=layout)
        return Prediction(self._params(self.norm(x), z), location, scale)

    def start(self, batch: int) -> ForecasterState:
        """The state before any value."""
        return self._before(batch)._replace(layers=tuple(block.start(batch) for block in self.blocks))

    def extend(
        self, values: Float[Tensor, "b t"], state: ForecasterState | None = None
    ) -> tuple[Prediction, ForecasterState]:
        """Predictions for any number of values after `state` (None: before any), as of the whole series.

        Raises ValueError for a state of another model or batch.
        """
        layout = self.input_layout(values)
        state = self.start(len(values)) if state is None else state
        self.check_state(state, ForecasterState, len(values), "values")
        layout = layout.after(state.seen)
        z, location, scale, recent, scaling = self._inputs(values, state, layout)
        x, layers = self.run_blocks(self._embedded(z, layout), state.layers, layout)
        after = ForecasterState(layout.seen_after(), recent, scaling, layers)
        return Prediction(self._params(x, z), location, scale), after

    def input_layout(self, values: Tensor) -> Layout:
        """Return the layout of values. Raises ValueError or TypeError unless they are finite, [b t]."""
        checks.shape("values", values, "b t", {})
        checks.floating("values", values)
        if checks.readable(values) and not bool(values.isfinite().all()):
            raise ValueError("values must be finite, got NaN or infinity among them")
        return Layout.of("values", values)

    def _before(self, batch: int) -> ForecasterState:
        """The state before any value, but for that of the blocks."""
        device, reach = self.scaling.typical.device, self.config.look_back
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        recent = torch.zeros(batch, reach, dtype=torch.float64, device=device)
        return ForecasterState(seen, recent, self.scaling.start(batch), ())

    def _inputs(
        self, values: Tensor, state: ForecasterState, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, ScaleState]:
        """Return each value and those at its lags, standardised [b t 1 + lags], 0 where there was none;
        locations, scales; and `recent` and `scale` of the next state."""
        values, lags = values.double(), self.config.lags
        location, scale, scaling = self.scaling(values, state.scale)
        seen, recent = values[..., None], state.recent
        if lags:
            before, recent = look_back(values, recent, lags, layout)
            missing = layout.positions()[..., None] < torch.tensor(lags, device=values.device)
            before = torch.where(missing, location[..., None], before)
            seen = torch.cat((seen, before), -1)
        z = (seen - location[..., None]) / scale[..., None]
        return z.to(reference_param(self.head).dtype), location, scale, recent, scaling

    def _embedded(self, z: Tensor, layout: Layout) -> Tensor:
        with no_autocast(z):  # three digits of a value are too few
            return self.add_positions(self.embedding(z), layout)

    def _params(self, hidden: Tensor, z: Tensor) -> Tensor:
        with no_autocast(z):
            params = self.head(hidden.to(z.dtype))
            return torch.cat((params[..., :1] + self.shortcut(z), params[..., 1:]), -1)

"""A running mean of the weights, kept beside those that learn."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightEMA(WeightAveraging):
    """The exponential running mean of the weights after each step: it is what is validated and what a
    checkpoint's model holds; the weights that learn are beside it, for going on.

    The decay grows from 0 as (1 + n) / (10 + n) over the steps n until it is the given one, so that the first
    weights are forgotten soon. Buffers, such as random features, are those of the latest step.
    """

    def __init__(self, decay: float):
        def update(averaged: list[Tensor], current: list[Tensor], n: Tensor) -> None:
            done = int(n)
            get_ema_multi_avg_fn(min(decay, (1 + done) / (10 + done)))(averaged, current, n)

        super().__init__(use_buffers=False, multi_avg_fn=update)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves the weights that learn as they are: the checkpoint at the end is one to resume from."""

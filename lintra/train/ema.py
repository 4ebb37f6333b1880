"""A running mean of the weights, kept beside those that learn."""

from collections.abc import Sequence
from typing import cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lintra.train.sharding import local, reshard
from lintra.train.strategy import ShardedStrategy


class WeightEMA(WeightAveraging):
    """Exponential moving average of the weights after each step.

    Validation and the saved model use it; a checkpoint keeps the trained weights beside it, to resume from.

    The decay grows from 0 as (1 + n) / (10 + n) over the steps n until it is the given one, so that the first
    weights are forgotten soon. Buffers, such as random features, are those of the latest step. Where
    processes shard the model, each keeps the mean of its part.
    """

    def __init__(self, decay: float):
        def update(averaged: Sequence[Tensor], current: Sequence[Tensor], n: Tensor | int) -> None:
            done = int(n)
            average = get_ema_multi_avg_fn(min(decay, (1 + done) / (10 + done)))
            average([local(x) for x in averaged], [local(x) for x in current], n)

        super().__init__(use_buffers=False, multi_avg_fn=update)
        self._update = update

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy the weights, unless they will be sharded."""
        if stage == "fit" and not isinstance(trainer.strategy, ShardedStrategy):
            self._average_model = AveragedModel(
                # Not yet that of the weights, which are moved after this.
                pl_module,
                trainer.strategy.root_device,
                use_buffers=False,
                multi_avg_fn=self._update,
            )

    @torch.no_grad()
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy this process's part of sharded weights."""
        if isinstance(trainer.strategy, ShardedStrategy):
            average = AveragedModel(nn.Module(), use_buffers=False, multi_avg_fn=self._update)
            average.module.model = trainer.strategy.shard_like(cast("nn.Module", pl_module.model))
            self._average_model = average

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        reshard(pl_module)  # or whole weights would be taken for shards
        super()._swap_models(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the trained weights as they are: the checkpoint at the end is one to resume from."""

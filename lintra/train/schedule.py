"""The learning rate of every step."""

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lintra.train.config import Config

DECAY_FRACTION = 0.4  # of the steps, at the end: schedule "wsd" falls to 0 in a straight line


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step (from 0); with schedule "plateau", before it is halved.

    After a linear warm-up: "constant"; "step", a tenth from `drop_at` on; "cosine", half a wave down to 0;
    "wsd" (warm-up, stable, decay), constant until the last DECAY_FRACTION of the steps.
    """
    warm = config.lr * min(1.0, (step + 1) / (config.warmup + 1))
    match config.schedule:
        case "step":
            return warm * (0.1 if step >= config.drop_at else 1.0)
        case "cosine":
            done = max(0, step - config.warmup) / max(1, config.steps - config.warmup)
            return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        case "wsd":
            return warm * min(1.0, max(0, config.steps - step) / (DECAY_FRACTION * config.steps))
    return warm


def notices(config: Config) -> list[str]:
    """Return a sentence for each part of the schedule that these steps never reach."""
    found, steps = [], config.steps
    if config.warmup >= steps:
        warmup = f"{config.warmup:,} of {steps:,} steps"
        found.append(f"The learning rate rises to the last step: --warmup is {warmup}")
    if config.schedule == "step" and config.drop_at >= steps:
        found.append(f"The learning rate never drops: --drop-at is {config.drop_at:,} of {steps:,} steps")
    if config.schedule == "plateau" and (config.patience + 1) * config.validate_every >= steps:
        found.append(
            f"The learning rate is never halved: --patience is {config.patience:,} validations, one every "
            f"{config.validate_every:,} of {steps:,} steps"
        )
    return found


class LearningRateSchedule(Callback):
    """The learning rate of every step. Schedule "plateau" halves it when the validation loss has not fallen
    below its lowest value for a number of validations; what it has seen and done goes into the checkpoint.
    """

    def __init__(self, config: Config):
        self.config = config
        self.factor, self.lowest = 1.0, math.inf
        self.waited = 0  # validations since the lowest, or since the last halving
        self.seen = 0  # the step of the latest validation that counted

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self.factor * learning_rate(self.config, trainer.global_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # One that only ends a part of the run does not count: an uninterrupted run would not have it.
        step = trainer.global_step
        if self.config.schedule == "plateau" and step % self.config.validate_every == 0 and step > self.seen:
            self.seen = step
            self.update(float(trainer.callback_metrics["validate_loss"]))

    def update(self, loss: float) -> None:
        """Record the loss of a further validation."""
        if loss < self.lowest:
            self.lowest, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited == self.config.patience:
            self.factor, self.waited = self.factor / 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("factor", "lowest", "waited", "seen")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, value)

"""A limit on the time of training, and the schedule that fits into it."""

import dataclasses
import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from lintra.train.callbacks import StopCallback
from lintra.train.config import Config
from lintra.train.run import Run
from lintra.train.schedule import LearningRateSchedule

STEPS, PART = 20, 0.05  # the speed is measured after this many steps, or this part of the time
CLOSE = 0.98  # of the remaining steps: a schedule of which this many fit is not changed


def shortened(config: Config, steps: int) -> Config:
    """Return settings whose schedule ends after `steps`; its warm-up and drop come sooner in proportion."""
    # In whole numbers, rounded up: a warm-up does not vanish.
    warmup, drop_at = (-(-x * steps // config.steps) for x in (config.warmup, config.drop_at))
    return dataclasses.replace(config, steps=steps, warmup=warmup, drop_at=drop_at)


class TimeBudget(Callback):
    """Callback that shortens the schedule to the steps that fit into the time, where those are fewer than
    requested.

    The speed is that since the first step here, which may compile. It is measured after a few steps, and
    again after every validation, which takes time too. The steps go into run.json: a resumed run keeps them.
    All processes go by the clock of the first one.
    """

    def __init__(self, run: Run, stop: StopCallback, schedule: LearningRateSchedule, console: Console):
        self.run, self.stop, self.schedule, self.console = run, stop, schedule, console
        self.start: int | None = None  # steps done before the first one here
        self.first = 0.0  # seconds, when the first step ended
        self.measured = False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.measured:
            return
        step, seconds = trainer.global_step, trainer.strategy.broadcast(self.stop.elapsed())
        if self.start is None:
            self.start, self.first = step - 1, seconds
        elif step - self.start > STEPS or seconds >= PART * self.stop.seconds:
            self.measured = True
            self._fit(step, seconds)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.measured and not trainer.should_stop:
            self._fit(trainer.global_step, trainer.strategy.broadcast(self.stop.elapsed()))

    def _fit(self, step: int, seconds: float) -> None:
        assert self.start is not None
        if seconds >= self.stop.seconds:
            return
        each = max(seconds - self.first, 1e-9) / (step - self.start - 1)
        fit = max(1, math.floor((self.stop.seconds - seconds) / each))
        if fit >= CLOSE * (self.stop.steps - step):
            return
        steps = step + fit
        self.stop.steps = steps
        self.schedule.config = shortened(self.run.train, steps)
        self.run = self.run.changed(fitted_steps=steps)
        limit = self.stop.seconds
        time = f"{limit:.3g} seconds" if limit < 120 else f"{limit / 60:.3g} minutes"
        until = f", up to step {steps:,}" if self.start else ""
        self.console.print(
            f"{steps - self.start:,} steps fit into {time}{until}, "
            f"of {self.run.train.steps:,}: the schedule is shortened"
        )

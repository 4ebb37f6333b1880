"""Callbacks between the steps: stopping, saving, logging."""

import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint

from lintra.checkpoint import step_of
from lintra.io.terminal import announce
from lintra.train.curve import curves
from lintra.train.learner import Diverged
from lintra.train.run import Run
from lintra.train.sharding import finite
from lintra.train.strategy import ShardedStrategy

KEPT = 2  # checkpoints
LOG_EVERY = 10  # steps
LOSS = "validate_loss"


class Interrupted(Exception):
    """A signal stopped the run, whose state is saved."""

    def __init__(self, signum: int, run: Run, step: int):
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name} after step {step:,}: resume it with lintra train {run.resuming}")
        self.exit_code = 128 + signum


class StopCallback(Callback):
    """End training at its last step, when the time is up, or after the step in which a signal came."""

    def __init__(self, steps: int, max_minutes: float | None):
        self.steps = steps
        self.seconds = math.inf if max_minutes is None else 60 * max_minutes
        self.noted: int | None = None  # the signal that this process got
        self.signum: int | None = None  # the one that makes all processes stop now

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = time.monotonic()
        self.announces = trainer.is_global_zero
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):  # Lightning puts the old handlers back
                signal.signal(signum, self._note)
            hangup = getattr(signal, "SIGHUP", None)  # of a terminal that is closed; not on Windows
            if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:  # as nohup sets it
                signal.signal(hangup, self._note)

    def elapsed(self) -> float:
        """Seconds of training so far."""
        return time.monotonic() - self.started

    def _note(self, signum: int, _: Any) -> None:
        self.noted = signum
        signal.signal(signum, signal.SIG_DFL)  # the second one ends the program at once
        if self.announces:
            announce("stopping after this step, to save it; the same signal again ends at once, unsaved")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        anywhere = trainer.strategy.reduce_boolean_decision  # processes must stop at the same step
        if anywhere(self.noted is not None, all=False):
            self.signum = self.noted or signal.SIGTERM
        if (
            self.signum
            or trainer.global_step >= self.steps
            or (self.seconds < math.inf and anywhere(self.elapsed() >= self.seconds, all=False))
        ):
            trainer.should_stop = True


class CheckpointCallback(Checkpoint):
    """Checkpoints run/step-00001200 at an interval and at the end; the last two are kept, and the one with
    the lowest validation loss.

    When training ends it waits for a checkpoint that is still being written; if that fails, training fails.
    Lightning calls a `Checkpoint` after all other callbacks, so `StopCallback` has decided by then, and
    `LearningRateSchedule` has seen a validation: where a step ends with one, the checkpoint is saved after
    it.
    """

    def __init__(self, run: Run, stop: StopCallback):
        self.run, self.stop = run, stop
        self.saved = -1
        self.losses = curves(run.folder).get(LOSS, {})  # by the step, as far as the run has got

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self.run.train.validate_every:
            self._after_step(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.losses[trainer.global_step] = float(trainer.callback_metrics[LOSS])
        self._after_step(trainer)
        self._drop(trainer)  # the last step is saved before its validation

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save(trainer)
        self._wait(trainer)
        if self.stop.noted:  # in the last validation
            raise Interrupted(self.stop.noted, self.run, trainer.global_step)

    def _after_step(self, trainer: pl.Trainer) -> None:
        if trainer.global_step % self.run.train.save_every == 0 or self.stop.signum:
            self._save(trainer)
        if self.stop.signum:
            self._wait(trainer)
            raise Interrupted(self.stop.signum, self.run, trainer.global_step)

    def _save(self, trainer: pl.Trainer) -> None:
        if self.saved == trainer.global_step:
            return
        everywhere = trainer.strategy.reduce_boolean_decision
        if not everywhere(finite(trainer.lightning_module.parameters())):
            raise Diverged(f"the weights are not finite after step {trainer.global_step:,}: not saved")
        trainer.save_checkpoint(self.run.folder / f"step-{trainer.global_step:08d}")
        self.saved = trainer.global_step
        self._drop(trainer)

    def _wait(self, trainer: pl.Trainer) -> None:
        if isinstance(trainer.strategy, ShardedStrategy):
            trainer.strategy.wait()
            self._drop(trainer)

    def _drop(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            self.run.drop(KEPT, self.best())

    def best(self) -> Path | None:
        """Return the checkpoint with the lowest validation loss, the latest of equal ones; None if none was
        saved after a validation."""
        losses = {
            x: loss for x in self.run.checkpoints() if (loss := self.losses.get(step_of(x))) is not None
        }
        return min(reversed(losses), key=losses.__getitem__, default=None)


class MetricLogger(Callback):
    """Loss, norm of the gradient before clipping, learning rate, minutes since training began or was resumed,
    and validation scores to every logger, over the number of steps done."""

    def __init__(self, stop: StopCallback):
        self.stop = stop

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % LOG_EVERY == 0:
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            measured = {"train_loss": float(pl_module.batch_loss), "grad_norm": pl_module.grad_norm}
            self._log(trainer, measured | {"lr": lr, "minutes": self.stop.elapsed() / 60})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log(trainer, {name: float(value) for name, value in trainer.callback_metrics.items()})

    def _log(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        for logger in trainer.loggers:
            logger.save()

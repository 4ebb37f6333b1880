"""The progress of training on the terminal: a bar, or plain lines where there is none."""

import time
from collections import deque
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lintra.train.callbacks import StopCallback
from lintra.train.clock import SECONDS_PER_LINE, clock
from lintra.train.console import draws_bars

UNITS = {
    "bits_per_dim": "{:.3f} bits/dim",
    "bits_per_byte": "{:.3f} bits/byte",
    "bits_per_token": "{:.3f} bits/token",
    "accuracy": "{:.2%} right",
    "symbol_errors": "{:.2%} symbol errors",
}
FIRST_LINES = (1, 10)  # steps after which a plain line is written in any case
WINDOW = 50  # steps over which the speed is measured


class ProgressBar(Callback):
    """Loss, tokens a second, steps and time left; the scores of each validation."""

    def __init__(self, stop: StopCallback, console: Console):
        self.stop, self.console = stop, console
        self.times: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # when a step ended, tokens until then
        self.tokens, self.spoken = 0, -float("inf")
        self.bar: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.times.append((time.monotonic(), 0))
        if trainer.is_global_zero and draws_bars(self.console):
            text = TextColumn("{task.fields[text]}")
            self.bar = Progress(BarColumn(bar_width=24), text, console=self.console, transient=True)
            self.task = self.bar.add_task("", total=1.0, text="")
            self.bar.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples, tokens = next(iter(batch.values())).shape[:2]  # of features only the frames count
        self.tokens += samples * tokens * trainer.world_size
        self.times.append((time.monotonic(), self.tokens))
        if not trainer.is_global_zero:
            return
        step, last = trainer.global_step, self.stop.steps
        if self.bar:
            self.bar.update(
                self.task, completed=self._done(step), text=self._text(step, pl_module.batch_loss)
            )
        elif step in FIRST_LINES or self.times[-1][0] - self.spoken >= SECONDS_PER_LINE or step == last:
            self.spoken = self.times[-1][0]
            self.console.print(self._text(step, pl_module.batch_loss))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            scores = in_words(validation(trainer), pl_module.task.loss_unit)
            self.console.print(f"step {trainer.global_step:,}  validation: {scores}")
        self.times.clear()  # the time of the validation is not that of a step
        self.times.append((time.monotonic(), self.tokens))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None

    def _done(self, step: int) -> float:
        """The part of the steps, or of the time if that ends training sooner."""
        return max(step / self.stop.steps, self.stop.elapsed() / self.stop.seconds)

    def _text(self, step: int, loss: Any) -> str:
        (first, before), (last, now) = self.times[0], self.times[-1]
        seconds = max(last - first, 1e-9)
        left = min(
            (self.stop.steps - step) * seconds / (len(self.times) - 1),
            max(0.0, self.stop.seconds - self.stop.elapsed()),
        )
        return (
            f"step {step:,}/{self.stop.steps:,}  loss {float(loss):.4f}  "
            f"{(now - before) / seconds:,.0f} tokens/s  {clock(left)} left"
        )


def validation(trainer: pl.Trainer) -> dict[str, float]:
    """The latest validation's scores by their names in the task."""
    prefix = "validate_"
    scores = trainer.callback_metrics.items()
    return {name.removeprefix(prefix): float(v) for name, v in scores if name.startswith(prefix)}


def in_words(scores: dict[str, float], loss_unit: str) -> str:
    """Scores with their units, the loss last."""
    names = sorted(scores, key=lambda name: name == "loss")
    units = {**UNITS, "loss": f"{{:.4f}} {loss_unit}"}
    return ", ".join(units.get(name, f"{name} {{:.4f}}").format(scores[name]) for name in names)

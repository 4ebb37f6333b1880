"""A model and a task as Lightning sees them."""

import math
import signal
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lintra import attention
from lintra.io.files import Error
from lintra.models import Model
from lintra.models.base import set_checkpoint_blocks
from lintra.nn import Block
from lintra.tasks import Batch, Samples, Task
from lintra.train.batches import LengthSampler, StepSampler, of_similar_length, parts, seed_of, share
from lintra.train.config import Config
from lintra.train.data_checks import spread
from lintra.train.optimizer import optimizer
from lintra.train.sharding import full_tensor
from lintra.train.strategy import ShardedStrategy

_REDRAW = 2**32  # in place of a rank: the same on all ranks, and used for no other seed
VALIDATION_BATCHES = 16  # a validation reads no more of them, where the task does not say how many


def _loader(samples: Samples, batches: Iterable[list[int]]) -> DataLoader[Batch]:
    """The batches of samples, read ahead where the samples ask for it."""
    return DataLoader(
        samples,
        batch_sampler=batches,
        collate_fn=_already_collated,
        num_workers=samples.workers,
        worker_init_fn=_outlive_first_signal,
    )


def _outlive_first_signal(worker: int) -> None:
    """Make a data worker ignore Ctrl-C and the first SIGTERM, so that the main process, which needs a batch
    for it, can finish its step and save. A second SIGTERM ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _already_collated(batch: Any) -> Any:
    """Return the batch unchanged: `__getitems__` has collated it."""
    return batch


class Diverged(ArithmeticError):
    """The loss or its gradient is no longer finite; the weights are those before that step."""

    exit_code = 1


class Learner(pl.LightningModule):
    """One training step = one batch, whose samples and dropout follow from (seed, step) alone."""

    def __init__(self, model: Model, task: Task, config: Config):
        super().__init__()
        self.model: Any = model
        self.task, self.config = task, config
        self.restored = False  # whether a checkpoint, where there is one, has been read
        self.not_finite: str | None = None  # the first score of this validation, here, that is not finite
        self.counted = 0  # batches of a validation, of which this process may repeat another's
        self.batch_loss = torch.tensor(torch.nan)  # the mean over the latest batch, of all processes
        self.grad_norm = math.nan  # of the latest batch, before clipping

    def configure_model(self) -> None:
        """Shard the model where the strategy does so."""
        if isinstance(self.trainer.strategy, ShardedStrategy):
            self.model = self.trainer.strategy.shard(self.model)
        if self.config.checkpoint_blocks:
            set_checkpoint_blocks(self.model)
        if self.config.compile:
            for part in self.model.modules():
                if isinstance(part, Block):
                    part.compile()  # in place: the names of its weights stay

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.model, self.config)

    def train_dataloader(self) -> DataLoader[Batch]:
        self.restored = True  # Lightning asks for the data afterwards
        seeded = {"seed": self.config.seed, "start": self.trainer.global_step}
        share = {"rank": self.trainer.global_rank, "world": self.trainer.world_size}
        samples, most = self.task.train, self.task.batch_tokens
        if most is None:
            sampler = StepSampler(len(samples), self.config.samples(self.task), **seeded, **share)
        else:
            sampler = LengthSampler(samples.lengths, most, **seeded, **share)
        return _loader(samples, sampler)

    def val_dataloader(self) -> DataLoader[Batch]:
        samples, world = self.task.validate, self.trainer.world_size
        if self.task.batch_tokens is None:
            batch = self.config.samples(self.task)
            most = len(samples) if self.task.validates_all else VALIDATION_BATCHES * batch
            # Of a text that changes, the first alone say little, unless they are spread over it already.
            places = list(range(min(len(samples), most))) if samples.spread else spread(len(samples), most)
            size = batch // world
            batches = [places[first : first + size] for first in range(0, len(places), size)]
        else:
            batches = of_similar_length(samples.lengths, self.task.batch_tokens // world)
        batches, self.counted = share(batches, self.trainer.global_rank, world)
        return _loader(samples, batches)

    def on_train_start(self) -> None:
        """Raise Error for an optimizer's state of other weights: the optimizer itself takes any."""
        for each in self.trainer.optimizers:
            for weight, state in each.state.items():
                for name, x in state.items():
                    if isinstance(x, Tensor) and x.dim() and x.shape != weight.shape:
                        raise Error(
                            f"{self.trainer.ckpt_path}: {name} of the optimizer must be "
                            f"{list(weight.shape)} as its weight is, got {list(x.shape)}"
                        )

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        step = self.trainer.global_step
        torch.manual_seed(seed_of(self.config.seed, step, self.trainer.global_rank))
        self._redraw(step)

    def _redraw(self, step: int) -> None:
        """Random features and the like, from a generator of (seed, step)."""
        generator = torch.Generator().manual_seed(seed_of(self.config.seed, step, _REDRAW))
        attention.redraw(self.model, step, generator)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss whose gradients, averaged over the processes, are those of the whole batch."""
        *before, (last, weight) = parts(batch, self.config.accumulate, self.task.weight)
        total = torch.stack([weight, *(each for _, each in before)]).sum()
        if self.trainer.world_size > 1:
            total = self.trainer.strategy.reduce(total.double(), reduce_op="mean")  # in place
        if before:
            self.optimizers().zero_grad()  # pyright: ignore (there is one)
        done = [self._backward(*each, total) for each in before]
        loss = sum(done, self._loss(last, weight, total))
        self.batch_loss = loss.detach()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Average the batch loss over all processes, which synchronize here anyway."""
        if self.trainer.world_size > 1:
            share = self.batch_loss.double()  # a copy: it is reduced in place
            self.batch_loss = self.trainer.strategy.reduce(share, reduce_op="mean")

    def _loss(self, batch: Batch, weight: Tensor, total: Tensor) -> Tensor:
        """The loss that a part adds to its batch's, where all parts have a weight of `total`."""
        loss = self.task.loss(self.model, batch)
        alone = self.trainer.world_size * self.config.accumulate == 1
        if alone:
            return loss
        share = weight / total.clamp(min=1 / self.trainer.world_size)  # of a batch without predictions 0
        return loss * share.to(loss.dtype)

    def _backward(self, batch: Batch, weight: Tensor, total: Tensor) -> Tensor:
        """The loss of a part, whose gradients are added to those of the parts before. Where each process has
        the whole model they are not sent yet; where it is sharded they are, or every process would have to
        hold all of them."""
        loss = self._loss(batch, weight, total)
        with torch.autocast(loss.device.type, enabled=False):  # as Lightning calls it
            loss.backward()
        return loss.detach()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Zero the gradients of the step before, unless those of parts of this step are among them."""
        if self.config.accumulate == 1:
            optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by our own setting, and stop before an update that would spoil the weights."""
        longest = math.inf if self.config.clip is None else self.config.clip
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(self.parameters(), longest))
        self.grad_norm = float(norm)
        if not math.isfinite(self.grad_norm):
            raise Diverged(
                f"the loss or its gradient is not finite at step {self.trainer.global_step + 1:,}: "
                "stopped before the weights changed; what was saved before is good"
            )

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        # Compiled blocks would be compiled anew for it, and for batches of every size.
        with torch.compiler.set_stance("force_eager" if self.config.compile else "default"):
            scores = self.task.score(self.model, batch)
        # Not an integer: the mean of integers over the processes would be rounded down.
        weight: Any = float(scores.pop("weight"))
        if batch_idx >= self.counted:  # another process has this batch too
            weight = 0.0
        for name, value in scores.items():
            if self.not_finite is None and not bool(value.isfinite()):
                self.not_finite = name
            self.log(f"validate_{name}", value, batch_size=weight, sync_dist=True, logger=False)

    def on_validation_epoch_end(self) -> None:
        """Raise Diverged on all processes where a score of any of them is not finite."""
        found, self.not_finite = self.not_finite, None
        if self.trainer.strategy.reduce_boolean_decision(found is not None, all=False):
            name = found or "score of another process"
            raise Diverged(f"the validation {name} is not finite after step {self.trainer.global_step:,}")

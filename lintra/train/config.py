"""The settings that all tasks share."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lintra import legacy
from lintra.config import fields
from lintra.train import launch

Optimizer = Literal["radam", "adamw", "muon"]
Schedule = Literal["constant", "step", "cosine", "wsd", "plateau"]
Precision = Literal["auto", "32", "bf16"]
Strategy = Literal["auto", "ddp", "fsdp"]
Verbosity = Literal["result", "progress", "all"]  # what is printed while a run is trained


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of training, whatever the task."""

    PATHS: ClassVar = ("start_from",)  # fields that are places of files

    steps: int = 10_000  # optimiser steps in all
    max_minutes: float | None = None  # stop after so many minutes, with fewer steps
    start_from: str | None = None  # a trained model: its weights are the first ones
    batch: int = 16  # sequences in a step, all devices together
    accumulate: int = 1  # parts in which each device computes its share, one by one
    checkpoint_blocks: bool = False  # to save memory, recompute blocks in backward
    compile: bool = False  # compile blocks with torch.compile
    optimizer: Optimizer = "radam"  # muon: AdamW outside blocks
    lr: float = 1e-3  # learning rate
    weight_decay: float = 0.01  # weights shrink by this times lr
    schedule: Schedule = "constant"  # step: lr / 10 from --drop-at on
    drop_at: int = 3_000  # the step of schedule "step"
    patience: int = 3  # validations until "plateau" halves lr
    warmup: int = 0  # steps in which lr grows linearly from 0
    clip: float | None = 1.0  # largest norm of the gradient; None: any
    ema: float | None = None  # decay of a running mean of the weights
    precision: Precision = "auto"  # bf16 autocast; auto: where it is faster
    save_every: int = 500  # steps from checkpoint to checkpoint
    validate_every: int = 500  # steps from validation to validation
    seed: int = 0  # of weights, order of the data and dropout
    nodes: int | None = None  # machines (1, or those torchrun or srun has)
    devices: int | None = None  # processes or GPUs of each (1, or as above)
    strategy: Strategy = "auto"  # ddp: model replicated; fsdp: sharded
    timeout: float = 600.0  # seconds to wait for other processes
    wandb: str | None = None  # a project of Weights & Biases to log to as well

    def __post_init__(self):
        if self.schedule == "trapezoid":  # pyright: ignore (its name in 0.1)
            legacy.warn("schedule='trapezoid'", "schedule='wsd'", stacklevel=4)
            object.__setattr__(self, "schedule", "wsd")
        fields.check(self)
        fields.at_least(self, steps=1, batch=1, patience=1, save_every=1, validate_every=1, accumulate=1)
        fields.at_least(self, nodes=1, devices=1)
        fields.not_negative(self, "warmup", "drop_at", "weight_decay")
        fields.seed(self, "seed")
        for name in ("max_minutes", "lr", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e30:
                raise ValueError(f"{name} must be above 0 and below 1e30, got {value}")
        if not 0 < self.timeout <= 1e7:
            raise ValueError(f"timeout must be above 0 and at most 1e7 seconds, got {self.timeout}")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema must be at least 0 and below 1, got {self.ema}")
        if self.wandb == "":
            raise ValueError("wandb must be the name of a project, got ''")

    def samples(self, task: Any) -> int:
        """Return the samples of a batch over all processes: the task's own number, else `batch`."""
        return task.batch or self.batch

    def check_batch(self, batch_tokens: int | None, batch: int | None = None) -> None:
        """Raise ValueError where batches count sequences and the processes cannot share one evenly, where
        the processes are not those that were requested, and for strategy "fsdp" with a single process. batch:
        sequences of a batch, of a task that says how many; None: the setting."""
        nodes, devices = launch.world(self)
        if self.strategy == "fsdp" and nodes * devices == 1 and launch.launcher() is None:
            raise ValueError("strategy='fsdp' needs devices > 1, got devices=1")
        name, batch = ("batch", self.batch) if batch is None else ("the task's batch (batch_tokens)", batch)
        if batch_tokens is None and batch % (nodes * devices):
            of = f"devices={devices}" if nodes == 1 else f"nodes={nodes} x devices={devices}"
            raise ValueError(f"{name} must be a multiple of {of}, got {batch} sequences")

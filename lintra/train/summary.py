"""Choices of a training, in lines: the network, its data, its steps, and what computes them here."""

import platform
from typing import Any

import torch
from torch import nn

from lintra import native
from lintra.models import ctc
from lintra.ops import dispatch
from lintra.tasks import Task
from lintra.train.config import Config
from lintra.train.launch import processes
from lintra.train.run import Run


def described(run: Run, settings: Config, model: nn.Module, task: Task) -> list[str]:
    """Return a line each on a run whose settings, with the schedule that fits, are `settings`."""
    return [
        f"network: {_shape(run)}",
        f"parameters: {_parameters(model)}",
        f"data: {len(task.train):,} samples to learn from, {len(task.validate):,} to validate on, up to "
        f"{task.length:,} tokens each",
        f"steps: {settings.steps:,} of {_batch(settings, task)}, {settings.optimizer}, {_rate(settings)}",
        f"every {settings.validate_every:,} steps a validation, every {settings.save_every:,} a checkpoint; "
        f"logs in {run.folder / 'logs'}",
        f"computed by {_machine(settings)}",
    ]


def _shape(run: Run) -> str:
    config: Any = run.model.encoder if isinstance(run.model, ctc.Config) else run.model
    words = [
        type(run.model).__module__.rpartition(".")[2],
        f"width {config.width}",
        f"layers {config.layers}",
    ]
    if hasattr(config, "mechanisms"):
        names = dict.fromkeys(type(each).__module__.rpartition(".")[2] for each in config.mechanisms)
        words += [f"{config.heads} heads of {config.dim}", f"attention {', '.join(names)}"]
    if getattr(config, "vocabulary", None) is not None:
        words.append(f"{config.vocabulary:,} symbols")
    if getattr(config, "tie_embeddings", False):
        words.append("embeddings tied")
    return ", ".join(words)


def _parameters(model: nn.Module) -> str:
    """Count the parameters of each part; those that parts share are counted with the first."""
    found, seen = [], set()
    for name, part in model.named_children():
        own = {id(x): x.numel() for x in part.parameters() if id(x) not in seen}
        seen |= own.keys()
        if own:
            found.append(f"{name} {sum(own.values()):,}")
    return ", ".join(found)


def _batch(settings: Config, task: Task) -> str:
    parts = f" in {settings.accumulate} parts" if settings.accumulate > 1 else ""
    if task.batch_tokens is not None:
        return f"up to {task.batch_tokens:,} frames{parts}"
    return f"{settings.samples(task):,} sequences{parts}"


def _rate(settings: Config) -> str:
    warmup = f" after {settings.warmup:,} steps of warm-up" if settings.warmup else ""
    clip = "" if settings.clip is None else f", gradients up to {settings.clip:g}"
    ema = "" if settings.ema is None else f", mean of weights with decay {settings.ema:g}"
    rate = f"learning rate {settings.lr:g} {settings.schedule}{warmup}"
    return f"{rate}, weight decay {settings.weight_decay:g}{clip}{ema}"


def _machine(settings: Config) -> str:
    """The device, and which implementation of each op serves tensors there."""
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} threads of the CPU"
    kind = "GPU" if gpu else "CPU"
    chosen = [
        f"{row.op} {row.implementation}" for row in dispatch.explain() if kind in row.serves.split(", ")
    ]
    lacks = f" (no C++ kernels: {native.why_not()})" if native.why_not() else ""
    times = f"{processes(settings)} x " if processes(settings) > 1 else ""
    return f"{times}{device}, torch {torch.__version__}, {platform.machine()}: {', '.join(chosen)}{lacks}"

"""Choice between float32 and bf16 autocast by a short measurement of the model on this machine."""

import time
from typing import Any, Literal

import torch

from lintra.models import Model
from lintra.models.base import set_checkpoint_blocks
from lintra.tasks import Batch, Task
from lintra.train import launch
from lintra.train.config import Config

ENOUGH = 0.2  # seconds that a pass must take for its time to mean something
MAX_TIME_RATIO = 0.9  # bf16 must take less than this part of float32's time


def choose_precision(config: Any, task: Task, settings: Config) -> Literal["32", "bf16"]:
    """Return the faster precision of a forward and backward pass of a model of this config.

    The pass is of as many samples as show it, at most those that a process computes at once. If float32 does
    not fit in memory, it is bf16. A model that is sharded because no device holds it is not measured: it is
    bf16 on GPUs that multiply it.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.strategy == "fsdp" and device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "32"
    model = config.build().to(device)
    if settings.checkpoint_blocks:
        set_checkpoint_blocks(model)
    most = max(1, settings.samples(task) // (launch.processes(settings) * settings.accumulate))
    samples, best = 1, None
    while True:
        indices = [i % len(task.train) for i in range(samples)]
        loaded = {name: value.to(device) for name, value in task.train.__getitems__(indices).items()}
        try:
            half = min(_seconds(model, task, loaded, True) for _ in range(3))
            full = min(_seconds(model, task, loaded, False) for _ in range(3))
        except torch.OutOfMemoryError:
            return best or "bf16"
        best = "bf16" if half < MAX_TIME_RATIO * full else "32"
        if full >= ENOUGH or half >= ENOUGH or samples >= most:
            return best
        samples = min(most, 4 * samples)


def _seconds(model: Model, task: Task, batch: Batch, bf16: bool) -> float:
    device = next(model.parameters()).device
    start = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        loss = task.loss(model, batch)
    loss.backward()
    loss.item()  # waits for the device
    model.zero_grad()
    return time.perf_counter() - start

"""Choice between float32 and bf16 autocast by a short measurement of the model on this machine."""

import time
from typing import Any, Literal

import torch

from lintra.models import Model
from lintra.tasks import Batch, Task

ENOUGH = 0.2  # seconds that a pass must take for its time to mean something
MIN_STEPS = 0.9  # of the time in float32


def measured(config: Any, task: Task, batch: int) -> Literal["32", "bf16"]:
    """The faster precision of a forward and backward pass, of as many of `batch` samples as show it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = config.build().to(device)
    samples = 1
    while True:
        indices = [i % len(task.train) for i in range(samples)]
        loaded = {name: value.to(device) for name, value in task.train.__getitems__(indices).items()}
        full, half = (min(_seconds(model, task, loaded, bf16) for _ in range(3)) for bf16 in (False, True))
        if full >= ENOUGH or half >= ENOUGH or samples >= batch:
            return "bf16" if half < MIN_STEPS * full else "32"
        samples = min(batch, 4 * samples)


def _seconds(model: Model, task: Task, batch: Batch, bf16: bool) -> float:
    device = next(model.parameters()).device
    start = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        loss = task.loss(model, batch)
    loss.backward()
    loss.item()  # waits for the device
    model.zero_grad()
    return time.perf_counter() - start

"""The data of a run before its first step: a fingerprint of them, and whether its batches fit in memory."""

import hashlib
from typing import Any

import numpy as np
import torch

from lintra.allocator import available
from lintra.io.files import Error
from lintra.tasks import Batch, Task
from lintra.train.config import Config
from lintra.train.launch import is_first_process, processes
from lintra.train.run import RUN, Run

_LOOKED_AT = 64  # samples of each split, evenly spread
_NUMBER = 40  # bytes of a sample's number in the list of a batch, as Python keeps it


def fingerprint(task: Task) -> dict[str, Any]:
    """Return how many samples there are, how long the longest is, and a digest of some of them.

    Paths are not in it, since files may move, and of floats only the shapes are, since numbers computed on
    another machine may differ in their last bits. Nor is a tensor that a task samples again at each access.
    """
    digest = hashlib.sha256()
    for samples in (task.train, task.validate):
        digest.update(f"{len(samples)}".encode())
        places = spread(len(samples), _LOOKED_AT)
        looks, again = ([_content(samples.__getitems__([place])) for place in places] for _ in range(2))
        # Left out in every sample: of few choices, the same one may be sampled twice in some of them.
        sampled = {name for a, b in zip(looks, again, strict=True) for name in a if b.get(name) != a[name]}
        for look in looks:
            for name in sorted(look.keys() - sampled):
                digest.update(look[name])
    found = {"samples": len(task.train), "length": task.length, "digest": digest.hexdigest()[:16]}
    held_out = task.held_out()
    return found if held_out is None else found | {"held_out": held_out}


def spread(n: int, most: int) -> list[int]:
    """Return at most so many of the numbers below n, evenly spread."""
    return np.linspace(0, max(0, n - 1), min(n, most)).astype(int).tolist()


def _content(batch: Batch) -> dict[str, bytes]:
    """The part of each tensor that is in the digest."""
    return {
        name: f"{name} {x.dtype} {list(x.shape)}".encode()
        + (b"" if x.is_floating_point() else x.contiguous().numpy().tobytes())
        for name, x in batch.items()
    }


def check_begun(run: Run, task: Task) -> dict[str, Any]:
    """Return the fingerprint of the data. Raises Error unless the task fits the run's model and, in the first
    process, with which the others compare theirs, the data are those that the run began with."""
    task.check(run.model)
    found = fingerprint(task)
    if run.data is not None and is_first_process():
        check_same(found, run.data, run.folder / RUN)
    return found


def check_held_out(task: Task, begun_with: dict[str, Any], run: Any) -> None:
    """Raise Error unless the samples to validate on are those that were held out when the run began, whose
    fingerprint was `begun_with`: others may have been learned from."""
    held_out = task.held_out()
    found = fingerprint(task) if held_out is None else {"held_out": held_out}
    check_same(found, {name: x for name, x in begun_with.items() if name in found}, run)


def check_same(found: dict[str, Any], begun_with: dict[str, Any], run: Any) -> None:
    """Raise Error, with both, unless a fingerprint is the one that the run began with, which may lack what
    an earlier version did not record."""
    found = {name: x for name, x in found.items() if name in begun_with or name != "held_out"}
    if found != begun_with:
        raise Error(
            f"{run} was begun with other data or another length: {_format(begun_with)}; now it is "
            f"{_format(found)}. Put the data back as they were, or begin a new run"
        )


def _format(data: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in data.items())


def check_room(task: Task, model: Any, settings: Config, device: torch.device) -> None:
    """Raise ValueError if even a lower bound on the memory of a batch exceeds what is free on the device.

    The bound counts a batch of the shortest sequences of a sample of the data, and the float32 input of each
    layer, which the backward pass keeps. Batches of a number of tokens are not checked."""
    free = available(device)
    if task.batch_tokens is not None or free is None or not len(task.train):
        return
    inner = getattr(model, "encoder", model)
    sizes = []
    for place in spread(len(task.train), _LOOKED_AT):
        batch = task.train.__getitems__([place])
        tokens = max((x.shape[1] for x in batch.values() if x.dim() > 1), default=1)
        kept = 4 * tokens * inner.width * inner.layers // settings.accumulate  # of one part at a time
        sizes.append(sum(x.nbytes for x in batch.values()) + kept)
    batch = settings.samples(task)
    needed = batch * (_NUMBER + min(sizes))
    free *= processes(settings) if device.type == "cuda" else 1  # each has its share of the batch
    if needed > free:
        flag = "--batch" if task.batch is None else "--batch-tokens"
        raise ValueError(
            f"a batch of {batch:,} sequences needs at least {needed / 1e9:,.1f} GB and "
            f"{free / 1e9:.1f} GB are free: take a smaller {flag}, or more parts of it with --accumulate"
        )

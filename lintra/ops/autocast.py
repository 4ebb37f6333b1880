"""Autocast: the dtype it casts to, and contexts that keep it off."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from lintra.ops.checks import sum_dtype

P = ParamSpec("P")
R = TypeVar("R")


def in_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the device of x. Not every device knows autocast."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def follow_autocast(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in autocast's dtype where it is on, as for a product of matrices."""
    if not (isinstance(tensors[0], Tensor) and in_autocast(tensors[0])):
        return list(tensors)
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    narrowed = (torch.float16, torch.bfloat16, torch.float32)
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype in narrowed else x for x in tensors]


def without_autocast(op: Callable[P, R]) -> Callable[P, R]:
    """Let an op compute in the dtype of its tensors where autocast is on, whatever implements it."""

    @wraps(op)
    def call(*args: P.args, **options: P.kwargs) -> R:
        tensor = next((x for x in (*args, *options.values()) if isinstance(x, Tensor)), None)
        with nullcontext() if tensor is None else no_autocast(tensor):
            return op(*args, **options)

    return call


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which operations on the device of x keep their digits. Where autocast is off
    nothing is entered: that would cost more than the sum of a few tokens."""
    return torch.autocast(x.device.type, enabled=False) if in_autocast(x) else nullcontext()


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the dtype of sums, of at least 32 bits: a later norm magnifies rounding errors, and
    logarithms and differences of near numbers need more digits than 16 bits have."""
    return tuple(x.to(sum_dtype(x.dtype)) for x in tensors)

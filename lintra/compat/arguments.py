"""Checks of the arguments of the stand-ins for other packages' kernels, beside `lintra.ops.checks`."""

from typing import NamedTuple

import torch
from torch import Tensor

from lintra.ops import checks


class Dropped(NamedTuple):
    """An initial state that the caller no longer needs: the final one may overwrite it."""

    state: Tensor


def refuse(name: str, reason: str) -> None:
    """Raise NotImplementedError for an argument that a stand-in does not support."""
    raise NotImplementedError(f"{name} is not supported by lintra's stand-in: {reason}")


def tensors(given: dict[str, tuple[Tensor | None, str]]) -> dict[str, int]:
    """Return the size of each letter in the axes ("b t h d") of tensors by name; None is not given.

    Raises NotImplementedError for complex tensors, TypeError for anything but floating tensors, and
    ValueError for shapes that disagree and for tensors that are not on the device of the first.
    """
    sizes: dict[str, int] = {}
    first, (leader, _) = next(iter(given.items()))
    for name, (x, letters) in given.items():
        if x is None:
            continue
        checks.shape(name, x, letters, sizes)
        if x.is_complex():
            refuse(name, f"it must be real, got {x.dtype}")
        checks.floating(name, x)
        _same_device(name, x, first, leader)
    return sizes


def integers(
    name: str, x: Tensor | None, letters: str, sizes: dict[str, int], beside: Tensor, other: str
) -> None:
    """Raise ValueError or TypeError unless x is None or of int32 or int64, has these axes and is on the
    device of the tensor `beside`, which is called `other`."""
    if x is None:
        return
    checks.shape(name, x, letters, sizes)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")
    _same_device(name, x, other, beside)


def written_in_place(name: str, x: Tensor) -> None:
    """Tell autograd that a kernel is about to overwrite a tensor, so that a graph that saved it refuses to
    run backward. Raise ValueError where several of its places share memory."""
    if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{name} is written to: rows must not share memory, got strides {list(x.stride())}")
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def state_before(state: Tensor, dtype: torch.dtype, *inputs: Tensor | None) -> Tensor:
    """Return a state in a dtype; where gradients of it or of the inputs are recorded, a copy for the
    backward: callers such as transformers' caches write the next state over theirs."""
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (state, *inputs))
    return state.to(dtype, copy=recorded)


def no_leaf(name: str, x: Tensor) -> None:
    """Raise ValueError for a leaf that requires grad where gradients are recorded: like PyTorch, which does
    not let such a leaf be overwritten, since its gradient would be of a value that is gone."""
    if torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
        raise ValueError(f"{name} is written to: it cannot be a leaf that requires grad, pass {name}.clone()")


def rows_below(name: str, indices: Tensor | None, count: int) -> None:
    """Raise ValueError where an index is not below `count`; where readable."""
    if indices is not None and checks.readable(indices) and indices.numel() and int(indices.max()) >= count:
        raise ValueError(f"{name} must be below the {count} rows of states, got {int(indices.max())}")


def _same_device(name: str, x: Tensor, other: str, beside: Tensor | None) -> None:
    if beside is not None and x.device != beside.device:
        raise ValueError(f"{name} must be on the device of {other}, {beside.device}, got {x.device}")


def same_dtype(x: Tensor, *others: Tensor) -> list[Tensor]:
    """Return the tensors in the widest dtype among them: their products are rounded once."""
    dtype = x.dtype
    for y in others:
        dtype = torch.promote_types(dtype, y.dtype)
    return [y.to(dtype) for y in (x, *others)]

"""Which implementation of an op runs here, and why not another."""

from typing import NamedTuple

import torch
from torch import Tensor

from lintra import native

IMPLEMENTATIONS = {"linear_attention": ("native", "torch", "reference")}  # fastest first


class Row(NamedTuple):
    """One line of `lintra info`."""

    op: str
    implementation: str
    serves: bool  # chosen by impl="auto" for float32 tensors on this machine's CPU
    reason: str


def choose(op: str, impl: str, x: Tensor) -> str:
    """The implementation to run for tensors like `x`.

    Raises ValueError for an unknown `impl` and RuntimeError, with the reason, for one that cannot run.
    """
    if impl == "auto":
        return next(name for name in IMPLEMENTATIONS[op] if _why_not(name, x.device, x.dtype) is None)
    if impl not in IMPLEMENTATIONS[op]:
        raise ValueError(f"impl must be 'auto' or one of {IMPLEMENTATIONS[op]}, got {impl!r}")
    reason = _why_not(impl, x.device, x.dtype)
    if reason is not None:
        raise RuntimeError(f"impl={impl!r} cannot serve {op} here: {reason}")
    return impl


def explain() -> list[Row]:
    """For every op, what serves float32 tensors on the CPU and why the others do not."""
    rows = []
    for op, names in IMPLEMENTATIONS.items():
        chosen = choose(op, "auto", torch.empty(0))
        for name in names:
            reason = _why_not(name, torch.device("cpu"), torch.float32)
            rows.append(Row(op, name, name == chosen, reason or _ROLES[name]))
    return rows


_ROLES = {
    "native": "C++ kernels for the CPU",
    "torch": "chunked PyTorch, every device and dtype, differentiable any number of times",
    "reference": "the quadratic definition, for tests",
}


def _why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if name != "native":
        return None
    if device.type != "cpu":
        return f"it runs on the CPU, the tensors are on {device.type}"
    return native.why_not()

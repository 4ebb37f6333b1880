"""Which implementation of an op runs here, and why not another."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lintra import native

IMPLEMENTATIONS = {"linear_attention": ("native", "torch", "reference")}  # fastest first


class Row(NamedTuple):
    """One line of `lintra info`."""

    op: str
    implementation: str
    serves: bool  # chosen by impl="auto" for float32 tensors on this machine's CPU
    reason: str


def choose(op: str, impl: str, *tensors: Tensor) -> str:
    """The implementation to run for these tensors.

    Raises ValueError for an unknown `impl` and RuntimeError, with the reason, for one that cannot run.
    """
    if impl == "auto":
        return next(name for name in IMPLEMENTATIONS[op] if _why_not(name, tensors) is None)
    if impl not in IMPLEMENTATIONS[op]:
        raise ValueError(f"impl must be 'auto' or one of {IMPLEMENTATIONS[op]}, got {impl!r}")
    reason = _why_not(impl, tensors)
    if reason is not None:
        raise RuntimeError(f"impl={impl!r} cannot serve {op} here: {reason}")
    return impl


def explain() -> list[Row]:
    """For every op, what serves float32 tensors on the CPU and why the others do not."""
    rows = []
    for op, names in IMPLEMENTATIONS.items():
        chosen = choose(op, "auto")
        for name in names:
            reason = _why_not(name, ())
            rows.append(Row(op, name, name == chosen, reason or _ROLES[name]))
    return rows


_ROLES = {
    "native": "C++ kernels for the CPU",
    "torch": "chunked PyTorch, every device and dtype, differentiable any number of times",
    "reference": "the quadratic definition, for tests",
}


def transformed(x: Tensor) -> bool:
    """Whether `x` is inside a torch.func transform or forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore (it has no stub)
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _why_not(name: str, tensors: Sequence[Tensor]) -> str | None:
    if name != "native":
        return None
    for x in tensors:
        if x.device.type != "cpu":
            return f"it runs on the CPU, the tensors are on {x.device.type}"
        if transformed(x):
            return "it has no rule for torch.func and forward-mode differentiation; impl='torch' has"
    return native.why_not()

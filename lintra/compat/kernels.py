"""Kernels that programs take from other packages, and how calls on a CPU reach lintra's own.

A kernel has the name it has in its package: chunk_gated_delta_rule of fla, selective_scan_fn of mamba_ssm.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from lintra.compat.arguments import Dropped

PACKAGES = ("fla", "mamba_ssm", "causal_conv1d")
# kernel -> the module of its package that has it; those that transformers requests by name alone. Left out
# are kernels of a whole mixer, mamba_inner_fn and mamba_split_conv1d_scan_combined: they pass by its modules,
# adapters of LoRA included, norm the steps of Falcon Mamba elsewhere than its own code does, and gain little.
MODULES = {
    "causal_conv1d_fn": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "fused_recurrent_gated_delta_rule": "fla.ops.gated_delta_rule",
    "fused_recurrent_kda": "fla.ops.kda",
    "mamba_chunk_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
    "selective_scan_fn": "mamba_ssm.ops.selective_scan_interface",
    "selective_state_update": "mamba_ssm.ops.triton.selective_state_update",
}

_STEPS = ("fused_recurrent_gated_delta_rule", "fused_recurrent_kda")  # from a state to a state


def asked_for(module: ModuleType) -> Iterator[tuple[str, str, FunctionType]]:
    """Yield (name in the module, kernel, function) for each kernel of `PACKAGES` that a module uses.

    Either transformers' own fallback, which names the kernel it stands for, or a package's function.
    """
    for name, function in list(vars(module).items()):
        if isinstance(function, FunctionType) and not serves_cpu(function):
            kernel = _kernel(function)
            if kernel is not None and ours(kernel, function.__module__) is not None:
                yield name, kernel, function


def ours(kernel: str, origin: str = "") -> Callable[..., Any] | None:
    """Return lintra's function for a kernel; None without one.

    origin: the module it comes from. One of `PACKAGES` is asked first, since two of them may have functions
    of one name and other arguments; `MODULES` says where those of other modules stand for."""
    package, listed = origin.partition(".")[0], MODULES.get(kernel, "")
    places = [origin] if package in PACKAGES else []
    if package not in PACKAGES or listed.partition(".")[0] == package:
        places.append(listed)
    for place in places:
        while place.partition(".")[0] in PACKAGES:  # the kernel of fla.ops.gla may be in fla.ops.gla.chunk
            try:
                found = getattr(import_module(f"lintra.compat.{place}"), kernel, None)
            except ModuleNotFoundError:
                found = None
            if isinstance(found, FunctionType):  # and no module of that name
                return found
            place = place.rpartition(".")[0]
    return None


def on_cpu(mine: Callable[..., Any], theirs: Callable[..., Any], *, drop: bool) -> Callable[..., Any]:
    """Return a function that calls `mine` with tensors on the CPU and `theirs` with all others.

    Under torch.export it is `theirs` too, whose operators every runtime has. drop: as transformers calls any
    implementation, without keyword arguments that `mine` does not have, and with states for which it takes
    the final ones: a step may write these over them.
    """
    names = inspect.signature(mine).parameters
    drops_states = drop and mine.__name__ in _STEPS

    @functools.wraps(theirs, updated=())  # without a mark that keeps compilers out
    def dispatched(*args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if torch.compiler.is_exporting() or any(x.device.type != "cpu" for x in tensors):
            return theirs(*args, **kwargs)
        if drop:
            kwargs = {name: x for name, x in kwargs.items() if name in names}
        state = kwargs.get("initial_state")
        if drops_states and isinstance(state, Tensor) and kwargs.get("output_final_state"):
            kwargs["initial_state"] = Dropped(state)
        return mine(*args, **kwargs)

    dispatched.lintra_serves_cpu = True  # pyright: ignore[reportAttributeAccessIssue]
    return dispatched


def serves_cpu(function: Callable[..., Any]) -> bool:
    """Return whether a function comes from `on_cpu`."""
    return getattr(function, "lintra_serves_cpu", False)


def of_transformers(function: FunctionType) -> bool:
    """Return whether a function is transformers' choice between a package's kernel and its own fallback."""
    return "func_name" in function.__code__.co_freevars and hasattr(function, "__wrapped__")


def slow(module: ModuleType) -> Iterator[str]:
    """Yield the package of each kernel that a module of transformers does not take from lintra."""
    for function in vars(module).values():
        if isinstance(function, FunctionType) and of_transformers(function) and not serves_cpu(function):
            around = _variables(function)
            found = around["implementation"]
            if not serves_cpu(found) and not found.__module__.startswith("lintra."):
                yield around["package"]


def _kernel(function: FunctionType) -> str | None:
    """Return the name of the kernel that a function is, or stands for; None for any other function."""
    if of_transformers(function):
        return _variables(function)["func_name"]
    return function.__name__ if (function.__module__ or "").partition(".")[0] in PACKAGES else None


def _variables(function: FunctionType) -> dict[str, Any]:
    """Return the variables of the functions around this one that it uses."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}

"""Kernels that programs take from other packages, and how calls on a CPU reach lintra's own.

A kernel has the name it has in its package: chunk_gated_delta_rule of fla, selective_scan_fn of mamba_ssm.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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


class Use(NamedTuple):
    """A kernel of `PACKAGES` that a module uses."""

    name: str  # in the module
    kernel: str  # its name in its package
    theirs: Any  # what the module calls: transformers' own fallback, or the package's function
    mine: Callable[..., Any]  # lintra's function
    drop: bool  # as `on_cpu` takes it


def asked_for(module: ModuleType) -> Iterator[Use]:
    """Yield each kernel of `PACKAGES` that a module uses and does not yet have from lintra.

    Either transformers' own fallback, which names the kernel it stands for, or a package's function.
    """
    for name, theirs in list(vars(module).items()):
        function = _function(theirs)
        if function is None or serves_cpu(function):
            continue
        kernel, origin = _kernel(name, function)
        mine = ours(kernel, origin) if kernel else None
        if mine is not None:
            yield Use(name, kernel, theirs, mine, drop=of_transformers(function))


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


def of_transformers(function: Callable[..., Any]) -> bool:
    """Return whether a function is transformers' choice between a package's kernel and its own fallback."""
    around = function.__code__.co_freevars if isinstance(function, FunctionType) else ()
    return "func_name" in around and hasattr(function, "__wrapped__")


def slow(module: ModuleType) -> Iterator[str]:
    """Yield the package of each kernel that a module of transformers does not take from lintra."""
    for function in map(_function, vars(module).values()):
        if function is not None and of_transformers(function) and not serves_cpu(function):
            around = _variables(function)
            found = around["implementation"]
            if not serves_cpu(found) and not found.__module__.startswith("lintra."):
                yield around["package"]


def _function(x: Any) -> FunctionType | MethodType | None:
    """Return x where it is a function, or the one that it calls: the package kernels, where transformers
    finds it, makes layers of functions. None for anything else."""
    if isinstance(x, nn.Module):
        x = _variables(type(x).forward).get("func")
    return x if isinstance(x, FunctionType | MethodType) else None


def _kernel(name: str, function: FunctionType | MethodType) -> tuple[str, str]:
    """Return the kernel that a function, called `name`, is or stands for, and the module that it is from; of
    any other function, an empty string."""
    if of_transformers(function):
        return _variables(function)["func_name"], function.__module__
    kernel, origin = function.__name__, function.__module__ or ""
    if kernel == "apply" and isinstance(function, MethodType):  # of an autograd.Function: swiglu of fla
        kernel, origin = name, function.__self__.__module__
    return kernel if origin.partition(".")[0] in PACKAGES else "", origin


def _variables(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables of the functions around this one that it uses; none of a method."""
    if not isinstance(function, FunctionType):
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}

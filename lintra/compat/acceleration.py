"""Models of transformers, FLA and mamba_ssm that are already built, run on lintra's CPU kernels."""

import sys
import warnings
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from lintra.compat import kernels


class Replaced(NamedTuple):
    """A function of a module that was replaced for calls on the CPU."""

    module: str  # that uses the function
    name: str  # of the function there
    kernel: str  # that serves in its place; empty once the function is restored


class Accelerated:
    """Record of the functions that `accelerate` replaced; a context manager that restores them at its end.

    replaced: the functions. Printed, a line for each of them.
    """

    def __init__(self, before: dict[Replaced, Callable[..., Any]]):
        self._before, self._undone = before, False

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        return tuple(self._before)

    def undo(self) -> None:
        """Put back the functions that were there before; done twice, it does nothing more."""
        if self._undone:  # the functions there now may belong to a later call
            return
        self._undone = True
        for (module, name, _), function in self._before.items():
            setattr(sys.modules[module], name, function)

    def __enter__(self) -> "Accelerated":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        lines = [f"{x.module}.{x.name}" + (f" -> {x.kernel}" if x.kernel else "") for x in self._before]
        done = "replaced" if all(x.kernel for x in self._before) else "restored"
        return "\n".join([f"lintra.accelerate {done}:", *lines] if lines else ["lintra.accelerate: nothing"])


def accelerate(model: nn.Module, *, undo: bool = False) -> Accelerated:
    """Run a model of transformers, FLA or mamba_ssm on lintra's CPU kernels: recurrences, short convolutions.

    model: any module that uses one of their kernels, or transformers' PyTorch form of it, as the families
    with the gated delta rule, KDA, SSD or selective scans do. Weights, states and outputs do not change, and
    tensors on other devices still go to the original functions. Functions are replaced in the Python
    modules that define the model's classes and their bases, hence for all models of these classes in the
    process.
    undo: restore these functions instead. Returns what was replaced, which also is a context manager:

        with lintra.accelerate(model):
            model.generate(...)

    A model with nothing to replace is left as it is, with a warning.
    """
    modules = {kind.__module__: None for part in model.modules() for kind in type(part).__mro__}
    found = [sys.modules[name] for name in modules if name in sys.modules]
    if undo:
        restored = {each: function for module in found for each, function in _replaced(module).items()}
        accelerated = Accelerated(restored)
        accelerated.undo()
        return accelerated
    before = {each: function for module in found for each, function in _replace(module).items()}
    if not before and not any(_served(module) for module in found):
        warnings.warn(
            f"lintra.accelerate changed nothing: {type(model).__name__} uses none of the kernels of "
            f"{', '.join(kernels.PACKAGES)} that lintra has (docs/huggingface.md lists the families)",
            stacklevel=2,
        )
    return Accelerated(before)


def _replace(module: ModuleType) -> dict[Replaced, Callable[..., Any]]:
    """Have a module's kernels served on the CPU -> the functions that were there."""
    before = {}
    for use in list(kernels.asked_for(module)):
        served: Any = kernels.on_cpu(use.mine, use.theirs, drop=use.drop)
        served.lintra_accelerates = True  # unlike the functions that `install` has wrapped
        setattr(module, use.name, served)
        kernel = f"{use.mine.__module__}.{use.mine.__name__}"
        before[Replaced(module.__name__, use.name, kernel)] = use.theirs
    return before


def _replaced(module: ModuleType) -> dict[Replaced, Callable[..., Any]]:
    """Return the functions that `accelerate` replaced in a module."""
    return {
        Replaced(module.__name__, name, ""): vars(x)["__wrapped__"]
        for name, x in _served(module).items()
        if hasattr(x, "lintra_accelerates")
    }


def _served(module: ModuleType) -> dict[str, FunctionType]:
    """Return the functions of a module that lintra's kernels serve on the CPU, by `accelerate` or
    `install`."""
    functions = {name: x for name, x in vars(module).items() if isinstance(x, FunctionType)}
    return {name: x for name, x in functions.items() if kernels.serves_cpu(x)}

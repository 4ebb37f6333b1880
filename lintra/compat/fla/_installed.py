"""The installed flash-linear-attention (FLA), with its functions sent to ours for tensors of the CPU.

A function that FLA dispatches by itself gets a backend, so that it is reached under names imported before as
well. The others are replaced where the modules of FLA hold them.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from lintra.compat.fla import ops
from lintra.compat.fla.ops.gated_delta_rule.gate import fused_gdn_gate
from lintra.compat.fla.ops.kda.gate import fused_kda_gate

Function = Callable[..., Any]

_SERVED: dict[str, Function] = {f"ops.{name}": getattr(ops, name) for name in ops.__all__}
_SERVED |= {
    "ops.gated_delta_rule.gate.fused_gdn_gate": fused_gdn_gate,
    "ops.kda.gate.fused_kda_gate": fused_kda_gate,
}
# What FLA dispatches: functions by themselves, and those of an operation that has a registry.
_BY_FUNCTION = ("chunk_kda", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla")
_BY_OPERATION = {"gated_delta_rule": "ops.chunk_gated_delta_rule", "kda": "ops.kda.gate.fused_kda_gate"}

_replaced: list[tuple[Any, str, Function]] = []  # module, name, what was there
_registered: set[str] = set()  # FLA has no way to take a backend out: one that is there says whether it is on


def wrap() -> None:
    """Send calls of the installed FLA to ours for tensors of the CPU; others go where they went.

    Done twice, it does nothing more. Functions that FLA does not dispatch are reached under the names that
    its own modules hold, not under those that others have imported before.
    Raises ImportError if FLA is not installed or cannot be imported here.
    """
    if _replaced:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA warns that there is no GPU, which is why we are asked
        try:
            originals = {path: _look_up(path) for path in _SERVED}
            import_module("fla.modules")
        except Exception as error:
            raise ImportError(f"the installed fla cannot be imported: {error}", name="fla") from error
    _register(originals)
    functions = {id(theirs): _on_cpu(_SERVED[path], theirs) for path, theirs in originals.items()}
    for module in [x for name, x in sys.modules.items() if name == "fla" or name.startswith("fla.")]:
        for name, value in list(vars(module).items()):
            if id(value) in functions:
                _replaced.append((module, name, value))
                setattr(module, name, functions[id(value)])


def unwrap() -> None:
    """Undo `wrap`: every function of the installed FLA is its own again."""
    while _replaced:
        module, name, theirs = _replaced.pop()
        setattr(module, name, theirs)


def _look_up(path: str) -> Function:
    module, name = path.rsplit(".", 1)
    return getattr(import_module(f"fla.{module}"), name)


def _on_cpu(ours: Function, theirs: Function) -> Function:
    """Return a function with the signature of `theirs` that is `ours` where its first tensor is on a CPU."""

    @functools.wraps(theirs, updated=())  # not the mark that keeps compilers out of it
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (ours if _is_ours(*args, **kwargs)[0] else theirs)(*args, **kwargs)

    return choose


def _is_ours(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    """Return whether the first tensor is on a CPU, and if not, why we are not to be called."""
    given = args[0] if args else next((x for x in kwargs.values() if isinstance(x, Tensor)), None)
    ours = isinstance(given, Tensor) and given.device.type == "cpu"
    return ours, None if ours else "lintra serves tensors of the CPU"


def _register(originals: dict[str, Function]) -> None:
    """Make us a backend, before all others, of what FLA dispatches."""
    backends = import_module("fla.backends")

    class Backend(backends.BaseBackend):
        backend_type = "lintra"
        priority = -1

        @classmethod
        def is_available(cls) -> bool:
            return bool(_replaced)

    for name in _BY_FUNCTION:
        path = f"ops.{name}"
        if path not in _registered:
            backends.register(originals[path], backend=Backend, verifier=_is_ours)(_SERVED[path])
            _registered.add(path)
    for operation, path in _BY_OPERATION.items():
        if path not in _registered:
            name = path.rsplit(".", 1)[1]
            methods = {name: staticmethod(_SERVED[path]), f"{name}_verifier": staticmethod(_is_ours)}
            backends.register(operation)(type("OperationBackend", (Backend,), methods))
            _registered.add(path)

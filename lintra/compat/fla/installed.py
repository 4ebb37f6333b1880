"""The installed flash-linear-attention (FLA), with its functions redirected to lintra's for tensors on the
CPU.

A function that FLA dispatches by itself gets a backend, so that it is reached under names imported before as
well. The others are replaced where the modules of FLA hold them.
"""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from lintra.compat.fla import ops
from lintra.compat.fla.modules import activations, causal_conv1d, rotary
from lintra.compat.fla.modules.norm import fused_norm_gate, l2norm, layernorm
from lintra.compat.fla.ops.gated_delta_rule.gate import fused_gdn_gate
from lintra.compat.fla.ops.kda.gate import fused_kda_gate
from lintra.compat.kernels import on_cpu

Function = Callable[..., Any]

_SERVED: dict[str, Function] = {
    **{f"ops.{name}": getattr(ops, name) for name in ops.__all__},
    "ops.gated_delta_rule.gate.fused_gdn_gate": fused_gdn_gate,
    "ops.kda.gate.fused_kda_gate": fused_kda_gate,
    "modules.activations.swiglu": activations.swiglu,
    "modules.activations.swiglu_linear": activations.swiglu_linear,
    "modules.causal_conv1d.ops.causal_conv1d": causal_conv1d.causal_conv1d,
    "modules.causal_conv1d.ops.causal_conv1d_update": causal_conv1d.causal_conv1d_update,
    "modules.norm.fused_norm_gate.rms_norm_gated": fused_norm_gate.rms_norm_gated,
    "modules.norm.l2norm.l2norm": l2norm.l2norm,
    "modules.norm.layernorm.rms_norm": layernorm.rms_norm,
    "modules.rotary.rotary_embedding": rotary.rotary_embedding,
}
# What FLA dispatches: functions by themselves, and those of an operation that has a registry.
_BY_FUNCTION = ("chunk_kda", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla")
_BY_OPERATION = {"gated_delta_rule": "ops.chunk_gated_delta_rule", "kda": "ops.kda.gate.fused_kda_gate"}

_wrapped: list[tuple[Function, Function]] = []  # theirs, and what stands in its place
_registered: set[str] = set()  # FLA has no way to take a backend out: one that is there says whether it is on


def wrap() -> None:
    """Redirect calls of the installed FLA to lintra for tensors on the CPU; all others are unchanged.

    Done twice, it does nothing more. Functions that FLA does not dispatch are reached under the names that
    its own modules hold, those loaded later included, not under those that others have imported before.
    Raises ImportError if FLA is not installed or cannot be imported here, or lacks a function that lintra
    serves.
    """
    if _wrapped:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA warns that there is no GPU, which is why we are asked
        try:
            originals = {path: _look_up(path) for path in _SERVED}
        except Exception as error:
            raise ImportError(f"the installed fla cannot be served by lintra: {error}", name="fla") from error
    _register(originals)
    _wrapped.extend((theirs, on_cpu(_SERVED[path], theirs, drop=False)) for path, theirs in originals.items())
    _replace({id(theirs): stand_in for theirs, stand_in in _wrapped})


def unwrap() -> None:
    """Undo `wrap`: every function of the installed FLA is its own again."""
    _replace({id(stand_in): theirs for theirs, stand_in in _wrapped})
    _wrapped.clear()


def _replace(functions: dict[int, Function]) -> None:
    """Put functions in place of those with these ids wherever modules of FLA hold them."""
    for module in [x for name, x in sys.modules.items() if name == "fla" or name.startswith("fla.")]:
        for name, value in list(vars(module).items()):
            if id(value) in functions:
                setattr(module, name, functions[id(value)])


def _look_up(path: str) -> Function:
    module, name = path.rsplit(".", 1)
    return getattr(import_module(f"fla.{module}"), name)


def _is_ours(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    """Return whether the first tensor is on a CPU, and if not, why we are not to be called."""
    given = args[0] if args else next((x for x in kwargs.values() if isinstance(x, Tensor)), None)
    ours = isinstance(given, Tensor) and given.device.type == "cpu"
    return ours, None if ours else "lintra serves tensors of the CPU"


def _register(originals: dict[str, Function]) -> None:
    """Register lintra as a backend, before all others, for the functions that FLA dispatches."""
    backends = import_module("fla.backends")

    class Backend(backends.BaseBackend):
        backend_type = "lintra"
        priority = -1

        @classmethod
        def is_available(cls) -> bool:
            return bool(_wrapped)

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

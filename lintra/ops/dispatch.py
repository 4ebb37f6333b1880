"""Choice of the implementation of each op, with the reason why others cannot run."""

import os
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from lintra import native
from lintra.ops.checks import transformed

_Made = TypeVar("_Made")

IMPLEMENTATIONS = {  # fastest first
    "linear_attention": ("triton", "native", "torch", "reference"),
    "recurrence": ("triton", "native", "torch", "reference"),  # the delta rule, and decays of every feature
    "causal_conv1d": ("native", "torch", "reference"),
    "selective_scan": ("native", "torch", "reference"),
    "softmax": ("native", "torch"),  # to bands, segments, listed blocks, sorted chunks
}

# Both here and not at the first call, which torch.compile may be tracing. Triton is imported when it is used.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's kernels in Python, on the CPU: for tests


def _triton() -> str | None:
    """Return the version of Triton, "" if it goes by another name, None if it is missing."""
    if find_spec("triton") is None:
        return None
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


_TRITON = _triton()
_TRITON_NEEDED = (3, 4)  # earlier ones do not compile all of the kernels
_CAPABILITY = (8, 0)  # the first with TF32 and bfloat16
_STATE_MOST = 65_535 * 1_024  # numbers: the programs of a launch along an axis, times the numbers of each
_FEATURES_MOST = 256  # of a recurrence, whose programs hold whole columns of a state
_warned: set[str] = set()


class ImplementationStatus(NamedTuple):
    """One line of `lintra info`."""

    op: str
    implementation: str
    serves: str  # the devices on which impl="auto" takes it for float32 tensors: "CPU", "GPU", both or none
    reason: str


def choose(op: str, impl: str, *tensors: Tensor) -> str:
    """The implementation to run for these tensors.

    Raises ValueError for an unknown `impl` and RuntimeError, with the reason, for one that cannot run.
    """
    if impl == "auto":
        _warn_of_slow_gpu(op, tensors)
        on_gpu = bool(tensors) and tensors[0].is_cuda  # interpreted, Triton could run anywhere, slowly
        names = [name for name in IMPLEMENTATIONS[op] if on_gpu or name != "triton"]
        return next(name for name in names if _why_not(op, name, tensors) is None)
    if impl not in IMPLEMENTATIONS[op]:
        raise ValueError(f"impl must be 'auto' or one of {IMPLEMENTATIONS[op]}, got {impl!r}")
    if impl == "native" and torch.compiler.is_exporting():
        return impl  # an exported graph names the operator, which need not be able to run here
    reason = _why_not(op, impl, tensors)
    if reason is not None:
        raise RuntimeError(f"impl={impl!r} cannot serve {op} here: {reason}")
    return impl


def serves(op: str, impl: str, *tensors: Tensor) -> bool:
    """Return whether an implementation can run for these tensors."""
    return _why_not(op, impl, tensors) is None


def explain() -> list[ImplementationStatus]:
    """Return, for every op, what runs for float32 tensors on this machine's CPU and GPU and why the others do
    not."""
    rows = []
    for op, names in IMPLEMENTATIONS.items():
        chosen = {"CPU": choose(op, "auto")}
        if torch.cuda.is_available():
            there = "triton" in names and _no_gpu_kernels(torch.device("cuda")) is None
            chosen["GPU"] = "triton" if there else "torch"
        for name in names:
            reason = _why_not(op, name, ())
            serves = ", ".join(device for device, each in chosen.items() if each == name)
            rows.append(ImplementationStatus(op, name, serves, reason or _ROLES[name]))
    return rows


_ROLES = {
    "triton": "Triton kernels for NVIDIA GPUs",
    "native": "C++ kernels for the CPU",
    "torch": "PyTorch, every device and dtype, differentiable any number of times",
    "reference": "the definition, for tests",
}


def _why_not(op: str, name: str, tensors: Sequence[Tensor]) -> str | None:
    if name == "native":
        return _why_not_native(tensors)
    return _why_not_triton(op, tensors) if name == "triton" else None


def _why_not_native(tensors: Sequence[Tensor]) -> str | None:
    for x in tensors:
        if x.device.type != "cpu":
            return f"it runs on the CPU, the tensors are on {x.device.type}"
        if transformed(x):
            return _NO_TRANSFORMS
    return native.why_not()


_NO_TRANSFORMS = "it has no rule for torch.func and forward-mode differentiation; impl='torch' has"


def _why_not_triton(op: str, tensors: Sequence[Tensor]) -> str | None:
    if op == "recurrence" and tensors and tensors[0].shape[-1] > _FEATURES_MOST:
        return f"keys of {tensors[0].shape[-1]} features are wider than {_FEATURES_MOST}, the most it takes"
    for x in tensors:
        if not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
            return f"it runs on an NVIDIA GPU, the tensors are on {x.device.type}"
        if x.dtype == torch.float64:
            return "it has float32 sums, the tensors are float64; impl='torch' keeps their digits"
        if transformed(x):
            return _NO_TRANSFORMS
        # Tiles fit at any width; of the arguments only kv [b g f e] may be as large as this.
        if x.dim() == 4 and x.shape[2] * (x.shape[3] + 1) >= _STATE_MOST:
            return f"a state of {x.shape[2]} x {x.shape[3]} numbers is too large for one launch over it"
    return _no_gpu_kernels(tensors[0].device if tensors else torch.device("cuda"))


def _no_gpu_kernels(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on this device, whatever the tensors; None if they can."""
    if _TRITON is None:
        return "Triton is not installed (on Linux: pip install triton)"
    if _TRITON and tuple(int(part) for part in _TRITON.split(".")[:2]) < _TRITON_NEEDED:
        return f"it needs Triton {'.'.join(map(str, _TRITON_NEEDED))} or later, found {_TRITON}"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "there is no GPU that PyTorch can use"
    if torch.version.hip is not None:
        return "it runs on NVIDIA GPUs only"
    properties = torch.cuda.get_device_properties(device)
    found = (properties.major, properties.minor)
    if found < _CAPABILITY:
        needed = ".".join(map(str, _CAPABILITY))
        return f"it needs compute capability {needed}, {properties.name} has {found[0]}.{found[1]}"
    return None


def _warn_of_slow_gpu(op: str, tensors: Sequence[Tensor]) -> None:
    """Warn once for each reason, where there is a GPU but the op's kernels for it are not available."""
    if torch.compiler.is_compiling() or not (tensors and tensors[0].is_cuda):
        return
    if "triton" not in IMPLEMENTATIONS[op]:
        return
    reason = _no_gpu_kernels(tensors[0].device)
    if reason is not None and reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"{op} on the GPU is chunked PyTorch here, not Triton: {reason}", stacklevel=4)


def eager() -> bool:
    """Return whether calls are computed at once: no graph is made of them, and no transform is active."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def once(kept: dict[Any, Any], name: Any, make: Callable[[], _Made]) -> _Made:
    """Return what `make` makes, kept by this name for later calls in the same mode, inference or not: no
    backward may keep a tensor of inference mode.

    Where calls are not computed at once it is made each time. A compiler sees repeated computation itself, an
    object must not change in a block that is computed again in the backward, and the tensors of a transform
    do not outlive it."""
    if not eager():
        return make()
    name = (torch.is_inference_mode_enabled(), name)
    if name not in kept:
        kept[name] = make()
    return kept[name]


def can_skip_operator(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether `can_call_kernels` holds without autocast and for one dtype, that of sums."""
    dtype = x.dtype
    if torch.is_autocast_enabled("cpu") or (dtype is not torch.float32 and dtype is not torch.float64):
        return False
    return all(y is None or y.dtype is dtype for y in others) and can_call_kernels(x, *others)


def can_call_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether the C++ kernels can be called directly: they are available, x has a dtype that they
    read, and only numbers are needed, on the CPU: no gradients, no graphs, no transforms. PyTorch's
    dispatcher takes longer than the kernels do for one token."""
    if not eager():
        return False
    recorded = torch.is_grad_enabled()
    for y in (x, *others):
        if y is None:
            continue
        plain = (type(y) is Tensor or type(y) is Parameter) and y.device.type == "cpu"
        if not plain or (recorded and y.requires_grad) or y.is_neg():  # whose numbers are not those in memory
            return False
    return x.dtype in native.DTYPES and native.available()

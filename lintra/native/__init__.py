"""The library of C++ kernels for the CPU: its loader, and helpers for calls of all kernels.

It has a plain C interface, reached with ctypes (which releases the GIL), and holds one build of the kernels
per instruction set. The environment variable LINTRA_NATIVE chooses one ("avx512", "avx2", "baseline", "neon")
or "off". The kernels are called in the other files of this folder; `lintra.native.decoder` is one token
through a whole network.

Needs only torch and the standard library.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ABI = 9  # LINTRA_ABI of the sources in this folder
INSTRUCTION_SETS = ("baseline", "avx2", "avx512", "neon")  # in the order of the enumeration in abi.h
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
FEATURE_MAPS = {None: 0, "elu+1": 1, "relu": 2, "exp": 3}
ACTIVATIONS = {"gelu": 0, "swiglu": 1, "relu": 2}  # of MLPs, here and in files of the runtime
VARIABLE = "LINTRA_NATIVE"

_NO_TENSOR = (0, 0, 0, 0)
LINEAR_ATTENTION = struct.Struct("13q d 25q 7q 4q 9q")  # lintra_call
RECURRENCE = struct.Struct("15q d 12q 12q 1q 4q 4q 7q")  # lintra_recurrence
CONV1D = struct.Struct("9q 4q 4q 1q 3q 2q 4q 1q 4q")  # lintra_conv1d
CONV1D_STEP = struct.Struct("9q 4q 4q 2q 3q")  # lintra_conv1d_step
SCAN = struct.Struct("11q 24q 5q 4q 2q 4q 1q 12q 6q")  # lintra_scan
SOFTMAX = struct.Struct("16q d 28q 5q 2q 4q 4q")  # lintra_softmax
DECODER_HEAD = struct.Struct("4q")  # lintra_decoder up to params
DECODER_REST = struct.Struct("12q 2d 8q")  # and from there on
LAYER = struct.Struct("26q")  # lintra_layer
_SIZES = {"call": LINEAR_ATTENTION, "recurrence": RECURRENCE, "conv1d": CONV1D, "conv1d_step": CONV1D_STEP}
_SIZES |= {"scan": SCAN, "softmax": SOFTMAX, "layer": LAYER}
_SIZES |= {"decoder": struct.Struct(f"{DECODER_HEAD.format} {DECODER_REST.format}")}
_FUNCTIONS = ("forward", "backward", "decode", "recurrence_forward", "recurrence_backward")
_FUNCTIONS += ("conv1d_forward", "conv1d_backward", "conv1d_step_forward", "scan_forward", "scan_backward")
_FUNCTIONS += ("softmax_forward", "softmax_backward")
_OK, _NO_MEMORY = 0, 1
_PROCESS = os.getpid()


class _Unusable(RuntimeError):
    """A library cannot serve here; the message says why."""


def _folders() -> list[Path]:
    """Beside this file; and, for an editable install, where the built files of the installed package are."""
    folders = [Path(__file__).parent]
    with suppress(PackageNotFoundError):
        folders.append(Path(str(distribution("lintra").locate_file("lintra/native"))))
    return folders


def library_file(name: str) -> Path:
    """Return where a library of that name was installed. Raises RuntimeError if it was not."""
    folders = _folders()
    for folder in folders:
        if (file := folder / name).exists():
            return file
    places = ", ".join(str(folder) for folder in dict.fromkeys(folders))
    raise _Unusable(f"the native library is not built (no {name} in {places})")


def _load() -> ctypes.CDLL:
    file = library_file("liblintra.so")
    try:
        library = ctypes.CDLL(str(file))
        abi = library.lintra_abi
    except (OSError, AttributeError) as error:
        raise _Unusable(f"{file} does not load: {error}") from error
    abi.restype = ctypes.c_int64
    if abi() != ABI:
        raise _Unusable(f"{file} has interface version {abi()}, these sources need {ABI}: reinstall lintra")
    for name, layout in _SIZES.items():
        size = getattr(library, f"lintra_{name}_size")
        size.restype = ctypes.c_int64
        if size() != layout.size:
            raise _Unusable(f"{file} was built for another kind of machine: its structures differ in size")
    library.lintra_usable.restype = ctypes.c_int64
    library.lintra_usable.argtypes = [ctypes.c_int64]
    library.lintra_use_openmp.argtypes = [ctypes.c_void_p]
    library.lintra_use_openmp.restype = None
    for name in _FUNCTIONS:
        function = getattr(library, f"lintra_{name}")
        function.argtypes = [ctypes.c_char_p]
        function.restype = ctypes.c_int
    # In a forked child the team's threads may be missing, and calling it would hang. A bare os.fork before
    # the first import of this module cannot be seen; there PyTorch's own parallel loops hang as well.
    fresh = multiprocessing.parent_process() is None or "--multiprocessing-fork" in sys.orig_argv  # by spawn
    if os.getpid() == _PROCESS and fresh:
        library.lintra_use_openmp(_gomp_parallel())
    return library


def _gomp_parallel() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that PyTorch has loaded, or None."""
    try:
        with open("/proc/self/maps") as maps:
            files = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if "omp" in line}
    except OSError:  # not Linux
        return None
    torch_folder = str(Path(torch.__file__).parent)
    # A process may hold several runtimes (scikit-learn brings its own): PyTorch's first.
    for file in sorted(files, key=lambda file: (not file.startswith(torch_folder), file)):
        if Path(file).name.startswith(("libgomp", "libiomp", "libomp")):
            try:
                return ctypes.cast(ctypes.CDLL(file).GOMP_parallel, ctypes.c_void_p).value
            except (OSError, AttributeError):
                continue
    return None


def _choose(usable: list[str], value: str | None) -> int | None:
    """The index of the instruction set named by `value` (default: the best), None for "off"."""
    if value == "off":
        return None
    if not value:
        value = usable[-1]
    if value not in usable:
        allowed = ", ".join([*usable, "off"])
        raise ValueError(f"{VARIABLE} must be one of {allowed} on this machine, got {value!r}")
    return INSTRUCTION_SETS.index(value)


class _Native:
    """The loaded library and the instruction set in use."""

    def __init__(self) -> None:
        self.library: Any = None
        self.usable: list[str] = []
        self.chosen: int | None = None
        self.reason: str | None = None
        value = os.environ.get(VARIABLE)
        if value not in (None, "", "off", *INSTRUCTION_SETS):
            allowed = ", ".join([*INSTRUCTION_SETS, "off"])
            raise ValueError(f"{VARIABLE} must be one of {allowed}, got {value!r}")
        try:
            if sys.byteorder != "little":
                raise _Unusable("the native library is written for little-endian machines")
            self.library = _load()
        except _Unusable as error:
            self.reason = str(error)
            return
        self.usable = [name for i, name in enumerate(INSTRUCTION_SETS) if self.library.lintra_usable(i)]
        self.chosen = _choose(self.usable, value)
        if self.chosen is None:
            self.reason = f"{VARIABLE}=off"


_loaded: _Native | None = None


def _native() -> _Native:
    """Loaded once; importing `lintra.ops.operator` does so."""
    global _loaded
    if _loaded is None:
        _loaded = _Native()
    return _loaded


def available() -> bool:
    """Return whether the kernels can run here. Raises ValueError if LINTRA_NATIVE is wrong."""
    return _native().reason is None


def why_not() -> str | None:
    """Return why the library cannot run here; None if it can."""
    return _native().reason


def instruction_set() -> str:
    """The instruction set in use. Raises RuntimeError if there is none."""
    return INSTRUCTION_SETS[chosen()[1]]


def chosen() -> tuple[Any, int]:
    """The library and the index of the instruction set in use. Raises RuntimeError if there is none."""
    native = _native()
    if native.chosen is None:
        raise RuntimeError(f"the native kernels are not available: {native.reason}")
    return native.library, native.chosen


def instruction_sets() -> list[str]:
    """The instruction sets that the library holds and this processor has, slowest first."""
    return list(_native().usable)


@contextmanager
def use(name: str) -> Iterator[None]:
    """Run the body with another instruction set, or with "off": for tests and comparisons.

    The choice holds for all Python threads.
    """
    native = _native()
    before = native.chosen, native.reason
    if native.library is None:
        raise RuntimeError(f"the native kernels are not available: {native.reason}")
    native.chosen = _choose(native.usable, name)
    native.reason = None if native.chosen is not None else "switched off"
    try:
        yield
    finally:
        native.chosen, native.reason = before


def last_contiguous(x: Tensor) -> Tensor:
    """Return x with its last axis contiguous, copied if it was not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_int64(x: Tensor | None) -> Tensor | None:
    """Return integers as the library reads them: contiguous, of 64 bits."""
    return None if x is None else x.to(torch.int64).contiguous()


def address(x: Tensor | None) -> int:
    """Return the address of a tensor's data; 0 where there is no tensor."""
    return 0 if x is None else x.data_ptr()


def same_shape(name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor has the shape that the library reads: in a compiled graph, and where a
    caller passes its layout, nothing else has checked it."""
    if x is not None and x.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(x.shape)}")


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which the library keeps sums of x and reads what belongs to them."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def checkpoint_count(tokens: int, sequences: int, interval: int) -> int:
    """Return how many checkpoints the library numbers for so many tokens in all: `lintra_first_checkpoint` in
    kernel.h."""
    return tokens // interval + sequences


def same_dtype(dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """Raise TypeError unless all tensors have the dtype that the library reads them in."""
    for name, x in tensors.items():
        if x is not None and x.dtype is not dtype:
            raise TypeError(f"{name} must be {dtype}, got {x.dtype}")


def strided(x: Tensor | None) -> tuple[int, int, int, int]:
    """Return a tensor [b t], [b t h] or [b t h d] as a lintra_tensor."""
    if x is None:
        return _NO_TENSOR
    strides = x.stride()
    return x.data_ptr(), strides[0], strides[1], strides[2] if len(strides) > 2 else 0


def check(status: int) -> None:
    """Raise what the library's status stands for."""
    if status == _NO_MEMORY:
        raise MemoryError("the native kernel could not allocate its working memory")
    if status != _OK:
        raise RuntimeError(
            f"the native library refused the call (status {status}): its arguments do not fit "
            "together: cu_seqlens may not end where the tokens do, for example. Without torch.compile the "
            "error names the argument"
        )

"""One token through a whole decoder in C++: weights packed once, states changed in place.

`lintra.generation.native_decode` says which models this serves and takes them apart.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lintra import native
from lintra.native.quantize import DTYPES, Map, Norm, pad_to_panels


class Layer(NamedTuple):
    """Weights of a layer and its state, contiguous float32: kv [b g d d], z [b g d]."""

    qkv_proj: Map
    out_proj: Map
    up: Map
    down: Map
    attn_norm: Norm
    mlp_norm: Norm
    kv: Tensor
    z: Tensor

    def words(self) -> tuple[int, ...]:
        parts = (self.qkv_proj, self.out_proj, self.up, self.down, self.attn_norm, self.mlp_norm)
        return *(word for part in parts for word in part.words()), self.kv.data_ptr(), self.z.data_ptr()


class Shape(NamedTuple):
    """The sizes of a decoder and what distinguishes it, in the order of lintra_decoder."""

    batch: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    feature_map: str
    normalize: bool
    norm_first: bool
    activation: str
    eps: float
    norm_eps: float


class Pace:
    """Number of threads of the next call: all, or one where that was faster. The result is the same.

    Where another process keeps a core busy, the call waits until the thread on that core has had its turn,
    which takes longer than many calls of one thread. So a slow call is followed by some on one thread, each
    time by more of them.
    """

    def __init__(self) -> None:
        self.alone = math.inf  # seconds of the last call on one thread
        self.left = 2  # calls on one thread; the very first meets cold memory
        self.next = 4  # after the next slow call

    def threads(self, most: int) -> int:
        """Return the number of threads to take, at most `most`."""
        return 1 if self.left else most

    def took(self, threads: int, seconds: float) -> None:
        """Update from a call."""
        if threads == 1:
            self.alone, self.left = seconds, max(0, self.left - 1)
        elif seconds > 1.5 * self.alone:
            self.left, self.next = self.next, min(2 * self.next, 1024)
        else:
            self.next = max(4, self.next // 2)


class Decoder:
    """x [b c], contiguous float32, what enters the first layer -> params [b p]; changes its layers' states.

    One call at a time.
    """

    def __init__(self, shape: Shape, layers: Sequence[Layer], norm: Norm, head: Map):
        self.shape, self.outputs, self.pace = shape, head.outputs, Pace()
        self.parts = layers, norm, head  # the library holds their addresses
        self.table = b"".join(native.LAYER.pack(*layer.words()) for layer in layers)
        dtype = next(code for kind, code in DTYPES.values() if kind is head.panels.dtype)
        words = shape._replace(
            feature_map=native.FEATURE_MAPS[shape.feature_map],
            activation=native.ACTIVATIONS[shape.activation],
        )
        table = ctypes.cast(ctypes.c_char_p(self.table), ctypes.c_void_p).value
        self.rest = native.DECODER_REST.pack(dtype, *words, table, *norm.words(), *head.words())

    def __call__(self, x: Tensor) -> Tensor:
        """Raise MemoryError."""
        params = torch.empty(self.shape.batch, pad_to_panels(self.outputs), dtype=torch.float32, device="cpu")
        library, instruction_set = native.chosen()
        threads = self.pace.threads(torch.get_num_threads())
        call = native.DECODER_HEAD.pack(instruction_set, threads, x.data_ptr(), params.data_ptr())
        start = time.perf_counter()
        native.check(library.lintra_decode(call + self.rest))
        self.pace.took(threads, time.perf_counter() - start)
        return params[:, : self.outputs]

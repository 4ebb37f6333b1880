"""The selective scan in C++ on the CPU.

`forward` and `backward` compute what `lintra.ops.selective_scan` defines. `lintra/native/scan.h` has the
formulas. Shapes and the dtype of sums are checked; all else is trusted: the caller has checked it.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lintra import native

_CHANNELS = 64  # of a block, kScanChannels of scan.h
_INTERVAL = 64  # tokens from one state that is kept for the backward to the next


def forward(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor | None,
    dt_softplus: bool,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    save: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [b t c] laid out like u, the state after the last token and, if `save`, states for `backward`.

    u, dt, z [b t c] and B, C [b t g n] of one dtype; those [b t c] are read without a copy where channels or
    time are contiguous. A [c n], D [c], dt_bias [c] and state [b c n] in the sum dtype; for one token A may
    be [c 1], one rate for all states of a channel. mask [b t] bool. With cu_seqlens [m+1] b is 1 and states
    are [m c n]. `out`, contiguous, receives the state, and may be `state` itself unless states are saved.
    Raises MemoryError.
    """
    call = _Call(u, dt, A, B, C, D, z, dt_bias, dt_softplus, mask, cu_seqlens)
    y = like(u)
    after = out if out is not None else torch.empty(call.states, dtype=A.dtype, device="cpu")
    saved = torch.empty(call.saved if save else 0, dtype=A.dtype, device="cpu")
    native.same_shape("state", state, call.states)
    native.same_dtype(native.sum_dtype(u), A=A, D=D, dt_bias=dt_bias, state=state)
    native.same_dtype(u.dtype, dt=dt, B=B, C=C, z=z)
    state = None if state is None else state.contiguous()
    call.run("lintra_scan_forward", state, y, after, saved if save else None)
    return y, after, saved


def backward(
    dy: Tensor,
    dstate: Tensor | None,
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    saved: Tensor,
    dt_softplus: bool,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of u, dt, A, B, C, D, z, dt_bias and the state before, in the dtypes of those.

    `dy` and `dstate` (None: zero) are those of what `forward` returned, `saved` its last result. The gradient
    of what is not given is None. Raises MemoryError.
    """
    call = _Call(u, dt, A, B, C, D, z, dt_bias, dt_softplus, mask, cu_seqlens)
    m, c, n = call.states
    b, t, g, _ = B.shape
    parts = -(-c // g // _CHANNELS)
    du, ddt, dz = (None if x is None else like(x) for x in (u, dt, z))
    new = functools.partial(torch.empty, dtype=A.dtype, device="cpu")
    dA, before = new(m, c, n), new(call.states)
    dD, ddt_bias = (None if x is None else new(m, c) for x in (D, dt_bias))
    dB, dC = (new(parts, b, t, g, n) for _ in range(2))
    dstate = None if dstate is None else dstate.contiguous()
    sums = (dA, dD, ddt_bias, dB, dC)
    call.run("lintra_scan_backward", None, None, None, saved, (dy, dstate, (du, ddt, dz), (*sums, before)))
    dA, dD, ddt_bias, dB, dC = (None if x is None else x.sum(0) for x in sums)
    assert dB is not None
    assert dC is not None
    return du, ddt, dA, dB.to(B.dtype), dC.to(C.dtype), dD, dz, ddt_bias, before


def like(x: Tensor) -> Tensor:
    """Return an empty tensor like x [b t c], laid out as x is or, where no kernel writes so, in order."""
    y = torch.empty_like(x)
    return y if _is_lined(y) else x.new_empty(x.shape)


def saved_size(u: Tensor, A: Tensor, B: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return how many numbers `forward` saves."""
    (b, t, c), g, n = u.shape, B.shape[2], A.shape[1]
    sequences = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return native.checkpoint_count(b * t, sequences, _INTERVAL) * g * -(-c // g // _CHANNELS) * _CHANNELS * n


Gradients = tuple[Tensor, Tensor | None, Sequence[Tensor | None], Sequence[Tensor | None]]


class _Call:
    """The sizes of a call, and the block of words that the library reads."""

    def __init__(self, u, dt, A, B, C, D, z, dt_bias, dt_softplus, mask, cu_seqlens):
        self.tokens = [None if x is None else _lined(x) for x in (u, dt, z)]
        self.states_read = native.last_contiguous(B), native.last_contiguous(C)
        self.weights = [None if x is None else x.contiguous() for x in (A, D, dt_bias)]
        self.mask, self.cu_seqlens = mask, native.as_int64(cu_seqlens)
        (b, t, c), g, n = u.shape, *B.shape[2:]
        m = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.states = (m, c, n)
        self.saved = saved_size(u, A, B, cu_seqlens)
        tied = A.shape[1] == 1 < n
        native.same_shape("dt", dt, (b, t, c))
        native.same_shape("A", A, (c, 1 if tied else n))
        native.same_shape("B", B, (b, t, g, n))
        native.same_shape("C", C, (b, t, g, n))
        native.same_shape("D", D, (c,))
        native.same_shape("z", z, (b, t, c))
        native.same_shape("dt_bias", dt_bias, (c,))
        native.same_shape("mask", mask, (b, t))
        self.head = (native.DTYPES[u.dtype], m, t, c, g, n, dt_softplus, _INTERVAL, tied)

    def run(
        self,
        function: str,
        state: Tensor | None,
        y: Tensor | None,
        after: Tensor | None,
        saved: Tensor | None,
        gradients: Gradients | None = None,
    ):
        """Call the library; `gradients` in the order of lintra_scan."""
        loaded, instruction_set = native.chosen()
        dy, dstate, like_tokens, others = gradients or (None, None, (None,) * 3, (None,) * 6)
        dy = None if dy is None else _lined(dy)
        call = native.SCAN.pack(
            instruction_set,
            torch.get_num_threads(),
            *self.head,
            *(word for x in self.tokens for word in _channels(x)),
            *(word for x in (*self.states_read, self.mask) for word in native.strided(x)),
            *map(native.address, (self.cu_seqlens, *self.weights, state)),
            *_channels(y),
            native.address(after),
            native.address(saved),
            *_channels(dy),
            native.address(dstate),
            *(word for x in like_tokens for word in _channels(x)),
            *map(native.address, others),
        )
        native.check(getattr(loaded, function)(call))


def _lined(x: Tensor) -> Tensor:
    return x if _is_lined(x) else x.contiguous()


def _is_lined(x: Tensor) -> bool:
    """Return whether the channels of x [b t c] or, if there are several tokens, its time are contiguous."""
    _, t, c = x.shape
    return c == 1 or x.stride(2) == 1 or (t > 1 and x.stride(1) == 1)


def _channels(x: Tensor | None) -> tuple[int, int, int, int]:
    """Return a tensor [b t c] as a lintra_tensor whose last stride is that of the channels."""
    if x is None:
        return native.strided(None)
    return x.data_ptr(), x.stride(0), x.stride(1), x.stride(2) if x.shape[2] > 1 else 1

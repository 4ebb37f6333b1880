"""The short causal convolution in C++ on the CPU.

`forward` and `backward` compute what `lintra.ops.causal_conv1d` defines. Shapes and the dtype of sums are
checked; all else is trusted: the caller has checked it.
"""

import torch
from torch import Tensor

from lintra import native

_GROUPS = 16  # of sequences, each of which sums up its own gradient of the weights: what threads share


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """Return y [b t c] in x's dtype and the last inputs [n w-1 c] in the sum dtype.

    x [b t c], any strides; weight [c w], bias [c] and state [n w-1 c] in the sum dtype. mask [b t] bool. With
    cu_seqlens [n+1] b is 1. Raises MemoryError.
    """
    call = _Call(x, weight, bias, state, mask, cu_seqlens, silu)
    y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    after = torch.empty(call.state_shape, dtype=weight.dtype, device="cpu")
    call.run("lintra_conv1d_forward", y, after, None, None, (None,) * 4)
    return y, after


def backward(
    dy: Tensor,
    dstate: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight, bias and state, None where there was none.

    `dy` and `dstate` (None: zero) are those of what `forward` returned. Raises MemoryError."""
    call = _Call(x, weight, bias, state, mask, cu_seqlens, silu)
    dx = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    width, channels = call.weight.shape
    dweight = torch.empty(call.groups, width, channels, dtype=weight.dtype, device="cpu")
    dbias = torch.empty(call.groups, channels, dtype=weight.dtype, device="cpu")
    before = None if state is None else torch.empty(call.state_shape, dtype=weight.dtype, device="cpu")
    dstate = None if dstate is None else dstate.contiguous()
    call.run(
        "lintra_conv1d_backward", None, None, native.last_contiguous(dy), dstate, (dx, dweight, dbias, before)
    )
    return dx, dweight.sum(0).mT.contiguous(), None if bias is None else dbias.sum(0), before


def step(
    x: Tensor,
    buffer: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    indices: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Return y [b t c] of tokens x [b t c] that come after those in `buffer` [rows c l], changed in place.

    x and buffer of one dtype, any strides; weight [c w], w - 1 <= l, and bias [c] in the sum dtype. The last
    w - 1 inputs in the buffer are read, and x is appended. `indices` [b] gives the row of each sequence
    (below 0: none, and y is 0), each at most once. With `starts` [b] the buffer is used in a circle: the
    first token goes to place starts % l. Raises MemoryError.
    """
    b, t, c = x.shape
    native.same_shape("weight", weight, (c, weight.shape[1]))
    native.same_shape("bias", bias, (c,))
    native.same_shape("buffer", buffer, (buffer.shape[0], c, buffer.shape[2]))
    native.same_dtype(native.sum_dtype(x), weight=weight, bias=bias)
    native.same_dtype(x.dtype, buffer=buffer)
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    rows, starts = native.as_int64(indices), native.as_int64(starts)
    y = torch.empty(b, t, c, dtype=x.dtype, device="cpu")
    loaded, instruction_set = native.chosen()
    call = native.CONV1D_STEP.pack(
        instruction_set,
        torch.get_num_threads(),
        native.DTYPES[x.dtype],
        b,
        t,
        c,
        weight.shape[1],
        buffer.shape[2],
        silu,
        *(x.data_ptr(), *x.stride()),
        *(buffer.data_ptr(), *buffer.stride()),
        *map(native.address, (rows, starts)),
        *map(native.address, (weight, bias, y)),
    )
    native.check(loaded.lintra_conv1d_step_forward(call))
    return y


class _Call:
    """The sizes of a call, and the block of words that the library reads."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        silu: bool,
    ):
        self.x, self.weight = native.last_contiguous(x), weight.mT.contiguous()
        self.bias, self.state = (None if y is None else y.contiguous() for y in (bias, state))
        self.mask, self.cu_seqlens, self.silu = mask, native.as_int64(cu_seqlens), silu
        width, channels = self.weight.shape
        n = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.groups = min(n, _GROUPS)
        self.state_shape = (n, width - 1, channels)
        native.same_shape("weight", weight, (x.shape[2], width))
        native.same_shape("bias", bias, (channels,))
        native.same_shape("mask", mask, tuple(x.shape[:2]))
        native.same_shape("state", state, self.state_shape)
        native.same_dtype(native.sum_dtype(x), weight=weight, state=state, bias=bias)
        self.sizes = (n, x.shape[1], channels, width)

    def run(
        self,
        function: str,
        y: Tensor | None,
        after: Tensor | None,
        dy: Tensor | None,
        dstate: Tensor | None,
        gradients: tuple[Tensor | None, ...],
    ) -> None:
        loaded, instruction_set = native.chosen()
        call = native.CONV1D.pack(
            instruction_set,
            torch.get_num_threads(),
            native.DTYPES[self.x.dtype],
            *self.sizes,
            self.silu,
            self.groups,
            *native.strided(self.x),
            *native.strided(self.mask),
            native.address(self.cu_seqlens),
            *map(native.address, (self.weight, self.bias, self.state, y, after)),
            *native.strided(dy),
            native.address(dstate),
            *map(native.address, gradients),
        )
        native.check(getattr(loaded, function)(call))

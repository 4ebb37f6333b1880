"""The causal and the bidirectional linear attention sum in C++, on the CPU.

`forward` and `backward` compute what `lintra.ops.linear_attention` defines. Shapes and the dtype of sums are
checked; all else is trusted: the caller has checked it.
"""

import struct

import torch
from torch import Tensor

from lintra import native

_FORWARD = struct.Struct("13q d 25q 7q")  # native.LINEAR_ATTENTION up to z_out
_REST = bytes(native.LINEAR_ATTENTION.size - _FORWARD.size)  # of `backward` alone


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    log_input: Tensor | None = None,
    kv: Tensor | None = None,
    z: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    normalize: bool = True,
    eps: float = 1e-6,
    feature_map: str | None = None,
    save_lost: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum and the state after it.

    q [b t h f], k [b s g f], v [b s g e] of one dtype (float32, float64, bfloat16, float16), any strides;
    log_decay and log_input [b s g], kv [b g f e], z [b g f] in the sum dtype (float64 for float64, else
    float32); mask [b s] bool. With cu_seqlens [n+1] the row of b = 1 holds n sequences, and kv, z are
    [n g ...]. Returns y [b t h e] in v's dtype and, in the sum dtype, kv, z and the denominators [b t h]
    (with eps; 1 if `normalize` is false), which `backward` needs; then, with `save_lost` and y in 16 bits,
    what y lost when it was rounded, like y, otherwise an empty tensor. Raises MemoryError, and ValueError
    for shapes that do not belong together.
    """
    b, t, h, f = q.shape
    g, e = v.shape[2:]
    total = native.sum_dtype(q)
    y = q.new_empty((b, t, h, e))
    lost = y.new_empty(y.shape if save_lost and y.dtype.itemsize == 2 else 0)
    den = torch.empty((b, t, h), dtype=total, device="cpu")
    cu_seqlens = native.as_int64(cu_seqlens)
    n = _sequences(q, cu_seqlens)
    kv_out = torch.empty((n, g, f, e), dtype=total, device="cpu")
    z_out = torch.empty((n, g, f), dtype=total, device="cpu")
    q, k, v = native.last_contiguous(q), native.last_contiguous(k), native.last_contiguous(v)
    keys = (b, k.shape[1], g)
    native.same_shape("k", k, (*keys, f))
    native.same_shape("v", v, (*keys, e))
    native.same_shape("log_decay", log_decay, keys)
    native.same_shape("log_input", log_input, keys)
    native.same_shape("mask", mask, keys[:2])
    native.same_shape("kv", kv, (n, g, f, e))
    native.same_shape("z", z, (n, g, f))
    native.same_dtype(total, kv=kv, z=z, log_decay=log_decay, log_input=log_input)
    native.same_dtype(q.dtype, k=k, v=v)
    kv, z = (None if x is None else x.contiguous() for x in (kv, z))
    library, instruction_set = native.chosen()
    call = _FORWARD.pack(
        *_head(instruction_set, q, k, v, cu_seqlens, causal, normalize, eps, feature_map),
        *_inputs(q, k, v, log_decay, log_input, mask, cu_seqlens),
        native.address(kv),
        native.address(z),
        y.data_ptr(),
        den.data_ptr(),
        lost.data_ptr(),
        kv_out.data_ptr(),
        z_out.data_ptr(),
    )
    native.check(library.lintra_forward(call + _REST))
    return y, kv_out, z_out, den, lost


def backward(
    dy: Tensor,
    dkv: Tensor | None,
    dz: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    den: Tensor,
    lost: Tensor,
    log_decay: Tensor | None = None,
    log_input: Tensor | None = None,
    kv: Tensor | None = None,
    z: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    normalize: bool = True,
    eps: float = 1e-6,
    feature_map: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """The gradients of `forward`: of q, k, v, log_decay, log_input, and of the state before.

    `dy`, `dkv`, `dz` are those of what `forward` returned (the last two may be None, for zero), `y` (may be
    empty without `normalize`), `den` and `lost` its results. The gradients of q, k, v have their dtype, the
    others the sum dtype; those of log_decay and log_input are None where the input is. Raises MemoryError.
    """
    total = den.dtype
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in (q, k, v))
    dlog_decay = None if log_decay is None else torch.empty(log_decay.shape, dtype=total, device="cpu")
    dlog_input = None if log_input is None else torch.empty(log_input.shape, dtype=total, device="cpu")
    cu_seqlens = native.as_int64(cu_seqlens)
    n, g = _sequences(q, cu_seqlens), k.shape[2]
    dkv_in = torch.empty((n, g, q.shape[3], v.shape[3]), dtype=total, device="cpu")
    dz_in = torch.empty((n, g, q.shape[3]), dtype=total, device="cpu")
    q, k, v, dy = (native.last_contiguous(x) for x in (q, k, v, dy))
    y, den, lost = y.contiguous(), den.contiguous(), lost.contiguous()
    kv, z, dkv, dz = (None if x is None else x.contiguous() for x in (kv, z, dkv, dz))
    library, instruction_set = native.chosen()
    call = native.LINEAR_ATTENTION.pack(
        *_head(instruction_set, q, k, v, cu_seqlens, causal, normalize, eps, feature_map),
        *_inputs(q, k, v, log_decay, log_input, mask, cu_seqlens),
        native.address(kv),
        native.address(z),
        y.data_ptr(),
        den.data_ptr(),
        lost.data_ptr(),
        0,
        0,
        *native.strided(dy),
        native.address(dkv),
        native.address(dz),
        *map(native.address, (dq, dk, dv, dlog_decay, dlog_input, dkv_in, dz_in)),
    )
    native.check(library.lintra_backward(call))
    return dq, dk, dv, dlog_decay, dlog_input, dkv_in, dz_in


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return how many states there are."""
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _head(instruction_set, q, k, v, cu_seqlens, causal, normalize, eps, feature_map) -> tuple:
    t, h, f = q.shape[1:]
    return (
        instruction_set,
        torch.get_num_threads(),
        native.DTYPES[q.dtype],
        causal,
        normalize,
        native.FEATURE_MAPS[feature_map],
        _sequences(q, cu_seqlens),
        t,
        k.shape[1],
        h,
        k.shape[2],
        f,
        v.shape[3],
        eps,
    )


def _inputs(q, k, v, log_decay, log_input, mask, cu_seqlens) -> tuple:
    return (
        *(word for x in (q, k, v, log_decay, log_input, mask) for word in native.strided(x)),
        native.address(cu_seqlens),
    )

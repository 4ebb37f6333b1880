"""The sum with a decay for every key feature, and the delta rule, in C++ on the CPU.

`forward` and `backward` compute what `lintra.ops.linear_attention` defines without a denominator.
`lintra/native/recurrence.h` has the formulas. Shapes and dtypes are checked; all else is trusted: the caller
has checked it.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lintra import native

_CHUNK = 16  # tokens, kChunk of vector.h
Gradients = Sequence[Tensor | None]
_STATES = 256 * 1024  # bytes of states that a checkpoint stands for: 2 to 8 chunks, as many as fit


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    save: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [b t h e], the state after the last token and, if `save`, what `backward` needs of the states.

    q [b t m f], k [b t n f], v [b t o e] of one dtype, any strides; g = max(n, o) states and h = max(m, g)
    heads, which the smaller numbers divide. log_decay [b t g] or [b t g f], beta [b t g] (None: the sum) and
    state [b g f e] in the sum dtype. mask [b t] bool. With cu_seqlens [n+1] b is 1 and states are [n g f e].
    `out` receives the state, and may be `state` itself for one token. Raises MemoryError.
    """
    call = _Call(q, k, v, log_decay, beta, mask, cu_seqlens)
    native.same_shape("state", state, call.states)
    native.same_dtype(call.total, state=state, log_decay=log_decay, beta=beta)
    y = q.new_empty(*q.shape[:2], call.h, v.shape[3])
    after = out if out is not None else torch.empty(call.states, dtype=call.total, device="cpu")
    saved = torch.empty(call.saved if save else 0, dtype=call.total, device="cpu")
    state = None if state is None else state.contiguous()
    results = (state, y, after, saved if save else None)
    call.run("lintra_recurrence_forward", scale, results, None, (None,) * 7)
    return y, after, saved


def backward(
    dy: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    saved: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of q, k, v, log_decay, beta and the state before, in the dtypes of those.

    `dy` and `dstate` (None: zero) are those of what `forward` returned, `saved` its last result. The gradient
    of log_decay or beta is None where the input is. Raises MemoryError.
    """
    call = _Call(q, k, v, log_decay, beta, mask, cu_seqlens)
    b, t, _, f = q.shape
    parts = call.parts
    new = functools.partial(torch.empty, device="cpu")
    dq, dk = (new(parts, b, t, heads, f, dtype=call.total) for heads in (call.h, call.g))
    dlog_decay, dbeta = (
        None if x is None else new(parts, *x.shape, dtype=call.total) for x in (log_decay, beta)
    )
    dv = new(b, t, call.g, v.shape[3], dtype=call.total)
    before = new(call.states, dtype=call.total)
    dstate = None if dstate is None else dstate.contiguous()
    gradients = (dstate, dq, dk, dlog_decay, dbeta, dv, before)
    call.run(
        "lintra_recurrence_backward", scale, (None, None, None, saved), native.last_contiguous(dy), gradients
    )
    dlog_decay, dbeta = (None if x is None else _summed(x) for x in (dlog_decay, dbeta))
    dq, dk = grouped(_summed(dq), q), grouped(_summed(dk), k)
    return dq, dk, grouped(dv, v), dlog_decay, dbeta, before


def saved_size(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, cu_seqlens: Tensor | None) -> int:
    """Return how many numbers `forward` saves."""
    return _Call(q, k, v, None, beta, None, cu_seqlens).saved


def _summed(parts: Tensor) -> Tensor:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def grouped(gradient: Tensor, x: Tensor) -> Tensor:
    """The sum over the heads that share one of x, in its dtype."""
    heads = x.shape[2]
    if gradient.shape[2] != heads:
        gradient = gradient.unflatten(2, (heads, -1)).sum(3)
    return gradient.to(x.dtype)


class _Call:
    """The sizes of a call, and the block of words that the library reads."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ):
        self.q, self.k, self.v = (native.last_contiguous(x) for x in (q, k, v))
        if log_decay is not None and log_decay.dim() == 4:
            log_decay = native.last_contiguous(log_decay)
        self.log_decay = log_decay
        self.beta, self.mask = beta, mask
        self.cu_seqlens = native.as_int64(cu_seqlens)
        self.total = native.sum_dtype(q)
        b, t, queries, f = q.shape
        keys, (values, e) = k.shape[2], v.shape[2:]
        self.g = max(keys, values)
        native.same_shape("k", k, (b, t, keys, f))
        native.same_shape("v", v, (b, t, values, e))
        if log_decay is not None:
            native.same_shape("log_decay", log_decay, (b, t, self.g, f)[: log_decay.dim()])
        native.same_shape("beta", beta, (b, t, self.g))
        native.same_shape("mask", mask, (b, t))
        native.same_dtype(q.dtype, k=k, v=v)
        self.h = max(queries, self.g)
        n = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.states = (n, self.g, f, e)
        self.threads = torch.get_num_threads()
        items = max(1, n * self.g)
        self.parts = max(1, min(self.threads // items, e // 16))
        chunks = max(2, min(8, _STATES // max(1, f * e * self.total.itemsize)))
        self.interval = chunks * _CHUNK
        self.saved = native.checkpoint_count(b * t, n, self.interval) * self.g * f * e
        self.sizes = (n, t, self.h, self.g, queries, keys, values, f, e)

    def run(self, function: str, scale: float, results: Gradients, dy: Tensor | None, gradients: Gradients):
        """Call the library; `results` and `gradients` in the order of lintra_recurrence."""
        loaded, instruction_set = native.chosen()
        inputs = (self.q, self.k, self.v, self.log_decay, self.beta, self.mask)
        call = native.RECURRENCE.pack(
            instruction_set,
            self.threads,
            native.DTYPES[self.q.dtype],
            *self.sizes,
            self.parts,
            self.log_decay is not None and self.log_decay.dim() == 4,
            self.interval,
            scale,
            *(word for x in inputs for word in native.strided(x)),
            native.address(self.cu_seqlens),
            *map(native.address, results),
            *native.strided(dy),
            *map(native.address, gradients),
        )
        native.check(getattr(loaded, function)(call))

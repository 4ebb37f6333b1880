"""Softmax attention to bands, segments, listed blocks and sorted chunks in C++, on the CPU, no score kept.

`forward` and `backward` compute what `lintra.ops.banded`, `segments` and `blocks` define, `forward_sorted`
and `backward_sorted` what `lintra.ops.lsh` does. `lintra/native/softmax.h` says how. Shapes and dtypes are
checked; all else is trusted: the caller has checked it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lintra import native

# In the enumeration of abi.h. "all" is one segment, and every key after it.
KINDS = {"band": 0, "segments": 1, "blocks": 2, "all": 1, "sorted": 3}
RULES = {"causal": 1, "see_self": 2, "across_buckets": 4, "wrap": 8, "exact_union": 16}
KERNEL_ROUNDS = 16  # SeenSorted::kMost of softmax.h

_UNSORTED = (0, 0, None, None, None)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    blocks: Tensor | None,
    listed: Tensor | None,
    own: Tensor | None,
    kind: str,
    before: int,
    after: int,
    dilation: int,
    unit: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return o [b t h e] and logsumexp [b t h] in the dtype of sums, 0 and -inf where a query sees nothing.

    q [b t h d], k [b s g d], v [b s g e] of one dtype, any strides; visible [b s] bool. kind: "band" (places
    i - j from -after dilation to before dilation, multiples of dilation), "segments" (of `unit` places, with
    so many before and after), "all" (no sizes) or "blocks" (of `unit` places: blocks [b g n l], listed
    [b g n l] bool and own [b n] or None). Raises MemoryError.
    """
    where = (visible, blocks, listed, own, kind, before, after, dilation, unit, scale)
    return _forward(q, k, v, where, _UNSORTED)


def backward(
    do: Tensor,
    dlogsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    logsumexp: Tensor,
    *where: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in the dtype of those.

    `do` and `dlogsumexp` (None: zero) are those of what `forward` returned, o and logsumexp; `where` are its
    further arguments. Raises MemoryError.
    """
    return _backward(do, dlogsumexp, q, k, v, o, logsumexp, where, _UNSORTED)


def forward_sorted(q: Tensor, k: Tensor, v: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
    """Return o [b t h e] and logsumexp [b t h] of tokens that are sorted several times, as `forward` does.

    q, k [b t h d], v [b t h e]. `where`: visible [b t] bool or None; token [b h r n], the tokens by rank, in
    r rounds and n places of whole chunks; place and bucket [b h r n], their chunks and buckets by token; the
    sum of the `RULES` that hold; the tokens of a chunk; the chunks seen before and after the own; the scale.
    Raises MemoryError.
    """
    return _forward(q, k, v, *_sorted(where))


def backward_sorted(
    do: Tensor,
    dlogsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    logsumexp: Tensor,
    *where: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, as `backward` does, for the arguments of `forward_sorted`."""
    return _backward(do, dlogsumexp, q, k, v, o, logsumexp, *_sorted(where))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, where: tuple[Any, ...], order: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    total = native.sum_dtype(q)
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=total, device="cpu")
    logsumexp = torch.empty(q.shape[:3], dtype=total, device="cpu")
    _run("lintra_softmax_forward", q, k, v, where, order, (o, logsumexp), None, (None,) * 4)
    return o, logsumexp


def _backward(
    do: Tensor,
    dlogsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    logsumexp: Tensor,
    where: tuple[Any, ...],
    order: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in (q, k, v))
    dlogsumexp = None if dlogsumexp is None else dlogsumexp.contiguous()
    results, given = (o.contiguous(), logsumexp.contiguous()), (dlogsumexp, dq, dk, dv)
    _run("lintra_softmax_backward", q, k, v, where, order, results, native.last_contiguous(do), given)
    return dq, dk, dv


def _sorted(where: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of `forward`, and what is sorted."""
    visible, token, place, bucket, rule, chunk, before, after, scale = where
    order = token.to(torch.int64).contiguous(), *(x.to(torch.int32).contiguous() for x in (place, bucket))
    return (visible, None, None, None, "sorted", before, after, 1, chunk, scale), (
        token.shape[2],
        rule,
        *order,
    )


def _run(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: tuple[Any, ...],
    order: tuple[Any, ...],
    results: tuple[Tensor, Tensor],
    do: Tensor | None,
    gradients: Sequence[Tensor | None],
) -> None:
    visible, blocks, listed, own, kind, before, after, dilation, unit, scale = where
    q, k, v = native.last_contiguous(q), native.last_contiguous(k), native.last_contiguous(v)
    b, t, h, d = q.shape
    s, g, e = k.shape[1], *v.shape[2:]
    native.same_shape("k", k, (b, s, g, d))
    native.same_shape("v", v, (b, s, g, e))
    native.same_dtype(q.dtype, k=k, v=v)
    native.same_shape("visible", visible, (b, s))
    entries, lists = 0, (native.strided(None),) * 3
    if blocks is not None:
        n, entries = blocks.shape[2:]
        if n * min(unit, max(1, t)) != t:
            raise ValueError(f"blocks must be lists for {t} queries in blocks of {unit}, got {n} lists")
        # Here and not in `_list`: what is copied has to live as long as the call.
        blocks = native.last_contiguous(blocks.to(torch.int64)).expand(b, g, n, entries)
        listed = native.last_contiguous(listed).expand(b, g, n, entries)
        own = None if own is None else own.to(torch.int64).expand(b, n)
        lists = (_list(blocks), _list(listed), native.strided(own))
    if kind == "all":
        unit, after = max(1, t), s
    if kind == "sorted":
        for name, x in zip(("token", "place", "bucket"), order[2:], strict=True):
            native.same_shape(name, x, (b, h, order[0], -(-t // unit) * unit))
    loaded, instruction_set = native.chosen()
    most = max(1, s)  # a band of all places is one of more
    call = native.SOFTMAX.pack(
        instruction_set,
        torch.get_num_threads(),
        native.DTYPES[q.dtype],
        KINDS[kind],
        *(b, t, s, h, g, d, e),
        *(min(before, most), min(after, most), min(dilation, most)),
        unit if kind == "sorted" else min(unit, max(1, t)),
        entries,
        scale,
        *(word for x in (q, k, v, visible) for word in native.strided(x)),
        *(word for x in lists for word in x),
        *order[:2],
        *map(native.address, (*order[2:], *results)),
        *native.strided(do),
        *map(native.address, gradients),
    )
    native.check(getattr(loaded, function)(call))


def _list(x: Tensor) -> tuple[int, int, int, int]:
    """A tensor [b g n l], its last axis contiguous, as a lintra_tensor of b, n and g."""
    return x.data_ptr(), x.stride(0), x.stride(2), x.stride(1)

"""Softmax attention to some of the keys in C++, as operators of PyTorch: no score is kept.

Bands, segments and listed blocks are kinds of one operator, `lintra::softmax`; another, which
`lintra.ops.lsh` registers, reads tokens in sorted chunks. They run where only values and first derivatives
are needed; a backward pass that is itself to be differentiated computes all scores.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lintra.native import softmax
from lintra.ops import checks, dispatch
from lintra.ops.operator import define, differentiable
from lintra.ops.softmax_attention import PartialAttention, softmax_attention

_WHERE = (
    "Tensor? visible, Tensor? blocks, Tensor? listed, Tensor? own, str kind, SymInt before, SymInt after, "
    "SymInt dilation, SymInt unit, float scale"
)
_SORTED = (
    "Tensor? visible, Tensor token, Tensor place, Tensor bucket, int rule, SymInt chunk, SymInt before, "
    "SymInt after, float scale"
)
_TENSORS = 4  # that either begins with
_scored: dict[str, Callable[..., PartialAttention]] = {}  # by kind: by way of all scores


def runs_natively(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    """Return whether `softmax_native` serves this call: on the CPU, no weights dropped, no transforms, and no
    graph exported for programs that have no such operator."""
    traced = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
    if dropout or traced or checks.transforming(q, k, v):
        return False
    return bool(q.shape[3] and v.shape[3]) and dispatch.serves("softmax", "native", q, k, v)


def softmax_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: str,
    *,
    visible: Tensor | None = None,
    blocks: Tensor | None = None,
    listed: Tensor | None = None,
    own: Tensor | None = None,
    before: int = 0,
    after: int = 0,
    dilation: int = 1,
    unit: int = 1,
    scale: float | None = None,
) -> PartialAttention:
    """Return o [b t h e] and logsumexp [b t h] of q [b t h d] to the keys that a kind and its sizes name.

    See `lintra.native.softmax.forward`. `scale` has no unit (default d**-0.5)."""
    factor = q.shape[3] ** -0.5 if scale is None else scale
    where = (visible, blocks, listed, own, kind, before, after, dilation, unit, factor)
    return PartialAttention(*_operator(q, k, v, *where))


def all_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> PartialAttention:
    """Return attention of q [b t h d] to all keys [b s g d] that are `visible` [b s], which may be a part of
    what the queries see: o [b t h e], logsumexp [b t h]. In C++ no score is kept. Keys of one sequence are
    those of every one."""
    if k.shape[0] != q.shape[0]:
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
        visible = None if visible is None else visible.expand(q.shape[0], -1)
    if runs_natively(q, k, v, dropout):
        return softmax_native(q, k, v, "all", visible=visible, scale=scale)
    return _all_scores(q, k, v, visible=visible, scale=scale, dropout=dropout)


def by_all_scores(kind: str) -> Callable[[Callable[..., PartialAttention]], Callable[..., PartialAttention]]:
    """Register a function of `softmax_native`'s arguments but for the kind, which PyTorch differentiates any
    number of times, for the second derivatives of that kind."""

    def register(function: Callable[..., PartialAttention]) -> Callable[..., PartialAttention]:
        _scored[kind] = function
        return function

    return register


@by_all_scores("all")
def _all_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None,
    scale: float | None,
    dropout: float = 0.0,
    **_: Any,
) -> PartialAttention:
    q = q.unflatten(2, (k.shape[2], -1)).movedim(1, 3)  # b g r t d
    k, v = (x.movedim(1, 2)[:, :, None] for x in (k, v))
    visible = None if visible is None else visible[:, None, None, None]
    partial = softmax_attention(q, k, v, visible=visible, scale=scale, dropout=dropout)
    return PartialAttention(*(x.movedim(3, 1).flatten(2, 3) for x in partial))


def _scores_again(q: Tensor, k: Tensor, v: Tensor, *where: Any) -> PartialAttention:
    visible, blocks, listed, own, kind, before, after, dilation, unit, scale = where
    lists = {"blocks": blocks, "listed": listed, "own": own}
    sizes = {"before": before, "after": after, "dilation": dilation, "unit": unit}
    return _scored[kind](q, k, v, visible=visible, scale=scale, **lists, **sizes)


def register(
    name: str,
    where: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    again: Callable[..., PartialAttention],
) -> Callable[..., Any]:
    """Make the operators lintra::`name` and lintra::`name`_backward; return the first.

    `where` is the schema of what follows q, k and v, four tensors first. `again` computes what `forward` does
    in a form that PyTorch differentiates any number of times."""

    def forward_fake(q, k, v, *_):
        total = checks.sum_dtype(q.dtype)
        return q.new_empty(*q.shape[:3], v.shape[3], dtype=total), q.new_empty(q.shape[:3], dtype=total)

    def backward_fake(do, dlogsumexp, q, k, v, *_):
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    def save(ctx, inputs, output):
        q, k, v, *others = inputs
        ctx.options = others[_TENSORS:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output, *others[:_TENSORS])

    def differentiate(ctx, do, dlogsumexp):
        q, k, v, o, logsumexp, *tensors = ctx.saved_tensors
        nothing = (None,) * (_TENSORS + len(ctx.options))
        if do is None and dlogsumexp is None:
            return None, None, None, *nothing
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            scored = lambda q, k, v: again(q, k, v, *tensors, *ctx.options)  # noqa: E731
            return *differentiable(scored, (q, k, v), (do, dlogsumexp)), *nothing
        do = torch.zeros_like(o) if do is None else do
        given = (do, dlogsumexp, q, k, v, o, logsumexp, *tensors, *ctx.options)
        return *backward_operator(*given), *nothing

    backward_schema = (
        "(Tensor do, Tensor? dlogsumexp, Tensor q, Tensor k, Tensor v, Tensor o, Tensor logsumexp, "
        f"{where}) -> (Tensor dq, Tensor dk, Tensor dv)"
    )
    forward_schema = f"(Tensor q, Tensor k, Tensor v, {where}) -> (Tensor o, Tensor logsumexp)"
    backward_operator = define(
        f"{name}_backward", backward_schema, backward, backward_fake, _once, None, ["CPU"]
    )
    return define(name, forward_schema, forward, forward_fake, differentiate, save, ["CPU"])


def _once(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "softmax attention in C++ can be differentiated once in a compiled graph; LINTRA_NATIVE=off has more"
    )


_operator = register("softmax", _WHERE, softmax.forward, softmax.backward, _scores_again)


def register_sorted(again: Callable[..., PartialAttention]) -> Callable[..., Any]:
    """Make and return the operator of `lintra.native.softmax.forward_sorted`, see `register`."""
    return register("sorted_softmax", _SORTED, softmax.forward_sorted, softmax.backward_sorted, again)

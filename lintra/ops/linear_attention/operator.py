"""Linear attention as PyTorch operators: schemas, shapes, what the backward needs."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lintra.ops.operator import define, empty_for_none, refuse_double_backward

_OPTIONS = "Tensor? mask, Tensor? cu_seqlens, bool causal, bool normalize, float eps, str? feature_map"
_FORWARD = (
    f"(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? log_input, Tensor kv, Tensor z, {_OPTIONS}, "
    "bool save_lost) -> (Tensor y, Tensor kv_out, Tensor z_out, Tensor denominator, Tensor lost)"
)
_BACKWARD = (
    "(Tensor dy, Tensor? dkv, Tensor? dz, Tensor q, Tensor k, Tensor v, Tensor y, Tensor denominator, "
    f"Tensor lost, Tensor? log_decay, Tensor? log_input, Tensor kv, Tensor z, {_OPTIONS}) -> (Tensor dq, "
    "Tensor dk, Tensor dv, Tensor dlog_decay, Tensor dlog_input, Tensor dkv, Tensor dz)"
)


def register(
    name: str, impl: str, forward: Callable[..., Any], backward: Callable[..., Any], devices: Sequence[str]
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Make the operators lintra::`name` and lintra::`name`_backward of functions that compute them, with the
    arguments in the order of the schemas; `backward` may give None for log_decay and log_input.

    Return the first: y [b t h e], kv [b g f e] and z [b g f] after the last token, denominators, and what y
    lost when it was rounded to 16 bits (empty without `save_lost`, and in others); packed, the states are
    [n ...]. Arguments as the operator orders them, validated by `lintra.ops.linear_attention`, logarithms in
    the dtype of sums.
    """

    def gradients(dy, dkv, dz, q, *others):
        return empty_for_none(q, backward(dy, dkv, dz, q, *others))

    def differentiate(ctx, dy, dkv, dz, *_):
        q, k, v, y, denominator, lost, log_decay, log_input, *others = ctx.saved_tensors
        dy = v.new_zeros(*q.shape[:3], v.shape[3]) if dy is None else dy
        dq, dk, dv, dlog_decay, dlog_input, dkv, dz = backward_operator(
            dy, dkv, dz, q, k, v, y, denominator, lost, log_decay, log_input, *others, *ctx.options
        )
        dlog_decay = None if log_decay is None else dlog_decay
        dlog_input = None if log_input is None else dlog_input
        return dq, dk, dv, dlog_decay, dlog_input, dkv, dz, None, None, None, None, None, None, None

    operator = define(name, _FORWARD, forward, _forward_fake, differentiate, _save, devices)
    refuse = refuse_double_backward("linear attention", impl)
    backward_operator = define(
        f"{name}_backward", _BACKWARD, gradients, _backward_fake, refuse, None, devices
    )
    return operator


def _forward_fake(q, k, v, log_decay, log_input, kv, z, mask, cu_seqlens, causal, normalize, eps, map, lost):
    y = v.new_empty(*q.shape[:3], v.shape[3])
    denominator = z.new_empty(q.shape[:3])
    lost = y.new_empty(y.shape if lost and y.dtype.itemsize == 2 else 0)
    return y, kv.new_empty(kv.shape), z.new_empty(z.shape), denominator, lost


def _backward_fake(dy, dkv, dz, q, k, v, y, denominator, lost, log_decay, log_input, kv, z, *_):
    dlog_decay, dlog_input = (
        q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (log_decay, log_input)
    )
    dq, dk, dv, dkv, dz = (x.new_empty(x.shape) for x in (q, k, v, kv, z))
    return dq, dk, dv, dlog_decay, dlog_input, dkv, dz


def _save(ctx, inputs, output):
    q, k, v, log_decay, log_input, kv, z, mask, cu_seqlens, *ctx.options, _ = inputs
    y, _, _, denominator, lost = output
    y = y if ctx.options[1] else y.new_empty(0)  # normalize: nothing else reads it
    ctx.mark_non_differentiable(denominator, lost)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, y, denominator, lost, log_decay, log_input, kv, z, mask, cu_seqlens)


_RECURRENCE_OPTIONS = "Tensor? mask, Tensor? cu_seqlens, float scale"
_RECURRENCE = (
    "(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta, Tensor state, "
    f"{_RECURRENCE_OPTIONS}, bool save) -> (Tensor y, Tensor state_out, Tensor saved)"
)
_RECURRENCE_BACKWARD = (
    "(Tensor dy, Tensor? dstate, Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta, "
    f"Tensor saved, Tensor state, {_RECURRENCE_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, "
    "Tensor dlog_decay, Tensor dbeta, Tensor dstate_in)"
)


def register_recurrence(
    name: str,
    impl: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    saved_size: Callable[..., int],
    devices: Sequence[str],
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Make the operators lintra::`name` and lintra::`name`_backward of functions; return the first.

    `forward` and `backward` take arguments in the order of the schemas; `saved_size(q, k, v, beta,
    cu_seqlens)` counts the numbers that a forward with `save` keeps for the backward."""

    def output_shape(q, k, v):
        return *q.shape[:2], max(q.shape[2], k.shape[2], v.shape[2]), v.shape[3]

    def fake(q, k, v, log_decay, beta, state, mask, cu_seqlens, scale, save):
        saved = state.new_empty(saved_size(q, k, v, beta, cu_seqlens) if save else 0)
        return v.new_empty(output_shape(q, k, v)), state.new_empty(state.shape), saved

    def save(ctx, inputs, output):
        ctx.scale = inputs[8]
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:8], output[2])

    def differentiate(ctx, dy, dstate, _):
        q, k, v, log_decay, beta, state, mask, cu_seqlens, saved = ctx.saved_tensors
        dy = v.new_zeros(output_shape(q, k, v)) if dy is None else dy
        dq, dk, dv, dlog_decay, dbeta, dstate = backward_operator(
            dy, dstate, q, k, v, log_decay, beta, saved, state, mask, cu_seqlens, ctx.scale
        )
        dlog_decay = None if log_decay is None else dlog_decay
        dbeta = None if beta is None else dbeta
        return dq, dk, dv, dlog_decay, dbeta, dstate, None, None, None, None

    def gradients(dy, dstate, q, k, v, log_decay, beta, saved, state, *others):
        return empty_for_none(q, backward(dy, dstate, q, k, v, log_decay, beta, saved, state, *others))

    def gradients_fake(dy, dstate, q, k, v, log_decay, beta, saved, state, *others):
        given = (q, k, v, log_decay, beta, state)
        return empty_for_none(q, (x if x is None else x.new_empty(x.shape) for x in given))

    operator = define(name, _RECURRENCE, forward, fake, differentiate, save, devices)
    refuse = refuse_double_backward("linear attention", impl)
    backward_operator = define(
        f"{name}_backward", _RECURRENCE_BACKWARD, gradients, gradients_fake, refuse, None, devices
    )
    return operator

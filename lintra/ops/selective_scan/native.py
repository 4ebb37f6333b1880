"""The C++ kernels as the operators `lintra::selective_scan` and `lintra::selective_scan_backward`."""

import torch

from lintra.native import scan
from lintra.ops.operator import define, empty_for_none, refuse_double_backward

_ARGUMENTS = "Tensor u, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias"
_OPTIONS = "bool dt_softplus, Tensor? mask, Tensor? cu_seqlens"
_FORWARD = (
    f"({_ARGUMENTS}, Tensor state, {_OPTIONS}, bool save) -> (Tensor y, Tensor state_out, Tensor saved)"
)
_BACKWARD = (
    f"(Tensor dy, Tensor? dstate, {_ARGUMENTS}, Tensor saved, Tensor state, {_OPTIONS}) -> (Tensor du, "
    "Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, Tensor ddt_bias, Tensor dstate_in)"
)


def _forward_fake(u, dt, A, B, C, D, z, dt_bias, state, dt_softplus, mask, cu_seqlens, save):
    saved = state.new_empty(scan.saved_size(u, A, B, cu_seqlens) if save else 0)
    return scan.like(u), state.new_empty(state.shape), saved


def _save(ctx, inputs, output):
    ctx.dt_softplus = inputs[9]
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9], *inputs[10:12], output[2])


def _differentiate(ctx, dy, dstate, _):
    *inputs, state, mask, cu_seqlens, saved = ctx.saved_tensors
    dy = torch.zeros_like(inputs[0]) if dy is None else dy
    options = (ctx.dt_softplus, mask, cu_seqlens)
    gradients = _backward_operator(dy, dstate, *inputs, saved, state, *options)
    given = (None if x is None else dx for x, dx in zip((*inputs, state), gradients, strict=True))
    return *given, None, None, None, None


def _backward(dy, dstate, u, dt, A, B, C, D, z, dt_bias, saved, state, dt_softplus, mask, cu_seqlens):
    inputs, options = (u, dt, A, B, C, D, z, dt_bias), (dt_softplus, mask, cu_seqlens)
    if not saved.numel():  # the forward did not expect to be differentiated
        saved = scan.forward(*inputs, state, *options, True)[2]
    return empty_for_none(u, scan.backward(dy, dstate, *inputs, saved, *options))


def _backward_fake(dy, dstate, u, dt, A, B, C, D, z, dt_bias, saved, state, *_):
    du, ddt, dz = (None if x is None else scan.like(x) for x in (u, dt, z))
    dA, dB, dC, dD, dbias, dstate = (
        None if x is None else x.new_empty(x.shape) for x in (A, B, C, D, dt_bias, state)
    )
    return empty_for_none(u, (du, ddt, dA, dB, dC, dD, dz, dbias, dstate))


selective_scan_native = define(
    "selective_scan", _FORWARD, scan.forward, _forward_fake, _differentiate, _save, ["CPU"]
)
_backward_operator = define(
    "selective_scan_backward",
    _BACKWARD,
    _backward,
    _backward_fake,
    refuse_double_backward("the selective scan", "native"),
    None,
    ["CPU"],
)

"""The C++ kernels as PyTorch operators: autograd, torch.compile, shapes without data.

`lintra::linear_attention` and its backward are one operator each, so a compiled graph keeps them whole.
Second derivatives, vmap and the other transforms are not offered here: `impl="torch"` has them.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lintra import native
from lintra.ops import _check

_LIBRARY = torch.library.Library("lintra", "FRAGMENT")
_LIBRARY.define(
    "linear_attention(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? log_input, Tensor kv, "
    "Tensor z, Tensor? mask, Tensor? cu_seqlens, bool causal, bool normalize, float eps, str? feature_map) "
    "-> (Tensor y, Tensor kv_out, Tensor z_out, Tensor denominator)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "linear_attention_backward(Tensor dy, Tensor? dkv, Tensor? dz, Tensor q, Tensor k, Tensor v, Tensor y, "
    "Tensor denominator, Tensor? log_decay, Tensor? log_input, Tensor kv, Tensor z, "
    "Tensor? mask, Tensor? cu_seqlens, bool causal, bool normalize, float eps, str? feature_map) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dlog_decay, Tensor dlog_input, Tensor dkv, Tensor dz)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# Here and not at the first call, which torch.compile may be tracing. A wrong LINTRA_NATIVE is told then.
with suppress(ValueError):
    native.available()


def linear_attention_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    log_input: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [b t h e], kv [b g f e] and z [b g f] after the last token; packed, the states are [n ...]. Arguments
    as the operator orders them, validated by `lintra.ops.linear_attention`."""
    dtype = _check.sum_dtype(q.dtype)
    log_decay, log_input = (x if x is None else x.to(dtype) for x in (log_decay, log_input))
    y, kv, z, _ = torch.ops.lintra.linear_attention(q, k, v, log_decay, log_input, *others)
    return y, kv, z


def _named(arguments: Sequence[Any]) -> dict[str, Any]:
    """The arguments after those that `native` takes by place."""
    names = ("log_decay", "log_input", "kv", "z", "mask", "cu_seqlens")
    names += ("causal", "normalize", "eps", "feature_map")
    return dict(zip(names, arguments, strict=True))


def _forward(q, k, v, *others):
    return native.forward(q, k, v, **_named(others))


def _backward(dy, dkv, dz, q, k, v, y, denominator, *others):
    gradients = native.backward(dy, dkv, dz, q, k, v, y, denominator, **_named(others))
    # An operator returns tensors: an empty one stands for the gradient of an argument that was not given.
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


def _forward_fake(q, k, v, log_decay, log_input, kv, z, *_):
    y = v.new_empty(*q.shape[:3], v.shape[3])
    denominator = kv.new_empty(q.shape[:3])
    return y, kv.new_empty(kv.shape), z.new_empty(z.shape), denominator


def _backward_fake(dy, dkv, dz, q, k, v, y, denominator, log_decay, log_input, kv, z, *_):
    dlog_decay, dlog_input = (
        q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (log_decay, log_input)
    )
    dq, dk, dv, dkv, dz = (x.new_empty(x.shape) for x in (q, k, v, kv, z))
    return dq, dk, dv, dlog_decay, dlog_input, dkv, dz


def _save(ctx, inputs, output):
    q, k, v, log_decay, log_input, kv, z, mask, cu_seqlens, *ctx.options = inputs
    y, _, _, denominator = output
    ctx.mark_non_differentiable(denominator)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, y, denominator, log_decay, log_input, kv, z, mask, cu_seqlens)


def _differentiate(ctx, dy, dkv, dz, _):
    q, k, v, y, denominator, log_decay, log_input, *others = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dy
    dq, dk, dv, dlog_decay, dlog_input, dkv, dz = torch.ops.lintra.linear_attention_backward(
        dy, dkv, dz, q, k, v, y, denominator, log_decay, log_input, *others, *ctx.options
    )
    dlog_decay = None if log_decay is None else dlog_decay
    dlog_input = None if log_input is None else dlog_input
    return dq, dk, dv, dlog_decay, dlog_input, dkv, dz, None, None, None, None, None, None


def _no_double_backward(ctx, *_):
    raise NotImplementedError(
        "linear attention with impl='native' can be differentiated once; "
        "use impl='torch' for second derivatives"
    )


_LIBRARY.impl("linear_attention", _forward, "CPU")
_LIBRARY.impl("linear_attention_backward", _backward, "CPU")
for _name, _fake, _gradient, _context in (
    ("linear_attention", _forward_fake, _differentiate, _save),
    ("linear_attention_backward", _backward_fake, _no_double_backward, None),
):
    torch.library.register_fake(f"lintra::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(f"lintra::{_name}", _gradient, setup_context=_context, lib=_LIBRARY)

"""The recurrences without a denominator in their kernels: decays of every feature, and the delta rule.

A denominator, where requested, is a column of ones in v. `reference` has the formulas, `chunked` plain
PyTorch, `native` the C++ kernels for the CPU, `triton_recurrence` those for NVIDIA GPUs.
"""

from functools import partial

import torch
from torch import Tensor

from lintra.native import recurrence
from lintra.ops import checks, dispatch
from lintra.ops.dispatch import can_call_kernels
from lintra.ops.features import FeatureMapName, apply_feature_map
from lintra.ops.layout import Layout
from lintra.ops.linear_attention.chunked import recurrence_chunked
from lintra.ops.linear_attention.native import recurrence_native
from lintra.ops.linear_attention.reference import LinearState, divide, recurrence_reference
from lintra.ops.linear_attention.triton_recurrence import recurrence_triton
from lintra.ops.padding import zero_padding

_OPERATORS = {"native": recurrence_native, "triton": recurrence_triton}


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: LinearState | None,
    layout: Layout,
    *,
    log_input: Tensor | None,
    normalize: bool,
    eps: float,
    feature_map: FeatureMapName | None,
    scale: float | None,
    chunk: int,
    impl: str,
    inplace: bool,
) -> tuple[Tensor, LinearState]:
    """Return y [b t h e] and the state after the last token: see `lintra.ops.linear_attention`."""
    total, dtype = checks.sum_dtype(q.dtype), v.dtype
    if state is None:
        sizes = layout.n, max(k.shape[2], v.shape[2]), k.shape[3], v.shape[3]
        state = LinearState.empty(*sizes, device=k.device, dtype=k.dtype, denominator=normalize)
    kept, kv = state.kv.dtype, state.kv.to(total)
    log_decay, beta = (x if x is None else x.to(total) for x in (log_decay, beta))
    if normalize or feature_map is not None or log_input is not None:  # y is rounded once, at the end
        q, k, v = (x.to(total) for x in zero_padding(layout.mask, q, k, v))
        q, k = apply_feature_map(feature_map, q), apply_feature_map(feature_map, k)
        if log_input is not None:
            weight = zero_padding(layout.mask, log_input.to(total))[0].exp()
            k = (k[:, :, :, None] * weight.unflatten(2, (k.shape[2], -1))[..., None]).flatten(2, 3)
    if normalize:
        kv = torch.cat((kv, state.z[..., None]), -1)
        v = torch.cat((v, v.new_ones(*v.shape[:3], 1)), -1)
    given = [x for x in (q, k, v, log_decay, beta, kv) if x is not None]
    inner = 1.0 if scale is None or normalize else scale  # of y, not of the denominator
    places = layout.mask, layout.cu_seqlens
    if impl in ("auto", "native") and can_call_kernels(*given):
        # Not through the operator: PyTorch's dispatcher takes longer than the arithmetic of one token.
        out = kv if inplace and q.shape[1] == 1 and kv is state.kv and kv.is_contiguous() else None
        y, kv, _ = recurrence.forward(q, k, v, log_decay, beta, kv, *places, inner, False, out=out)
        if out is not None:
            torch.autograd.graph.increment_version(out)  # a graph that kept it now raises
            return y.to(dtype), state
    elif (chosen := dispatch.choose("recurrence", impl, *given)) in _OPERATORS:
        save = checks.recorded(*given)
        y, kv, _ = _OPERATORS[chosen](q, k, v, log_decay, beta, kv, *places, inner, save)
    else:
        y, kv = _in_pytorch(q, k, v, log_decay, beta, kv, layout, chunk, chosen == "reference")
        y = y * inner
    z = state.z
    if kv is state.kv:  # no token came: the returned state must not be the caller's
        kv = kv.clone()
    if normalize:
        kv, z = kv[..., :-1].contiguous(), kv[..., -1].contiguous()
        y = divide(y[..., :-1], y[..., -1] + eps) * (1.0 if scale is None else scale)
    return y.to(dtype), LinearState(kv.to(kept), z)


def same_heads(*heads: Tensor) -> list[Tensor]:
    """Repeat the heads of tensors [b t h d] until they have as many as the second or the third has.

    A single head is expanded without a copy: every kernel takes strides of 0."""
    g = max(x.shape[2] for x in heads[1:3])
    return [
        x.expand(-1, -1, g, -1) if x.shape[2] == 1 else x.repeat_interleave(max(1, g // x.shape[2]), 2)
        for x in heads
    ]


def _in_pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    layout: Layout,
    chunk: int,
    reference: bool,
) -> tuple[Tensor, Tensor]:
    """Return y and the state after the last token; packed sequences are run as padded ones."""
    if layout.packed:
        tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
        same = partial(_in_pytorch, chunk=chunk, reference=reference)
        return layout.pad_bucketed().each_with_state(same, state, **tensors)
    q, k, v = same_heads(*zero_padding(layout.mask, *(x.to(state.dtype) for x in (q, k, v))))
    log_decay, beta = (
        x if x is None else zero_padding(layout.mask, x.to(state.dtype))[0] for x in (log_decay, beta)
    )
    if log_decay is not None and log_decay.dim() == 3:
        log_decay = log_decay[..., None]
    if reference or q.shape[1] == 1:
        return recurrence_reference(q, k, v, log_decay, beta, state)
    return recurrence_chunked(q, k, v, log_decay, beta, state, chunk)

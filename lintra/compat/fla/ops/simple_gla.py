"""Linear attention with a decay for every head, kv_t = exp(g_t) kv_{t-1} + k_t v_t^T.

Mamba-2's recurrence (Dao and Gu 2024, arXiv:2405.21060) and, with constant decays, retention. q, k [b t h d],
v [b t h e], g [b t h] or constant g_gamma [h], logarithms of at most 0 -> o [b t h e] in v's dtype and the
state [n h d e] or None. `lintra.compat.fla._recurrence` has the rest. `cu_seqlens_cpu` and `chunk_size`
change nothing here.
"""

import math

import torch
from torch import Tensor

from lintra.compat.fla._arguments import heads_behind_time, v_first
from lintra.compat.fla._recurrence import State, attend
from lintra.ops import checks
from lintra.ops.autocast import no_autocast


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> tuple[Tensor, State]:
    """Linear attention with a decay for every head."""
    heads_behind_time(head_first)
    return attend(
        q,
        k,
        v,
        g=_decay(v, g, g_gamma),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Linear attention with a decay for every head: `chunk_simple_gla`."""
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, State]:
    """Linear attention with a decay for every head; with `reverse` from the last token to the first."""
    return attend(
        q,
        k,
        v,
        g=_decay(v, g, g_gamma),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decay for every head, and with `output_attentions` its scores [b h t t]."""
    if output_attentions and cu_seqlens is not None:
        raise NotImplementedError("output_attentions=True is not supported with cu_seqlens")
    y, _ = chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens)
    if not output_attentions:
        return y, None
    return y, _scores(q, k, g, k.shape[-1] ** -0.5 if scale is None else scale)


def _decay(v: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    """Return the one that is given as [b t h]; ValueError if both are or g_gamma is not [h]."""
    if g_gamma is None:
        return g
    if g is not None:
        raise ValueError("give g or g_gamma, not both")
    checks.shape("g_gamma", g_gamma, "h", {"h": v.shape[2]})
    return g_gamma.expand(v.shape[:3])


def _scores(q: Tensor, k: Tensor, g: Tensor | None, scale: float) -> Tensor:
    """Return scale q_i . k_j exp(g_{j+1} + ... + g_i) for j <= i, otherwise 0, [b h t t] in q's dtype."""
    dtype = checks.sum_dtype(q.dtype)
    passed = q.new_zeros(q.shape[:3], dtype=dtype) if g is None else g.to(dtype).cumsum(1)  # [b t h]
    ahead = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    weight = (passed[:, :, None] - passed[:, None]).masked_fill(ahead[..., None], -math.inf).exp()
    with no_autocast(q):
        return (scale * torch.einsum("bihd,bjhd,bijh->bhij", q.to(dtype), k.to(dtype), weight)).to(q.dtype)

"""Retention, linear attention whose head i decays by 1 - 2^(-5 - i): Sun et al. 2023, arXiv:2307.08621.

q, k [b t h d], v [b t h e] -> o [b t h e] in v's dtype and the state [n h d e] or None.
`lintra.compat.fla._recurrence` has the rest. `chunk_size` changes nothing here.
"""

import torch
from torch import Tensor

from lintra.compat.fla._arguments import as_many_heads, heads_behind_time, v_first
from lintra.compat.fla._recurrence import State
from lintra.compat.fla.ops.simple_gla import (
    chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)
from lintra.ops import checks


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> tuple[Tensor, State]:
    """Retention."""
    heads_behind_time(head_first)
    return chunk_simple_gla(
        q,
        k,
        v,
        g_gamma=_log_decay(q, v),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Retention: `chunk_retention`."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, State]:
    """Retention; with `reverse` from the last token to the first."""
    return fused_recurrent_simple_gla(
        q,
        k,
        v,
        g_gamma=_log_decay(q, v),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Retention, and with `output_attentions` its scores [b h t t]."""
    g = _log_decay(q, v).expand(q.shape[:3])
    return parallel_simple_gla(q, k, v, g, scale, output_attentions, cu_seqlens)


def _log_decay(q: Tensor, v: Tensor) -> Tensor:
    """Return the logarithms of the decays [h] of the heads of q [b t h d] and v [b t h e]."""
    as_many_heads(q, v)
    heads = torch.arange(q.shape[2], dtype=checks.sum_dtype(q.dtype), device=q.device)
    return (-(2.0 ** (-5.0 - heads))).log1p()

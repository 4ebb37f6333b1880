"""Lightning attention, linear attention whose decays depend on the layer: Qin et al. 2024, arXiv:2401.04658.

Head i of h in layer l of L decays by exp(-8 i / h (1 - l / L)). q, k [b t h d], v [b t h e] -> o [b t h e] in
v's dtype and the state [n h d e] or None. `lintra.compat.fla._recurrence` has the rest. `chunk_size` changes
nothing here.
"""

import torch
from torch import Tensor

from lintra.compat.fla._arguments import as_many_heads, heads_behind_time
from lintra.compat.fla._recurrence import State
from lintra.compat.fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
from lintra.ops import checks


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> tuple[Tensor, State]:
    """Lightning attention of layer `layer_idx`, counted from 0, of `num_layers`."""
    heads_behind_time(head_first)
    return chunk_simple_gla(
        q,
        k,
        v,
        g_gamma=_log_decay(q, v, layer_idx, num_layers),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Lightning attention; with `reverse` from the last token to the first."""
    return fused_recurrent_simple_gla(
        q,
        k,
        v,
        g_gamma=_log_decay(q, v, layer_idx, num_layers),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )


def _log_decay(q: Tensor, v: Tensor, layer: int, layers: int) -> Tensor:
    """Return the logarithms of the decays [h] of the heads of q [b t h d] and v [b t h e]."""
    as_many_heads(q, v)
    heads = torch.arange(q.shape[2], dtype=checks.sum_dtype(q.dtype), device=q.device)
    return -(8 / q.shape[2] * (1 - layer / layers)) * heads

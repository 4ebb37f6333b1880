"""Gated linear attention, kv_t = diag(exp(g_t)) kv_{t-1} + k_t v_t^T: Yang et al. 2023, arXiv:2312.06635.

q, k [b t h d], v [b t h e], logarithms of decays [b t h d] of at most 0 -> o [b t h e] in v's dtype and the
state [n h d e] or None. `lintra.compat.fla._recurrence` has the rest.
"""

from torch import Tensor

from lintra.compat.fla._arguments import refuse, v_first
from lintra.compat.fla._recurrence import State, attend


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Gated linear attention. `cu_seqlens_cpu` changes nothing here."""
    return attend(
        q,
        k,
        v,
        g=g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


def fused_chunk_gla(**kwargs: object) -> None:
    """Raise NotImplementedError, as FLA does, which removed this form."""
    raise NotImplementedError("fused_chunk_gla is gone from FLA: chunk_gla computes the same")


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, State]:
    """Gated linear attention; with `reverse` from the last token to the first. gv, decays of values, are not
    served."""
    refuse(gv=gv)
    return attend(
        q,
        k,
        v,
        g=gk,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )

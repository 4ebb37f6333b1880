"""Linear attention without a decay, kv_t = kv_{t-1} + k_t v_t^T: Katharopoulos et al. 2020, arXiv:2006.16236.

q, k [b t h d], v [b t h e] -> o [b t h e] in v's dtype and the state [n h d e] or None. With `normalize` o is
divided by the sum of the scores plus 1e-10, and states, given and returned, are pairs with the sum of the
keys [n 1 h d]. `lintra.compat.fla._recurrence` has the rest.
"""

from torch import Tensor

from lintra.compat.fla._recurrence import State, attend


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Linear attention, normalized unless asked otherwise."""
    return attend(
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        normalize=normalize,
        cu_seqlens=cu_seqlens,
    )


def fused_chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Linear attention, normalized unless asked otherwise: `chunk_linear_attn`."""
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Linear attention; with `reverse` from the last token to the first."""
    return attend(
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        normalize=normalize,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )

"""The delta rule, kv_t = kv_{t-1} + beta_t k_t (v_t - kv_{t-1}^T k_t)^T.

Schlag et al. 2021, arXiv:2102.11174, section 4.
q, k [b t h d], v [b t h e], beta [b t h] -> o [b t h e] in v's dtype and the state [n h d e] or None.
`lintra.compat.fla._recurrence` has the rest. `cu_seqlens_cpu` and `chunk_size` change nothing here.
"""

from torch import Tensor

from lintra.compat.fla._arguments import heads_behind_time
from lintra.compat.fla._recurrence import State, attend


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int = 64,
    head_first: bool | None = None,
) -> tuple[Tensor, State]:
    """The delta rule, of float32 too, which FLA's kernels refuse."""
    heads_behind_time(head_first)
    return fused_recurrent_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def fused_chunk_delta_rule(**kwargs: object) -> None:
    """Raise NotImplementedError, as FLA does, which removed this form."""
    raise NotImplementedError("fused_chunk_delta_rule is gone from FLA: chunk_delta_rule computes the same")


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """The delta rule; beta is 1 unless given."""
    return attend(
        q,
        k,
        v,
        beta=v.new_ones(v.shape[:3]) if beta is None else beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )

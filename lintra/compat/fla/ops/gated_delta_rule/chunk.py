"""The gated delta rule of whole sequences."""

from torch import Tensor

from lintra.compat.fla._arguments import heads_behind_time, refuse, v_first
from lintra.compat.fla._recurrence import State
from lintra.compat.fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    head_first: bool | None = None,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, State]:
    """The gated delta rule; `fused_recurrent_gated_delta_rule` says what the options do.

    `cu_seqlens_cpu`, `chunk_indices` and `chunk_size` change nothing here. `cp_context`, the sharing of a
    sequence between devices, is not served.
    """
    heads_behind_time(head_first)
    refuse(cp_context=cp_context)
    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


chunk_gdn = chunk_gated_delta_rule

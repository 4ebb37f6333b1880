"""Kimi delta attention of whole sequences."""

from torch import Tensor

from lintra.compat.fla._arguments import refuse, v_first
from lintra.compat.fla._recurrence import State
from lintra.compat.fla.ops.kda.fused_recurrent import fused_recurrent_kda


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, State]:
    """Kimi delta attention; `fused_recurrent_kda` says what the options do.

    `safe_gate` promises decays that FLA can compute with faster: with `use_gate_in_kernel` it needs a
    `lower_bound` from -5 to below 0. `disable_recompute`, `cu_seqlens_cpu`, `chunk_size` and, without
    `use_graph`, `max_num_seqs` change nothing here. `return_intermediate_states`, `cp_context` and
    `use_graph` are not served.
    """
    refuse(return_intermediate_states=return_intermediate_states, cp_context=cp_context, use_graph=use_graph)
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ValueError(f"lower_bound must be from -5 to below 0 with safe_gate=True, got {lower_bound}")
    return fused_recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )

"""Kimi delta attention from a state to a state."""

from torch import Tensor

from lintra.compat.fla._arguments import v_first
from lintra.compat.fla._recurrence import State, attend, gated_beta
from lintra.compat.fla.ops.kda.gate import log_decay


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, State]:
    """Kimi delta attention; differentiable, which FLA's is not.

    With `use_gate_in_kernel` g is the input from which `fused_kda_gate` computes the decay, with A_log [o],
    dt_bias [o d] and `lower_bound`; otherwise those three are ignored. `use_beta_sigmoid_in_kernel`: beta is
    given as logits, and with `allow_neg_eigval` goes up to 2.
    """
    return attend(
        q,
        k,
        v,
        g=log_decay(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g,
        beta=gated_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )

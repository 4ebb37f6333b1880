"""The gated delta rule from a state to a state."""

from torch import Tensor

from lintra.compat.fla._arguments import refuse, v_first
from lintra.compat.fla._recurrence import State, attend, decay_gate, gated_beta


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, State]:
    """The gated delta rule; differentiable, which FLA's is not.

    Decays may come for every head, g [b t o], for every feature of the keys, gk [b t o d], or as the product
    of both; gv, decays of values, are not served. With `use_gate_in_kernel` g is the input from which the
    gate is computed, and A_log and dt_bias are [o]; otherwise those two are ignored.
    `use_beta_sigmoid_in_kernel`: beta is given as logits, and with `allow_neg_eigval` goes up to 2. Without
    beta it is 1.
    """
    refuse(gv=gv)
    if use_gate_in_kernel:
        if g is None:
            raise ValueError("g must be given with use_gate_in_kernel=True, which computes the decay of it")
        g = decay_gate(g, A_log, dt_bias)
    if gk is not None:
        g = gk if g is None else g[..., None] + gk
    beta = v.new_ones(v.shape[:3]) if beta is None else beta
    return attend(
        q,
        k,
        v,
        g=g,
        beta=gated_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


fused_recurrent_gdn = fused_recurrent_gated_delta_rule

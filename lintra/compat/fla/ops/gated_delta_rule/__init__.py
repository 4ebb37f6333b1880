"""The gated delta rule, whose state decays by a number for every head before the delta rule writes.

    kv_t = exp(g_t) kv_{t-1} + beta_t k_t (v_t - exp(g_t) kv_{t-1}^T k_t)^T

Yang et al. 2024, arXiv:2412.06464, section 3. q, k [b t h d], v [b t o e], g and beta [b t o] -> o [b t o e]
in v's dtype and the state [n o d e] or None; o is a multiple of h. `lintra.compat.fla._recurrence` has the
rest.
"""

from lintra.compat.fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule, chunk_gdn
from lintra.compat.fla.ops.gated_delta_rule.fused_recurrent import (
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
]

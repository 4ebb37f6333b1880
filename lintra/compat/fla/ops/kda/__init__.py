"""Kimi delta attention (KDA), the delta rule on a state in which every feature of the keys decays by itself.

    kv_t = D_t kv_{t-1} + beta_t k_t (v_t - (D_t kv_{t-1})^T k_t)^T        D_t = diag(exp(g_t))

Kimi Team 2025, arXiv:2510.26692. q, k [b t h d], v [b t o e], g [b t o d], beta [b t o] -> o [b t o e] in v's
dtype and the state [n o d e] or None; o is a multiple of h. `lintra.compat.fla._recurrence` has the rest.
"""

from lintra.compat.fla.ops.kda.chunk import chunk_kda
from lintra.compat.fla.ops.kda.fused_recurrent import fused_recurrent_kda

__all__ = ["chunk_kda", "fused_recurrent_kda"]

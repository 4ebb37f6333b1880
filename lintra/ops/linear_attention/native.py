"""The C++ kernels as the operators `lintra::linear_attention` and `lintra::recurrence`."""

from collections.abc import Sequence

from torch import Tensor

from lintra.native import linear_attention as kernel
from lintra.native import recurrence
from lintra.ops.dispatch import can_skip_operator
from lintra.ops.features import FeatureMapName
from lintra.ops.linear_attention import operator

linear_attention_native = operator.register(
    "linear_attention", "native", kernel.forward, kernel.backward, ["CPU"]
)


def _recurrence_backward(dy, dstate, q, k, v, log_decay, beta, saved, state, mask, cu_seqlens, scale):
    if not saved.numel():  # the forward did not expect to be differentiated
        saved = recurrence.forward(q, k, v, log_decay, beta, state, mask, cu_seqlens, scale, True)[2]
    return recurrence.backward(dy, dstate, q, k, v, log_decay, beta, saved, mask, cu_seqlens, scale)


recurrence_native = operator.register_recurrence(
    "recurrence", "native", recurrence.forward, _recurrence_backward, recurrence.saved_size, ["CPU"]
)


def native_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Sequence[Tensor] | None,
    eps: float,
    feature_map: FeatureMapName | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """One token of causal linear attention: y [b 1 h e], kv, z as `lintra.ops.linear_attention` gives them.

    None where more than numbers is asked for: gradients, autocast, graphs, other devices, errors. q, k
    [b 1 h f], v [b 1 h e]. All the checks and PyTorch's dispatcher take longer than the arithmetic of one
    token, which is why a loop over tokens asks here first."""
    kv, z = (None, None) if state is None else state
    given = [x for x in (q, k, v, kv, z) if x is not None]
    if not can_skip_operator(*given):
        return None
    b, _, h, f = q.shape
    sizes = (b, 1, h, f) == q.shape == k.shape and v.shape[:3] == (b, 1, h) and f and v.shape[3]
    if kv is not None and z is not None:
        sizes = sizes and kv.shape == (b, h, f, v.shape[3]) and z.shape == (b, h, f)
    if not sizes:
        return None
    return kernel.forward(q, k, v, kv=kv, z=z, eps=eps, feature_map=feature_map)[:3]

"""Causal linear attention as an RNN with a state of constant size."""

from collections.abc import Sequence

from torch import Tensor

from lintra import ops
from lintra.compat.fast_transformers._features import FEATURES, Features, features
from lintra.compat.fast_transformers.attention_registry import RecurrentAttentionRegistry
from lintra.compat.fast_transformers.feature_maps.fourier_features import begin
from lintra.compat.fast_transformers.recurrent._utils import State, check_state, open_state
from lintra.native import linear_attention as kernel
from lintra.ops.checks import sum_dtype
from lintra.ops.dispatch import can_skip_operator
from lintra.ops.features import FeatureMapName
from lintra.ops.linear_attention import LinearState


class RecurrentLinearAttention(Features):
    """Linear attention of one token, query [n h e].

    State: the sums of phi(k) v^T [n h f d] and of phi(k) [n h f] so far, in float32 (float64 for float64
    inputs)."""

    _past_only = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, state: State = None, memory: State = None
    ) -> tuple[Tensor, list[Tensor]]:
        state = check_state(state, memory)
        if state is None:
            begin(self.feature_map, query.device)
        else:
            dtype = sum_dtype(query.dtype)
            state = LinearState(*(x if x.dtype == dtype else x.to(dtype) for x in open_state(state, query)))
        q, k, fused = features(self.feature_map, query.unsqueeze(1), key.unsqueeze(1))
        v = value.unsqueeze(1)
        found = native_step(q, k, v, state, self.eps, fused)
        if found is None:
            y, (kv, z) = ops.linear_attention(q, k, v, state=state, eps=self.eps, feature_map=fused)
        else:
            y, kv, z = found
        return y.squeeze(1), [kv, z]


def native_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Sequence[Tensor] | None,
    eps: float,
    feature_map: FeatureMapName | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute one token of causal linear attention: y [b 1 h e], kv, z as `lintra.ops.linear_attention` does.

    Returns None where more than that is needed: gradients, autocast, graphs, other devices, errors. q, k
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


for _name in ("linear", "causal-linear"):
    RecurrentAttentionRegistry.register(_name, RecurrentLinearAttention, FEATURES)

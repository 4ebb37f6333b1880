"""Causal linear attention as an RNN with a state of constant size."""

from torch import Tensor

from lintra import ops
from lintra.compat.fast_transformers._features import FEATURES, Features, features
from lintra.compat.fast_transformers.attention_registry import RecurrentAttentionRegistry
from lintra.compat.fast_transformers.feature_maps.fourier_features import begin
from lintra.compat.fast_transformers.recurrent._utils import State, check_state, open_state
from lintra.ops.checks import sum_dtype
from lintra.ops.linear_attention import LinearState
from lintra.ops.linear_attention.native import native_step


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


for _name in ("linear", "causal-linear"):
    RecurrentAttentionRegistry.register(_name, RecurrentLinearAttention, FEATURES)

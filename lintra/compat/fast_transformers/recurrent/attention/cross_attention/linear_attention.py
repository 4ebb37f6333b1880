"""Linear attention to another sequence, whose sums are the state."""

from torch import Tensor

from lintra import ops
from lintra.compat.fast_transformers._features import FEATURES, Features, features
from lintra.compat.fast_transformers._inner import token_mask
from lintra.compat.fast_transformers.attention_registry import RecurrentCrossAttentionRegistry
from lintra.compat.fast_transformers.feature_maps.fourier_features import begin
from lintra.compat.fast_transformers.masking import BaseMask
from lintra.compat.fast_transformers.recurrent._utils import State, open_state
from lintra.ops.autocast import no_autocast
from lintra.ops.features import apply_feature_map
from lintra.ops.padding import zero_padding


class RecurrentCrossLinearAttention(Features):
    """Linear attention of one token, query [n h e], to another sequence.

    State: the sums of v phi(k)^T [n h d f] and of phi(k) [n h f] over its real tokens, in float32 (float64
    for float64 inputs)."""

    def forward(
        self,
        query: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        key_lengths: BaseMask | None = None,
        state: State = None,
    ) -> tuple[Tensor, list[Tensor]]:
        query = query[:, None]
        if state is None:
            assert keys is not None
            assert values is not None
            begin(self.feature_map, query.device)
            mask = token_mask(key_lengths, keys)
            keys, values = zero_padding(mask, keys, values)  # a map may look at all keys of a sequence
            q, k, fused = features(self.feature_map, query, keys)
            y, (kv, z) = ops.linear_attention(
                q, k, values, mask=mask, causal=False, eps=self.eps, feature_map=fused
            )
            return y[:, 0], [kv.mT, z]
        vk, z = open_state(state, query)
        q, _, fused = features(self.feature_map, query, query)
        with no_autocast(query):
            q = apply_feature_map(fused, q[:, 0].to(vk.dtype))
            y = (vk @ q[..., None])[..., 0] / ((q * z).sum(-1, keepdim=True) + self.eps)
        return y.to(query.dtype), [vk, z]


RecurrentCrossAttentionRegistry.register("linear", RecurrentCrossLinearAttention, FEATURES)

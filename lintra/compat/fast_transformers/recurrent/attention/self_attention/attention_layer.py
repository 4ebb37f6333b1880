"""One token projected to heads, attended for, projected back."""

from torch import Tensor

from lintra.compat.fast_transformers.attention import AttentionLayer
from lintra.compat.fast_transformers.recurrent._utils import State, check_state


class RecurrentAttentionLayer(AttentionLayer):
    """Projects one token [n c] to heads, attends, projects back."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: Tensor, key: Tensor, value: Tensor, state: State = None, memory: State = None
    ) -> tuple[Tensor, State]:
        state = check_state(state, memory)
        size = (len(query), self.n_heads, -1)
        y, state = self.inner_attention(
            self.query_projection(query).view(size),
            self.key_projection(key).view(size),
            self.value_projection(value).view(size),
            state,
        )
        return self.out_projection(y.flatten(1)), state

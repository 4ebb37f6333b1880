"""One token projected to heads, attending to another sequence, projected back."""

from torch import Tensor

from lintra.compat.fast_transformers.attention import AttentionLayer
from lintra.compat.fast_transformers.masking import BaseMask
from lintra.compat.fast_transformers.recurrent._utils import State


class RecurrentCrossAttentionLayer(AttentionLayer):
    """Projects one token [n c]; the sequence it reads [n s c] only while there is no state."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        key_lengths: BaseMask | None = None,
        state: State = None,
    ) -> tuple[Tensor, State]:
        size = (len(query), self.n_heads, -1)
        if state is None:
            assert keys is not None
            assert values is not None
            of_all = (*keys.shape[:2], *size[1:])
            keys, values = self.key_projection(keys).view(of_all), self.value_projection(values).view(of_all)
        else:
            keys = values = None
        q = self.query_projection(query).view(size)
        y, state = self.inner_attention(q, keys, values, key_lengths, state=state)
        return self.out_projection(y.flatten(1)), state

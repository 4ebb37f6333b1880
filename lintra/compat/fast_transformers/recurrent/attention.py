"""Attention over what came before: (query, key, value, state) -> (y, state), query [n h e] of one token.

A state comes back as lintra's NamedTuple, batch first; the one that went in stays as it was.
"""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lintra import ops
from lintra.attention import State
from lintra.compat.fast_transformers.attention import (
    AttentionLayer,
    FullAttention,
    by_position_only,
    features,
    no_events,
    real,
)
from lintra.compat.fast_transformers.feature_maps import elu_feature_map
from lintra.compat.fast_transformers.masking import BaseMask


class RecurrentAttentionLayer(AttentionLayer):
    """Projects one token [n c] to heads, attends, projects back."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: Tensor, key: Tensor, value: Tensor, state: State = None, memory: State = None
    ) -> tuple[Tensor, State]:
        q, k, v = self.project(query, key, value)
        y, state = self.inner_attention(q, k, v, given_state(state, memory))
        return self.out_projection(y.flatten(1)), state


class RecurrentCrossAttentionLayer(AttentionLayer):
    """Projects one token [n c]; the sequence it reads [n s c] only while there is no state."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        key_lengths: BaseMask | None = None,
        state: State = None,
    ) -> tuple[Tensor, State]:
        if state is None:
            q, k, v = self.project(query, keys, values)
        else:
            (q,), k, v = self.project(query), None, None
        y, state = self.inner_attention(q, k, v, key_lengths, state=state)
        return self.out_projection(y.flatten(1)), state


class RecurrentFullAttention(FullAttention):
    """Softmax over a cache of all keys and values so far."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: Tensor, key: Tensor, value: Tensor, state: State = None, memory: State = None
    ) -> tuple[Tensor, State]:
        state = given_state(state, memory)
        q, k, v = (x[:, None] for x in (query, key, value))
        attention = self.mechanism(self.config, q, v, causal=True)
        state = attention.start(len(q), device=q.device, dtype=q.dtype) if state is None else state
        y, state = attention.extend(q, k, v, state)
        return y[:, 0], state


class RecurrentCrossFullAttention(FullAttention):
    """Softmax over another sequence, kept as the state."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        key_lengths: BaseMask | None = None,
        state: State = None,
    ) -> tuple[Tensor, State]:
        v = values if state is None else state.v
        assert v is not None
        attention = self.mechanism(self.config, query[:, None], v, causal=False)
        if state is None:
            assert keys is not None
            state = attention.remember(keys, v, real(key_lengths, keys))
        return attention.read(query[:, None], state)[:, 0], state


class _Recurrent(nn.Module):
    """What the linear types share: a feature map and the sum."""

    def __init__(
        self,
        query_dimensions: int = 0,
        feature_map: Callable[[int], nn.Module] | None = None,
        eps: float = 1e-6,
        event_dispatcher: str = "",
    ):
        super().__init__()
        no_events(event_dispatcher)
        self.feature_map = (feature_map or elu_feature_map)(query_dimensions)
        by_position_only(self.feature_map)
        self.eps = eps

    def sum(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, State]:
        q, k, fused = features(self.feature_map, q, k)
        return ops.linear_attention(q, k, v, eps=self.eps, feature_map=fused, **options)


class RecurrentLinearAttention(_Recurrent):
    """The RNN of linear attention, a state of constant size."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, state: State = None, memory: State = None
    ) -> tuple[Tensor, State]:
        state = given_state(state, memory)
        y, state = self.sum(query[:, None], key[:, None], value[:, None], state=state)
        return y[:, 0], state


class RecurrentCrossLinearAttention(_Recurrent):
    """Linear attention to another sequence, whose sums are the state."""

    def forward(
        self,
        query: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        key_lengths: BaseMask | None = None,
        state: State = None,
    ) -> tuple[Tensor, State]:
        q = query[:, None]
        mask = None
        if state is not None:  # nothing is added to it
            keys = q[:, :0]
            values = q.new_zeros(*keys.shape[:3], state.kv.shape[3])
        else:
            assert keys is not None
            assert values is not None
            mask = real(key_lengths, keys)
        y, state = self.sum(q, keys, values, mask=mask, causal=False, state=state)
        return y[:, 0], state


def given_state(state: State, memory: State) -> State:
    """The state under its own name or the deprecated one."""
    if memory is None:
        return state
    if state is not None:
        raise ValueError("memory is the deprecated name of state: pass one of them")
    warnings.warn("memory is deprecated, pass state", DeprecationWarning, stacklevel=3)
    return memory

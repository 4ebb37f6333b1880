"""Attention by type: what projects to heads, and inner attentions that hand over to lintra's mechanisms.

An inner attention takes queries [n l h e], keys [n s h e], values [n s h d] and three masks: which keys each
query may see, which queries are real, which keys are. None stands for all. What it cannot honour it refuses.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lintra import ops
from lintra.attention import Attention, AttentionConfig, clustered, lsh, softmax
from lintra.compat.fast_transformers.feature_maps import Favor, FeatureMap, elu_feature_map
from lintra.compat.fast_transformers.masking import BaseMask
from lintra.ops.banded import banded_attention
from lintra.ops.padding import zero_padding
from lintra.ops.softmax_attention import softmax_attention


class AttentionLayer(nn.Module):
    """Projects to heads, attends, projects back: x [n l c] -> [n l c]."""

    def __init__(
        self,
        attention: nn.Module,
        d_model: int,
        n_heads: int,
        d_keys: int | None = None,
        d_values: int | None = None,
        d_model_keys: int | None = None,
        event_dispatcher: str = "",
    ):
        super().__init__()
        no_events(event_dispatcher)
        d_keys, d_values = d_keys or d_model // n_heads, d_values or d_model // n_heads
        self.inner_attention = attention
        self.query_projection = nn.Linear(d_model, d_keys * n_heads)
        self.key_projection = nn.Linear(d_model_keys or d_model, d_keys * n_heads)
        self.value_projection = nn.Linear(d_model_keys or d_model, d_values * n_heads)
        self.out_projection = nn.Linear(d_values * n_heads, d_model)
        self.n_heads = n_heads

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask | None = None,
        query_lengths: BaseMask | None = None,
        key_lengths: BaseMask | None = None,
    ) -> Tensor:
        q, k, v = self.project(queries, keys, values)
        y = self.inner_attention(q, k, v, attn_mask, query_lengths, key_lengths)
        return self.out_projection(y.flatten(2))

    def project(self, *given: Tensor) -> list[Tensor]:
        """Queries, keys and values [... c], or the first of them, by heads [... h d]."""
        projections = (self.query_projection, self.key_projection, self.value_projection)
        pairs = zip(projections, given, strict=False)
        return [project(x).unflatten(-1, (self.n_heads, -1)) for project, x in pairs]


class InnerAttention(nn.Module):
    """Base of the types. Padded queries get 0."""

    def __init__(self, event_dispatcher: str = ""):
        super().__init__()
        no_events(event_dispatcher)
        self._mechanisms: dict[Any, Attention] = {}  # by shape; they have no parameters of their own

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask | None = None,
        query_lengths: BaseMask | None = None,
        key_lengths: BaseMask | None = None,
    ) -> Tensor:
        real_queries, real_keys = real(query_lengths, queries), real(key_lengths, keys)
        queries = zero_padding(real_queries, queries)[0]
        keys, values = zero_padding(real_keys, keys, values)
        if attn_mask is None or attn_mask.all_ones:
            y = self.bidirectional(queries, keys, values, real_queries, real_keys)
        elif attn_mask.lower_triangular and queries.shape[1] == keys.shape[1]:
            y = self.causal(queries, keys, values, real_keys)
        else:
            visible = attn_mask.bool_matrix.to(queries.device)
            y = self.masked(queries, keys, values, visible, real_keys)
        return zero_padding(real_queries, y)[0]

    def bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None
    ) -> Tensor:
        """Every query sees every real key."""
        raise NotImplementedError(f"{type(self).__name__} is causal only: it needs a TriangularCausalMask")

    def causal(self, q: Tensor, k: Tensor, v: Tensor, real_k: Tensor | None) -> Tensor:
        """Every query sees the real keys up to its own place."""
        raise NotImplementedError(f"{type(self).__name__} has no causal form for this attn_mask")

    def masked(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real_k: Tensor | None) -> Tensor:
        """Every query sees the real keys its row of `visible` [l s] names."""
        raise NotImplementedError(f"{type(self).__name__} cannot honour an arbitrary attn_mask")

    def mechanism(self, config: AttentionConfig, q: Tensor, v: Tensor, *, causal: bool) -> Attention:
        """lintra's mechanism for tensors of these shapes."""
        key = (config, causal, *q.shape[2:], v.shape[3], q.device)
        if key not in self._mechanisms:
            shape = {"heads": q.shape[2], "dim": q.shape[3], "value_dim": v.shape[3]}
            self._mechanisms[key] = config.build(causal=causal, **shape).to(q.device)
        return self._mechanisms[key].train(self.training)


class FullAttention(InnerAttention):
    """Softmax attention; any mask."""

    def __init__(
        self, softmax_temp: float | None = None, attention_dropout: float = 0.1, event_dispatcher: str = ""
    ):
        super().__init__(event_dispatcher)
        self.config = softmax.Config(scale=softmax_temp, dropout=attention_dropout)

    def bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None
    ) -> Tensor:
        attention = self.mechanism(self.config, q, v, causal=False)
        return attention.read(q, attention.remember(k, v, real_k), real_q)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, real_k: Tensor | None) -> Tensor:
        return self.mechanism(self.config, q, v, causal=True)(q, k, v, mask=real_k)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real_k: Tensor | None) -> Tensor:
        if real_k is not None:
            visible = visible & real_k[:, None, None]
        return self.over(q, k, v, visible)

    def over(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Of all scores at once, those `visible` [... l s]."""
        dropout = self.config.dropout if self.training else 0.0
        q, k, v = (x.movedim(1, 2) for x in (q, k, v))
        piece = softmax_attention(q, k, v, visible=visible, scale=self.config.scale, dropout=dropout)
        return piece.o.movedim(1, 2).to(v.dtype)


class _Features(InnerAttention):
    """What the two linear types share: `feature_map(query_dimensions)`, by default elu + 1."""

    def __init__(
        self,
        query_dimensions: int = 0,
        feature_map: Callable[[int], nn.Module] | None = None,
        eps: float = 1e-6,
        event_dispatcher: str = "",
    ):
        super().__init__(event_dispatcher)
        self.feature_map = (feature_map or elu_feature_map)(query_dimensions)
        self.eps = eps

    def sum(self, q: Tensor, k: Tensor, v: Tensor, real_k: Tensor | None, *, causal: bool) -> Tensor:
        if causal:
            by_position_only(self.feature_map)
        q, k, fused = features(self.feature_map, q, k)
        return ops.linear_attention(q, k, v, mask=real_k, causal=causal, eps=self.eps, feature_map=fused)[0]


class LinearAttention(_Features):
    """Linear attention in which every query sees every real key."""

    def bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None
    ) -> Tensor:
        return self.sum(q, k, v, real_k, causal=False)


class CausalLinearAttention(_Features):
    """Linear attention in which every query sees the real keys up to its own place."""

    def causal(self, q: Tensor, k: Tensor, v: Tensor, real_k: Tensor | None) -> Tensor:
        return self.sum(q, k, v, real_k, causal=True)

    def bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None
    ) -> Tensor:
        if q.shape[1] == k.shape[1] == 1:  # the only mask that is both
            return self.causal(q, k, v, real_k)
        return super().bidirectional(q, k, v, real_q, real_k)


class ReformerAttention(InnerAttention):
    """LSH attention. Keys are the queries at length 1; the keys that are passed are not read.

    `bits` asks for 2 bits buckets: the power of two nearest to that. `masked`: a query sees itself only where
    it sees nothing else.
    """

    def __init__(
        self,
        chunk_size: int = 32,
        bits: int = 8,
        rounds: int = 4,
        masked: bool = False,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str = "",
    ):
        super().__init__(event_dispatcher)
        self.chunk_size, self.bits, self.rounds, self.masked_self = chunk_size, bits, rounds, masked
        self.softmax_temp, self.attention_dropout = softmax_temp, attention_dropout

    def bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None
    ) -> Tensor:
        if q.shape[:2] != k.shape[:2]:
            raise ValueError(f"reformer is self-attention, got {q.shape[1]} queries and {k.shape[1]} keys")
        return self._attend(q, v, real_k, causal=False)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, real_k: Tensor | None) -> Tensor:
        return self._attend(q, v, real_k, causal=True)

    def _attend(self, q: Tensor, v: Tensor, real_k: Tensor | None, *, causal: bool) -> Tensor:
        config = lsh.Config(
            rounds=self.rounds,
            chunk=self.chunk_size,
            buckets=2 ** max(1, round(torch.tensor(2.0 * self.bits).log2().item())),
            see_self=not self.masked_self,
            scale=q.shape[3] ** -0.5 if self.softmax_temp is None else self.softmax_temp,
            dropout=self.attention_dropout,
        )
        return self.mechanism(config, q, v, causal=causal)(q, q, v, mask=real_k)


class ClusteredAttention(InnerAttention):
    """Queries in clusters, a softmax for the mean of each."""

    def __init__(
        self,
        clusters: int,
        iterations: int = 10,
        bits: int = 63,
        hash_bias: bool = True,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str = "",
    ):
        super().__init__(event_dispatcher)
        self.hash_bias = hash_bias
        self.config = clustered.Config(
            clusters=clusters,
            iterations=iterations,
            bits=bits,
            improved=False,
            scale=softmax_temp,
            dropout=attention_dropout,
        )

    def bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None
    ) -> Tensor:
        attention = self.mechanism(self.config, q, v, causal=False)
        return attention.read(q, attention.remember(k, v, real_k), real_q)


class ImprovedClusteredAttention(ClusteredAttention):
    """The same, and the keys that matter most to a cluster weighed for each of its queries."""

    def __init__(
        self,
        clusters: int,
        iterations: int = 10,
        bits: int = 63,
        hash_bias: bool = True,
        topk: int = 32,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str = "",
    ):
        super().__init__(
            clusters, iterations, bits, hash_bias, softmax_temp, attention_dropout, event_dispatcher
        )
        self.config = dataclasses.replace(self.config, improved=True, topk=topk)


class LocalAttention(InnerAttention):
    """Softmax over the `local_context` keys around each query: the c / 2 before it, itself, those after."""

    def __init__(
        self,
        local_context: int,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str = "",
    ):
        super().__init__(event_dispatcher)
        if local_context < 1:
            raise ValueError(f"local_context must be at least 1 key, got {local_context}")
        self.local_context, self.softmax_temp = local_context, softmax_temp
        self.attention_dropout = attention_dropout

    def bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, real_q: Tensor | None, real_k: Tensor | None
    ) -> Tensor:
        return self._band(q, k, v, real_k, (self.local_context + 1) // 2 - 1)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, real_k: Tensor | None) -> Tensor:
        return self._band(q, k, v, real_k, 0)

    def _band(self, q: Tensor, k: Tensor, v: Tensor, real_k: Tensor | None, after: int) -> Tensor:
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"local is self-attention, got {q.shape[1]} queries and {k.shape[1]} keys")
        piece = banded_attention(
            q,
            k,
            v,
            before=self.local_context // 2,
            after=after,
            visible=real_k,
            scale=self.softmax_temp,
            dropout=self.attention_dropout if self.training else 0.0,
        )
        return piece.o.to(v.dtype)


class ConditionalFullAttention(nn.Module):
    """Softmax up to `length_limit` queries and keys, another attention beyond."""

    def __init__(
        self,
        other_attention: nn.Module,
        length_limit: int = 512,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str = "",
    ):
        super().__init__()
        self.full_attention = FullAttention(softmax_temp, attention_dropout, event_dispatcher)
        self.other_attention = other_attention
        self.length_limit = length_limit

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, *masks: BaseMask | None) -> Tensor:
        long = max(queries.shape[1], values.shape[1]) > self.length_limit
        return (self.other_attention if long else self.full_attention)(queries, keys, values, *masks)


def real(lengths: BaseMask | None, x: Tensor) -> Tensor | None:
    """The mask [n l] of a sequence x [n l h e]; None if all is real. ValueError where they do not fit."""
    if lengths is None or (lengths.all_ones and lengths.shape[-1] == x.shape[1]):
        return None
    mask = lengths.bool_matrix.to(x.device)
    if mask.dim() != 2 or mask.shape[0] != x.shape[0] or mask.shape[1] > x.shape[1]:
        raise ValueError(f"lengths of {list(mask.shape)} do not fit {x.shape[0]} sequences of {x.shape[1]}")
    return torch.cat((mask, mask.new_zeros(len(mask), x.shape[1] - mask.shape[1])), 1)


def features(feature_map: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Any]:
    """What goes into the sum, and the name of the map that is left for it to apply."""
    fused = getattr(feature_map, "fused", None)
    if fused is not None:
        return q, k, fused
    if isinstance(feature_map, FeatureMap):
        return feature_map.forward_queries(q), feature_map.forward_keys(k), None
    return feature_map(q), feature_map(k), None


def by_position_only(feature_map: nn.Module) -> None:
    """Raises ValueError for a map whose features of one token depend on the others."""
    if isinstance(feature_map, Favor) and feature_map.stabilize:
        raise ValueError(
            "Favor(stabilize=True) subtracts the maximum of the whole sequence, which a causal model must "
            "not know: use stabilize=False, or lintra.attention.performer, whose running maximum is exact"
        )


def no_events(event_dispatcher: str) -> None:
    """Raises NotImplementedError where events are asked for."""
    if event_dispatcher:
        raise NotImplementedError("lintra has no events: leave event_dispatcher out and use PyTorch's hooks")

"""Base of the inner attentions: masks read once for all of them, and a mechanism of lintra for each shape.

An inner attention takes queries [n l h e], keys [n s h e], values [n s h d] and three masks: which keys each
query may see, which queries are real, which keys are. None stands for all. It raises for masks it cannot
honour.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention import Attention, AttentionConfig
from lintra.compat.fast_transformers.attention_registry import (
    Bool,
    EventDispatcherInstance,
    Float,
    Int,
    Optional,
    Spec,
)
from lintra.compat.fast_transformers.events import EventDispatcher
from lintra.compat.fast_transformers.masking import BaseMask
from lintra.ops.padding import zero_padding

# What several types are registered with.
EVENTS: list[tuple[str, Spec]] = [("event_dispatcher", Optional(EventDispatcherInstance, ""))]
SOFTMAX: list[tuple[str, Spec]] = [
    ("softmax_temp", Optional(Float)),
    ("attention_dropout", Optional(Float, 0.1)),
    *EVENTS,
]
CLUSTERED: list[tuple[str, Spec]] = [
    ("clusters", Int),
    ("iterations", Optional(Int, 10)),
    ("bits", Optional(Int, 63)),
    ("hash_bias", Optional(Bool, True)),
]
MECHANISMS = 8  # that one module keeps; with a temperature that falls each step has its own


class Dispatching(nn.Module):
    """Base of attentions that report to listeners."""

    def __init__(self, event_dispatcher: str | EventDispatcher = ""):
        super().__init__()
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)


class Real(NamedTuple):
    """Masks of unpadded queries [n l] and keys [n s], None for all. The two may be one mask."""

    q: Tensor | None
    k: Tensor | None


class InnerAttention(Dispatching):
    """Base of the types. The output [n l h d] is contiguous; padded queries get 0."""

    def __init__(self, event_dispatcher: str | EventDispatcher = ""):
        super().__init__(event_dispatcher)
        self._mechanisms: dict[Any, Attention] = {}  # by shape; they have no parameters of their own

    def __getstate__(self) -> dict[str, Any]:
        """Leave the mechanisms out: they are on one device, and are built again when missing."""
        return {name: x for name, x in super().__getstate__().items() if name != "_mechanisms"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_mechanisms": {}})

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask | None = None,
        query_lengths: BaseMask | None = None,
        key_lengths: BaseMask | None = None,
    ) -> Tensor:
        mask = token_mask(query_lengths, queries)
        shared = key_lengths is query_lengths and queries.shape[1] == keys.shape[1]
        real = Real(mask, mask if shared else token_mask(key_lengths, keys))
        queries = zero_padding(real.q, queries)[0]
        keys, values = zero_padding(real.k, keys, values)
        if attn_mask is None or attn_mask.all_ones:
            y = self._bidirectional(queries, keys, values, real)
        elif attn_mask.lower_triangular and queries.shape[1] == keys.shape[1]:
            y = self._causal(queries, keys, values, real)
        else:
            visible = attn_mask.bool_matrix.to(queries.device)
            y = self._masked(queries, keys, values, visible, real)
        return zero_padding(real.q, y)[0].contiguous()

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        """Every query sees every real key."""
        raise NotImplementedError(f"{type(self).__name__} is causal only: it needs a TriangularCausalMask")

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        """Every query sees the real keys up to its own place."""
        raise NotImplementedError(f"{type(self).__name__} has no causal form for this attn_mask")

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real: Real) -> Tensor:
        """Every query sees the real keys its row of `visible` [l s] names."""
        raise NotImplementedError(f"{type(self).__name__} cannot honour an arbitrary attn_mask")

    def _mechanism(
        self, config: Callable[..., AttentionConfig], q: Tensor, v: Tensor, *, causal: bool, **options: Any
    ) -> Attention:
        """lintra's mechanism of that configuration for tensors of these shapes."""
        key = (causal, *q.shape[2:], v.shape[3], q.device, *options.items())
        if key not in self._mechanisms:
            if len(self._mechanisms) >= MECHANISMS:
                self._mechanisms.clear()
            shape = {"heads": q.shape[2], "dim": q.shape[3], "value_dim": v.shape[3]}
            with torch.inference_mode(False):  # its buffers serve training too
                self._mechanisms[key] = config(**options).build(causal=causal, **shape).to(q.device)
        return self._mechanisms[key].train(self.training)

    @staticmethod
    def _read(attention: Attention, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        """Return the output of a bidirectional mechanism; as cross-attention, which copies k and v, only
        where queries and keys are of two sequences."""
        if real.q is real.k and q.shape[1] == k.shape[1]:
            return attention(q, k, v, mask=real.q)
        return attention.cross_attend(q, attention.encode_memory(k, v, real.k), real.q)


class MaskedAttention(InnerAttention):
    """Base of the types that compute any mask in one way."""

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        return self._masked(q, k, v, q.new_ones(q.shape[1], k.shape[1], dtype=torch.bool), real)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        return self._masked(q, k, v, q.new_ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(), real)


class Scored(Dispatching):
    """Base of the types that weigh by a softmax of scores, times `softmax_temp` (None: e ** -0.5)."""

    def __init__(
        self,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(event_dispatcher)
        self.softmax_temp = softmax_temp
        self.dropout = nn.Dropout(attention_dropout)

    def _scores(self) -> dict[str, Any]:
        """`scale` and `dropout` as the configurations of lintra take them."""
        return {"scale": self.softmax_temp or None, "dropout": self.dropout.p}

    def _weighing(self) -> dict[str, Any]:
        """`scale` and `dropout` as the ops take them, now."""
        return self._scores() | {"dropout": self.dropout.p if self.dropout.training else 0.0}

    def _weights(self, q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
        """The definition: of queries [n h l e] and keys [n h s e], those `visible` [n h l s], after dropout.

        -> [n h l s]; 0 where a query sees nothing.
        """
        scores = q * (self._weighing()["scale"] or q.shape[3] ** -0.5) @ k.mT
        return self._softmax(scores, visible)

    def _softmax(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """Return the softmax of scores [... s] that are `visible`, after dropout; 0 where none is."""
        dropout = self._weighing()["dropout"]
        if visible is None:
            return functional.dropout(scores.softmax(-1), dropout)
        blind = ~visible.any(-1, keepdim=True)
        scores = scores.masked_fill(~visible, -torch.inf).masked_fill(blind, 0.0)
        return functional.dropout(scores.softmax(-1).masked_fill(blind, 0.0), dropout)


class ScoredInnerAttention(Scored, InnerAttention):
    """Base of the softmax types of whole sequences."""

    def _mechanism(
        self, config: Callable[..., AttentionConfig], q: Tensor, v: Tensor, *, causal: bool, **options: Any
    ) -> Attention:
        """lintra's mechanism as above; weights are dropped where the module `dropout` would."""
        return super()._mechanism(config, q, v, causal=causal, **options).train(self.dropout.training)


def token_mask(lengths: BaseMask | None, x: Tensor) -> Tensor | None:
    """The mask [n l] of a sequence x [n l h e]; None if all is real. One row is that of all sequences.

    Raises ValueError where they do not fit."""
    if lengths is None or (lengths.all_ones and lengths.shape[-1] == x.shape[1]):
        return None
    mask = lengths.bool_matrix.to(x.device)
    if mask.dim() == 2 and len(mask) == 1:
        mask = mask.expand(len(x), -1)
    if mask.dim() != 2 or mask.shape[0] != x.shape[0] or mask.shape[1] > x.shape[1]:
        raise ValueError(f"lengths of {list(mask.shape)} do not fit {x.shape[0]} sequences of {x.shape[1]}")
    return torch.cat((mask, mask.new_zeros(len(mask), x.shape[1] - mask.shape[1])), 1)


def matrix(visible: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """`visible`. Raises ValueError unless it is [l s] for q [n l h e] and k [n s h e]."""
    if visible.shape != (q.shape[1], k.shape[1]):
        raise ValueError(
            f"attn_mask must be one for each of {q.shape[1]} queries and {k.shape[1]} keys, got one of "
            f"{list(visible.shape)}"
        )
    return visible


def pairs(visible: Tensor, real_k: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Return which of the real keys each query sees [n h l s], n, h or l being 1 where they do not matter;
    `visible` [l s] may have axes of samples and heads in front. Raises ValueError for a mask of other
    sizes."""
    matrix(visible[(0,) * (visible.dim() - 2)], q, k)
    visible = visible[(None,) * (4 - visible.dim())]
    return visible if real_k is None else visible & real_k[:, None, None]

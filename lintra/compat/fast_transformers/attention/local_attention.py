"""Softmax attention to the keys near a query's own place."""

import torch
from torch import Tensor
from torch.nn import functional

from lintra.compat.fast_transformers._inner import (
    SOFTMAX,
    MaskedAttention,
    Real,
    ScoredInnerAttention,
    matrix,
)
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry, Int
from lintra.compat.fast_transformers.events import EventDispatcher
from lintra.ops.banded import banded_attention, windows
from lintra.ops.padding import real_tokens
from lintra.ops.softmax_attention import softmax_attention

SMALLEST = 16  # queries to a block where a mask says which keys queries see


class LocalAttention(MaskedAttention, ScoredInnerAttention):
    """Softmax over the `local_context` keys around each query: the c / 2 before it, itself, those after.

    Any mask, of which only that neighbourhood is read. Query i stands at the place of key i, of
    however many keys: one that has none near gets 0.
    """

    def __init__(
        self,
        local_context: int,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(softmax_temp, attention_dropout, event_dispatcher)
        if local_context < 1:
            raise ValueError(f"local_context must be at least 1 key, got {local_context}")
        self.local_context = local_context

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        if q.shape[1] == k.shape[1]:
            return self._band(q, k, v, real.k, (self.local_context + 1) // 2 - 1)
        return super()._bidirectional(q, k, v, real)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        return self._band(q, k, v, real.k, 0)

    def _band(self, q: Tensor, k: Tensor, v: Tensor, real_k: Tensor | None, after: int) -> Tensor:
        before = self.local_context // 2
        partial = banded_attention(q, k, v, before=before, after=after, visible=real_k, **self._weighing())
        return partial.o.to(v.dtype)

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real: Real) -> Tensor:
        """Attend by blocks of c queries, each with the j keys that are near one of them."""
        visible = matrix(visible, q, k)
        (time, keys), before = visible.shape, self.local_context // 2
        after = self.local_context - before - 1
        block = max(SMALLEST, self.local_context)
        width = before + block + after
        seen = functional.pad(real_tokens(real.k, k), (before, -time % block + time + after - keys))
        k, v = (functional.pad(x, (0, 0, 0, 0, before, -time % block + time + after - keys)) for x in (k, v))
        q = functional.pad(q, (0, 0, 0, 0, 0, -time % block)).unflatten(1, (-1, block))
        seen, k, v = (windows(x, 1, width, block) for x in (seen, k, v))
        rows = torch.arange(q.shape[1] * block, device=q.device).unflatten(0, (-1, block, 1))
        columns = rows[:, :1] - before + torch.arange(width, device=q.device)
        near = (rows - columns <= before) & (columns - rows <= after)
        near &= visible[rows.clamp(max=time - 1), columns.clamp(0, keys - 1)]
        partial = softmax_attention(
            q.movedim(3, 1),
            k.movedim(3, 1),
            v.movedim(3, 1),
            visible=near & seen[:, None, :, None],
            **self._weighing(),
        )
        return partial.o.movedim(1, 3).flatten(1, 2)[:, :time].to(v.dtype)


AttentionRegistry.register("local", LocalAttention, [("local_context", Int), *SOFTMAX])

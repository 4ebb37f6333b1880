"""LSH attention."""

import math

from torch import Tensor

from lintra.attention import lsh
from lintra.compat.fast_transformers._inner import SOFTMAX, Real, ScoredInnerAttention, matrix
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry, Bool, Int, Optional
from lintra.compat.fast_transformers.events import EventDispatcher
from lintra.ops.lsh import buckets, lsh_attention


class ReformerAttention(ScoredInnerAttention):
    """LSH attention; any mask. Keys are the queries at length 1; the keys that are passed are not read.

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
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(softmax_temp, attention_dropout, event_dispatcher)
        self.chunk_size, self.bits, self.rounds, self.masked = chunk_size, bits, rounds, masked

    def _lsh(self, q: Tensor, v: Tensor, causal: bool) -> lsh.LshAttention:
        attention = self._mechanism(
            lsh.Config,
            q,
            v,
            causal=causal,
            rounds=self.rounds,
            chunk=self.chunk_size,
            buckets=2 ** max(1, round(math.log2(2 * self.bits))),
            see_self=not self.masked,
            **self._scores() | {"scale": self.softmax_temp or q.shape[3] ** -0.5},
        )
        assert isinstance(attention, lsh.LshAttention)
        return attention

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        if q.shape[:2] != k.shape[:2]:
            raise ValueError(f"reformer is self-attention, got {q.shape[1]} queries and {k.shape[1]} keys")
        return self._lsh(q, v, False)(q, q, v, mask=real.k)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        return self._lsh(q, v, True)(q, q, v, mask=real.k)

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real: Real) -> Tensor:
        attention = self._lsh(q, v, False)
        options = attention.weighing() | {"mask": real.k, "allowed": matrix(visible, q, k)}
        bucket = buckets(q, attention.rotations, attention.levels)[..., 0]
        return lsh_attention(q, v, bucket, attention.pattern, **options)


AttentionRegistry.register(
    "reformer",
    ReformerAttention,
    [
        ("chunk_size", Optional(Int, 32)),
        ("bits", Optional(Int, 63)),
        ("rounds", Optional(Int, 4)),
        ("masked", Optional(Bool, False)),
        *SOFTMAX,
    ],
)

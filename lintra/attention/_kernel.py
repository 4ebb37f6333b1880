"""What the kernel family shares: a sum over the features of the keys is all that is kept of them."""

from typing import ClassVar

from torch import Tensor

from lintra.attention._state import State
from lintra.attention.base import Attention
from lintra.ops.padding import zero_padding
from lintra.ops.rope import RotaryEmbedding


class KernelAttention(Attention):
    """A mechanism whose every form is one sum, which goes on from a state.

    Its file gives `start`, `step`, and `_sum`, that of all tokens at once. The bidirectional form goes on
    from a fresh state; a memory is the state that keys without queries leave, and queries alone read it.
    """

    keeps: ClassVar[tuple[type, tuple[str, ...]]]  # the type of its state, and the letters of each part
    features: int  # f

    def _sum(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        mask: Tensor | None,
        rope: RotaryEmbedding | None,
        **extra: Tensor,
    ) -> tuple[Tensor, State]:
        """y of q [b t h d], and the state after k [b s g d] and v [b s g e].

        Causal, `mask` [b s] is that of queries and keys. Otherwise it is that of the keys alone, padded
        queries are zero already, and t or s may be 0."""
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
        **extra: Tensor,
    ) -> Tensor:
        if self.causal:
            return super().forward(q, k, v, mask=mask, rope=rope, **extra)
        self.check(q, k, v, mask)
        self.check_rope(rope)
        self.check_extra(q, **extra)
        (q,) = zero_padding(mask, q)
        nothing = self.start(q.shape[0], device=q.device, dtype=q.dtype)
        return zero_padding(mask, self._sum(q, k, v, nothing, mask, rope, **extra)[0])[0]

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        *,
        mask: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
        **extra: Tensor,
    ) -> tuple[Tensor, State]:
        self.check(q, k, v, mask)
        self.check_causal()
        self.check_rope(rope)
        self.check_extra(q, **extra)
        self.check_sums(state, *self.keeps, q)
        return self._sum(q, k, v, state, mask, rope, **extra)

    def encode_memory(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> State:
        self.check_cross()
        self.check(None, k, v, mask)
        nobody = k.new_zeros(k.shape[0], 0, self.heads, self.dim)
        nothing = self.start(k.shape[0], device=k.device, dtype=k.dtype)
        return self._sum(nobody, k, v, nothing, mask, None)[1]

    def cross_attend(self, q: Tensor, memory: State, mask: Tensor | None = None) -> Tensor:
        self.check_cross_attend(q, memory, self.keeps[0], mask)
        (q,) = zero_padding(mask, q)
        k, v = self.no_keys(q)
        return zero_padding(mask, self._sum(q, k, v, memory, None, None)[0])[0]

    def sizes(self, batch: int) -> dict[str, int]:
        return super().sizes(batch) | {"f": self.features}

"""Base class of the kernel family, which keeps only a sum over the features of all keys."""

from typing import Any

import torch
from torch import Tensor

from lintra.attention._state import check_dtypes, check_form
from lintra.attention.base import Attention
from lintra.ops.layout import Layout
from lintra.ops.state import State


class KernelAttention(Attention):
    """A mechanism all of whose forms are one sum, which can resume from a state.

    A subclass writes `start`, `_step` and `_sum`, the sum of all tokens at once. The bidirectional form
    begins with an empty state. A memory is the state after keys without queries; queries without keys read
    it.
    """

    features: int  # f

    def _sum(
        self, q: Tensor, k: Tensor, v: Tensor, state: State, layout: Layout, **extra: Any
    ) -> tuple[Tensor, State]:
        """y of q [b t h d], and the state after k [b s g d] and v [b s g e].

        `layout` is that of the keys and, when causal, of the queries; otherwise t or s may be 0."""
        raise NotImplementedError

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **extra: Any) -> Tensor:
        nothing = self.start(layout.n, device=q.device, dtype=q.dtype)
        # When causal, the sum leaves padded queries out as it does the keys.
        q = q if self.causal or not self.reads_padded else layout.zero(q)
        return self._sum(q, k, v, nothing, layout, **extra)[0]

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State, layout: Layout, **extra: Any
    ) -> tuple[Tensor, State]:
        return self._sum(q, k, v, state, layout, **extra)

    def check_memory(self, memory: State, q: Tensor) -> None:
        """Raise as the base class does, and unless the memory has the shapes and dtypes of a state, and q's
        device."""
        super().check_memory(memory, q)
        if not torch.compiler.is_compiling():
            form = self._form(q.dtype)
            check_form(form, memory, memory[0].shape[0], self.grows_apart, "memory")
            check_dtypes(form, memory, q, narrow=False, name="memory")

    def _encode_memory(self, k: Tensor, v: Tensor, layout: Layout) -> State:
        nobody = k.new_zeros(k.shape[0], 0, self.heads, self.dim)
        return self._sum(nobody, k, v, self.start(layout.n, device=k.device, dtype=k.dtype), layout)[1]

    def _cross_attend(self, q: Tensor, memory: State, layout: Layout) -> Tensor:
        return self._sum(q, *self._no_keys(q), memory, Layout(q.shape[0], 0, q.device))[0]

    def _no_keys(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v of no tokens: reading a memory is a sum that adds nothing to it."""
        sizes = q.shape[0], 0, self.kv_heads
        return q.new_zeros(*sizes, self.dim), q.new_zeros(*sizes, self.value_dim)

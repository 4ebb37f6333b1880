"""What the softmax family shares: how scores are scaled, which weights are dropped, a memory of tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lintra.attention._state import State, map_state
from lintra.attention.base import Attention
from lintra.ops import checks
from lintra.ops.layout import Layout


class TokenMemory(NamedTuple):
    """Memory of cross-attention that reads tokens one by one: k [b s g d], v [b s g e], real [b s]."""

    k: Tensor
    v: Tensor
    real: Tensor


class ScoredAttention(Attention):
    """A mechanism whose weights are a softmax of scores, by `scale` and `dropout` of its configuration."""

    memory = TokenMemory

    @property
    def scale(self) -> float:
        """Factor of q . k."""
        return self.dim**-0.5 if self.config.scale is None else self.config.scale

    def weighing(self) -> dict[str, Any]:
        """Return `scale` and `dropout` as the ops of softmax attention take them, now."""
        return {"scale": self.config.scale, "dropout": self.config.dropout if self.training else 0.0}

    def no_tokens(
        self, batch: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """Return k and v of a cache before any token."""
        return (
            torch.empty(batch, 0, self.kv_heads, self.dim, device=device, dtype=dtype),
            torch.empty(batch, 0, self.kv_heads, self.value_dim, device=device, dtype=dtype),
        )

    def check_memory(self, memory: State, q: Tensor) -> None:
        """Raise as for any mechanism, and unless q has the device and dtype of the keys that are kept."""
        super().check_memory(memory, q)
        checks.alike("q", q, "the memory", memory.k)

    def _encode_memory(self, k: Tensor, v: Tensor, layout: Layout) -> State:
        """Copies of k and v, and which of them are real."""
        return map_state(torch.clone, TokenMemory(k, v, layout.real(k)))

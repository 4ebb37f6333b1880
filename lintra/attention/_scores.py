"""Base of the softmax family: the scale of scores, the dropout of weights, a memory of tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lintra.attention.base import Attention
from lintra.ops import checks
from lintra.ops.autocast import widened
from lintra.ops.layout import Layout
from lintra.ops.softmax_attention import PartialAttention, fused_attention, softmax_attention
from lintra.ops.softmax_native import all_keys, runs_natively
from lintra.ops.state import State, map_state


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

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, causal: bool = False, **options: Any
    ) -> Tensor:
        """Return softmax attention [b t h e] to the keys that are `visible` [b t s] or [b 1 s]; 0 where there
        are none. `options` override those of `weighing`."""
        q, k, v = (x.movedim(1, 2) for x in (q, k, v))
        visible = None if visible is None else visible[:, None]
        options = self.weighing() | options
        return fused_attention(q, k, v, visible=visible, causal=causal, **options).movedim(1, 2)

    def attend_all(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Return softmax attention [b t h e] to all keys that are `real` [b s] (None: all), in C++ if it is
        supported there."""
        if runs_natively(q, k, v, self.weighing()["dropout"]):
            return all_keys(q, k, v, visible=real, **self.weighing()).o.to(v.dtype)
        return self.attend(q, k, v, None if real is None else real[:, None])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores [b t h s] of queries and keys, in the dtype of sums: 16 bits may overflow."""
        q, k = widened(q, k)
        return torch.einsum("bthd,bshd->bths", self.scale * q, k.repeat_interleave(self.group, 2))

    def weigh(self, scores: Tensor, visible: Tensor, v: Tensor) -> Tensor:
        """Return the mean of values [b t h e], in the dtype of sums, by the softmax of scores [b t h s] among
        the keys that are `visible`, of which each query sees one at least."""
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        (values,) = widened(v.repeat_interleave(self.group, 2))
        return torch.einsum("bths,bshe->bthe", weights, values)

    def partial_attention(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> PartialAttention:
        """Return attention [b t h e] to some of the keys a query sees, to be merged with attention to the
        others."""
        q = q.unflatten(2, (self.kv_heads, self.group)).movedim(1, 3)
        k, v = (x.movedim(1, 2)[:, :, None] for x in (k, v))
        partial = softmax_attention(q, k, v, visible=visible[:, None, None], **self.weighing())
        return PartialAttention(*(x.movedim(3, 1).flatten(2, 3) for x in partial))

    def check_memory(self, memory: State, q: Tensor) -> None:
        """Raise as the base class does, and unless the kept keys and values have this mechanism's heads and
        widths, and the device and dtype of q."""
        super().check_memory(memory, q)
        sizes = self.sizes()
        checks.shape("memory.k", memory.k, "b s g d", sizes)
        checks.shape("memory.v", memory.v, "b s g e", sizes)
        checks.same_device_and_dtype("q", q, "the memory", memory.k)

    def _encode_memory(self, k: Tensor, v: Tensor, layout: Layout) -> State:
        """Copies of k and v, and which of them are real."""
        return map_state(torch.clone, TokenMemory(k, v, layout.real(k)))

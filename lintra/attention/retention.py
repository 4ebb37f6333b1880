"""Retention: Sun et al. 2023, "Retentive network", arXiv:2307.08621.

The weight of a key is a product without a feature map that fades with its distance, at a fixed rate for each
head (equations 5 to 8):

    kv_t = decay kv_{t-1} + k_t v_t^T / sqrt(d)      y_t = norm(kv_t^T q_t) * silu(gate_t)

The weights have both signs, so there is no denominator: each head is normalised instead. The paper's norm
is GroupNorm, its authors' code divides by the root mean square, which is the default here: it keeps the
mean of a head, and zeros stay zeros. Head i forgets the share 2^(-5-i) of its state at each token.

Each query head has a rate and a state: where query heads share a key-value head, its keys and values fade in
as many states as there are query heads. decay_per="kv_head" has one rate and one state for each key-value
head instead. With more value heads than key heads (`value_heads`), "head" above means a head of y, and
"key-value head" a value head.

Cost of t tokens: 2 t d e multiplications and additions a head to train, 2 d e a token to generate; the state
holds d (e + 1) numbers a head whatever the length.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lintra import ops
from lintra.attention._state import read
from lintra.attention.base import Attention, Capabilities, Exchange
from lintra.config import fields
from lintra.ops import LinearState
from lintra.ops.autocast import widened
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import Impl
from lintra.ops.norms import gated_norm
from lintra.ops.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Config:
    """Retention."""

    # In earlier versions, query heads that shared keys had one rate.
    ABSENT: ClassVar = {"decay_per": "kv_head"}

    fastest: float = 2**-5  # share of its state that the first head forgets at each token
    slowest: float | None = None  # that of the last, geometric in between; None: halved from head to head
    decay_per: Literal["head", "kv_head"] = "head"  # kv_head: the query heads that share keys fade alike
    normalize_heads: bool = True  # divide each head by its root mean square
    centre_heads: bool = False  # subtract the mean of a head first: GroupNorm, as in the paper
    gate: bool = True  # multiply by silu of a projection of the layer's input
    value_heads: int | None = None  # heads of v; None: as many as key heads
    chunk: int = 64  # tokens per block of the parallel form; changes speed, not the result
    impl: Impl = "auto"  # which implementation of the sum

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, value_heads=1, chunk=1)
        if self.centre_heads and not self.normalize_heads:
            raise ValueError("centre_heads needs normalize_heads=True, got True with normalize_heads=False")
        if not 0 < self.fastest < 1:
            raise ValueError(f"fastest must be above 0 and below 1, got {self.fastest}")
        if self.slowest is not None and not 0 < self.slowest <= self.fastest:
            raise ValueError(f"slowest must be above 0 and at most {self.fastest}, got {self.slowest}")

    def build(self, **shape) -> "Retention":
        return Retention(self, **shape)


class Retention(Attention):
    """Retention. State: kv [b n d e], and the faded sum of keys z [b n d] that comes with the sum, where n is
    the number of rates: that of heads or, with decay_per="kv_head", of key-value heads."""

    paper = "Sun et al. 2023, arXiv:2307.08621"
    paper_block: ClassVar = {"norm": "pre", "norm_kind": "layer", "activation": "gelu", "position": "rotary"}
    supports_bf16_state = rotates = True
    can = Capabilities(
        causal=True, bidirectional=False, cross=False, recurrent=True, state="constant", cost="O(t d^2)"
    )

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        if config.centre_heads and self.value_dim < 2:
            raise ValueError("centre_heads needs a value_dim of at least 2, got 1: less its mean it is 0")
        self.rates = self.out_heads if config.decay_per == "head" else self.value_heads
        self.log_decay: Tensor
        self._register_buffers(log_decay=_log_decay(config, self.rates))

    def _apply(self, fn: Any, recurse: bool = True) -> "Retention":
        """Apply `fn`, with the rates computed again in a new dtype, not rounded from the old ones."""
        exact, before = _log_decay(self.config, self.rates), self.log_decay
        own = type(before) is Tensor and not before.is_meta and torch.equal(before, exact.to(before))
        super()._apply(fn, recurse)
        if own and self.log_decay.dtype != before.dtype:
            self.log_decay = exact.to(self.log_decay)
        return self

    def extra_inputs(self) -> dict[str, int]:
        return {"gate": self.out_heads * self.value_dim} if self.config.gate else {}

    def exchange(self) -> Exchange:
        return "scan"

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LinearState:
        sizes = (batch, self.rates, self.dim, self.value_dim)
        return LinearState.empty(*sizes, device=device, dtype=dtype)

    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LinearState,
        layout: Layout,
        *,
        rope: RotaryEmbedding | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, LinearState]:
        dtype, config = v.dtype, self.config
        q, k, v = self._enter(q, k, v, rope)
        log_decay = self.log_decay.to(q.dtype).expand(*q.shape[:2], -1)
        options = {"layout": layout, "normalize": False, "chunk": config.chunk, "impl": config.impl}
        y, state = ops.linear_attention(q, k, v, log_decay=log_decay, state=state, **options)
        return self._finish(y, gate).to(dtype), state

    def _step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LinearState,
        *,
        rope: RotaryEmbedding | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, LinearState]:
        """The recurrence of the module's docstring, written out: the reference of `extend`."""
        dtype = v.dtype
        q, k, v = self._enter(q, k, v, rope)
        k, v = k[:, 0], v[:, 0]
        decay = self.log_decay.to(k.dtype).exp()[:, None]
        kv = decay[..., None] * state.kv + torch.einsum("bnd,bne->bnde", k, v)
        z = decay * state.z + k
        y = read(q, kv)
        return self._finish(y, gate).to(dtype), LinearState(kv, z)

    def _enter(
        self, q: Tensor, k: Tensor, v: Tensor, rope: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v in the dtype of sums, rotated; k, scaled, and v for each rate of their head."""
        q, k, v = widened(q, k, v)
        q, k = (q, k) if rope is None else (rope(q), rope(k))
        q = _repeated(q, self.out_heads)
        return q, _repeated(k * self.dim**-0.5, self.rates), _repeated(v, self.rates)

    def _finish(self, y: Tensor, gate: Tensor | None) -> Tensor:
        return gated_norm(y, gate, norm=self.config.normalize_heads, centre=self.config.centre_heads)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """x [b t n d] with each head repeated, until there are so many."""
    return x[:, :, :, None].expand(-1, -1, -1, heads // x.shape[2], -1).flatten(2, 3)


def _log_decay(config: Config, heads: int) -> Tensor:
    """log(1 - share) of each head, float64. Through log1p: in float32, 1 - 2^-25 is already 1."""
    fastest = math.log(config.fastest)
    last = fastest - (heads - 1) * math.log(2) if config.slowest is None else math.log(config.slowest)
    shares = torch.linspace(fastest, last, heads, dtype=torch.float64, device="cpu").exp()
    return torch.log1p(-shares)

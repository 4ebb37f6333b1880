"""Gated linear attention: Yang et al. 2024, arXiv:2312.06635.

Linear attention whose state forgets, at every token, each feature of the keys at a rate that the token itself
decides (section 4):

    kv_t = diag(decay_t) kv_{t-1} + k_t v_t^T          y_t = norm(kv_t^T q_t / sqrt(d)) * silu(gate_t)
    decay_t = sigmoid(x_t W1 W2 + b)^(1 / temperature)

W1, of the layer, takes its input to `rank` numbers; W2 and b, of the mechanism, take them to a rate for every
feature of every value head. There is no denominator: each head is divided by its root mean square.

Cost of t tokens: 2 t d e multiplications and additions a head to train, 2 d e a token to generate; the state
holds d e numbers whatever the length.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention._state import read
from lintra.attention.base import Attention, Capabilities, Exchange
from lintra.config import fields
from lintra.ops.autocast import widened
from lintra.ops.checks import sum_dtype
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import Impl, LinearState, linear_attention
from lintra.ops.norms import gated_norm
from lintra.ops.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Config:
    """Gated linear attention."""

    rank: int = 16  # width of the projection from which a token's decays are computed
    temperature: float = 16.0  # divides the logarithm of the decays: the larger, the longer the memory
    value_heads: int | None = None  # heads of v, each with its own state; None: as many as key heads
    chunk: int = 64  # tokens per block of the parallel form; does not change the result
    impl: Impl = "auto"  # which implementation of the recurrence

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, rank=1, value_heads=1, chunk=1)
        fields.positive(self, "temperature")

    def build(self, **shape) -> "GatedLinearAttention":
        return GatedLinearAttention(self, **shape)


class GatedState(NamedTuple):
    """State of the gated sum: kv [b o d e], float32 (float64 for float64 inputs)."""

    kv: Tensor


class GatedLinearAttention(Attention):
    """Gated linear attention. State: kv [b o d e]."""

    paper = "Yang et al. 2024, arXiv:2312.06635"
    paper_block: ClassVar = {"norm": "pre", "norm_kind": "rms", "activation": "swiglu", "position": "none"}
    supports_bf16_state = rotates = reads_packed = True
    can = Capabilities(
        causal=True, bidirectional=False, cross=False, recurrent=True, state="constant", cost="O(t d^2)"
    )

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        bound = config.rank**-0.5  # that of a linear layer
        self.weight = nn.Parameter(
            torch.empty(self.value_heads, self.dim, config.rank).uniform_(-bound, bound)
        )
        self.bias = nn.Parameter(torch.empty(self.value_heads, self.dim).uniform_(-bound, bound))
        self.norm = nn.Parameter(torch.ones(self.value_dim))

    def extra_inputs(self) -> dict[str, int]:
        return {"decay": self.config.rank, "gate": self.out_heads * self.value_dim}

    def exchange(self) -> Exchange:
        return "scan"

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> GatedState:
        dtype = sum_dtype(dtype or torch.get_default_dtype())
        shape = (batch, self.value_heads, self.dim, self.value_dim)
        return GatedState(torch.zeros(shape, device=device, dtype=dtype))

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: GatedState, layout: Layout, **extra: Any
    ) -> tuple[Tensor, GatedState]:
        dtype = v.dtype
        q, k, v, log_decay, gate = self._enter(q, k, v, **extra)
        options = {"layout": layout, "chunk": self.config.chunk, "impl": self.config.impl}
        y, after = linear_attention(
            q, k, v, log_decay=log_decay, state=LinearState.of(state.kv), normalize=False, **options
        )
        return gated_norm(y, gate, weight=self.norm).to(dtype), GatedState(after.kv)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: GatedState, **extra: Any
    ) -> tuple[Tensor, GatedState]:
        """The recurrence of the module's docstring, written out: the reference of `extend`."""
        dtype = v.dtype
        q, k, v, log_decay, gate = self._enter(q, k, v, **extra)
        k = k[:, 0].repeat_interleave(self.value_heads // self.kv_heads, 1)
        written = torch.einsum("bod,boe->bode", k, v[:, 0])
        kv = log_decay[:, 0].exp()[..., None] * state.kv + written
        y = read(q, kv)
        return gated_norm(y, gate, weight=self.norm).to(dtype), GatedState(kv)

    def _enter(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        decay: Tensor,
        gate: Tensor,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs in the dtype of sums, rotated and scaled, and the log of the decays [b t o d]."""
        q, k, v, low, gate = widened(q, k, v, decay, gate)
        q, k = (q, k) if rope is None else (rope(q), rope(k))
        rates = torch.einsum("btr,odr->btod", low, self.weight.to(low.dtype)) + self.bias.to(low.dtype)
        return q * self.dim**-0.5, k, v, functional.logsigmoid(rates) / self.config.temperature, gate

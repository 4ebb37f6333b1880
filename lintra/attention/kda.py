"""Kimi Delta Attention (KDA): Kimi Team 2025, "Kimi Linear", arXiv:2510.26692, section 3.

Gated DeltaNet (`delta`) whose state forgets every feature of the keys at a rate of its own, as in gated
linear attention:

    kv_t = diag(a_t) kv_{t-1} + beta_t k_t (v_t - (diag(a_t) kv_{t-1})^T k_t)^T
    y_t  = norm(kv_t^T q_t) * sigmoid(x_t W3 W4 + c)
    beta_t = sigmoid(x_t W)        a_t = exp(-exp(A_log) softplus(x_t W1 W2 + dt_bias))

with k and q of unit length, q then times d^(-1/2), after a short causal convolution over time and SiLU. W1
and W3, of the layer, take its input to `rank` numbers; W2 and W4, of the mechanism, those to all features.
The initial exp(A_log) are drawn from (0, 16], as in Gated DeltaNet; FLA's layer draws them from [1, 16].

Cost of t tokens: 3 t d e multiplications and additions a head forward, besides triangles within chunks,
3 d e a token to generate; the state holds d e numbers and the last inputs of the convolution.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention.delta import DeltaNet
from lintra.config import fields
from lintra.ops.autocast import widened
from lintra.ops.linear_attention import Impl
from lintra.ops.norms import gated_norm


@dataclass(frozen=True, kw_only=True)
class Config:
    """Kimi Delta Attention."""

    decay: ClassVar[bool] = True  # what `delta` may leave out
    rank: int | None = None  # width of the projections for a token's decays and its gate; None: dim
    negative_eigenvalues: bool = False  # beta in [0, 2] instead of [0, 1]
    conv: int | None = 4  # tokens that the convolution sees, its own included; None: no convolution, no SiLU
    gate: bool = True  # multiply by sigmoid of a projection of the layer's input
    value_heads: int | None = None  # heads of v, each with its own state; None: as many as key heads
    chunk: int = 64  # tokens per block of the parallel form in PyTorch; changes speed, not the result
    impl: Impl = "auto"  # which implementation of the recurrence

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, rank=1, conv=1, value_heads=1, chunk=1)

    def build(self, **shape) -> "KimiDeltaAttention":
        return KimiDeltaAttention(self, **shape)


class KimiDeltaAttention(DeltaNet):
    """Kimi Delta Attention. State: kv [b o d e] and the last inputs of the convolution."""

    paper = "Kimi Team 2025, arXiv:2510.26692"

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)  # pyright: ignore (the fields of delta.Config that are read)
        self.rank = config.rank or self.dim
        bound = self.rank**-0.5  # that of a linear layer
        self.decay_weight = nn.Parameter(
            torch.empty(self.value_heads, self.dim, self.rank).uniform_(-bound, bound)
        )
        if config.gate:
            width = self.out_heads * self.value_dim
            self.gate_weight = nn.Parameter(torch.empty(width, self.rank).uniform_(-bound, bound))
            self.gate_bias = nn.Parameter(torch.zeros(width))

    def rates(self) -> tuple[int, ...]:
        return (self.value_heads, self.dim)

    def extra_inputs(self) -> dict[str, int]:
        widths = {"beta": self.value_heads, "decay": self.rank}
        return widths | ({"gate": self.rank} if self.config.gate else {})

    def log_decay(self, step: Tensor | None) -> Tensor | None:
        """Return the logarithms of the decays [b t o d], from [b t rank]."""
        if step is None:
            return None
        (low,) = widened(step)
        rate, bias, weight = (x.to(low.dtype) for x in (self.A_log, self.dt_bias, self.decay_weight))
        rates = torch.einsum("btr,odr->btod", low, weight) + bias
        return rate.exp()[:, None] * functional.logsigmoid(-rates)

    def _finish(self, y: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            gate = gate.to(y.dtype) @ self.gate_weight.to(y.dtype).mT + self.gate_bias.to(y.dtype)
        return gated_norm(y, gate, weight=self.norm, activation=torch.sigmoid)

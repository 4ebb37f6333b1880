"""State space duality (SSD), the layer of Mamba-2: Dao and Gu 2024, arXiv:2405.21060, sections 5 to 7.

Linear attention without a feature map or a denominator, whose state forgets at a rate that each token
decides and takes in the more of a token the faster it forgets:

    kv_t = a_t kv_{t-1} + dt_t k_t v_t^T        y_t = norm((kv_t^T q_t + D v_t) * silu(gate_t))
    dt_t = softplus(x_t W + dt_bias)            a_t = exp(-exp(A_log) dt_t)

In state-space terms, q is C, k is B, v is x and kv is h. Before that q, k and v pass a short causal
convolution over time, each channel by itself, and SiLU. The norm is that of the mean square, over all heads.
The paper's layer has one q and one k for all heads, each with v, dt and A of its own: heads = kv_heads = 1
and `value_heads`. Without these kv_heads = 1 is one k, v, dt and A for all.

Cost of t tokens: 2 t d e multiplications and additions a head to train, 2 d e a token to generate; the state
holds d e numbers and the last inputs of the convolution.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention._convolved import ConvolvedRecurrence, ConvolvedState
from lintra.attention._state import read
from lintra.config import fields
from lintra.ops.autocast import widened
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import Impl, LinearState, linear_attention
from lintra.ops.norms import gated_norm
from lintra.ops.rope import RotaryEmbedding
from lintra.ops.selective_scan.reference import step_sizes


@dataclass(frozen=True, kw_only=True)
class Config:
    """State space duality, the layer of Mamba-2."""

    conv: int | None = 4  # tokens that the convolution sees, its own included; None: no convolution, no SiLU
    skip: bool = True  # add D times a token's own value
    gate: bool = True  # multiply by silu of a projection of the layer's input, before the norm
    value_heads: int | None = None  # heads of v, each with its own state; None: as many as key heads
    chunk: int = 64  # tokens per block of the parallel form in PyTorch; changes speed, not the result
    impl: Impl = "auto"  # which implementation of the recurrence

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, conv=1, value_heads=1, chunk=1)

    def build(self, **shape) -> "StateSpaceDuality":
        return StateSpaceDuality(self, **shape)


class StateSpaceDuality(ConvolvedRecurrence):
    """The layer of Mamba-2. State: kv [b o d e] and the last inputs of the convolution."""

    paper = "Dao and Gu 2024, arXiv:2405.21060"
    paper_block: ClassVar = {"norm": "pre", "norm_kind": "rms", "mlp_ratio": 0.0, "position": "none"}
    no_weight_decay = ("A_log", "dt_bias", "D")
    D: nn.Parameter
    conv_bias = True
    slowest = 1.0

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        self.register_parameter("D", nn.Parameter(torch.ones(self.out_heads)) if config.skip else None)
        self.norm = nn.Parameter(torch.ones(self.out_heads * self.value_dim))

    def extra_inputs(self) -> dict[str, int]:
        widths = {"dt": self.value_heads}
        return widths | ({"gate": self.out_heads * self.value_dim} if self.config.gate else {})

    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ConvolvedState,
        layout: Layout,
        *,
        dt: Tensor,
        gate: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, ConvolvedState]:
        dtype = v.dtype
        (q, k, v), last = self.convolve(q, k, v, state, layout)
        q, k = (q, k) if rope is None else (rope(q), rope(k))
        before = LinearState.of(state.kv)
        options = {"layout": layout, "normalize": False, "chunk": self.config.chunk, "impl": self.config.impl}
        written = self._step_size(dt)[..., None] * v
        y, after = linear_attention(q, k, written, log_decay=self.log_decay(dt), state=before, **options)
        return self._finish(y, v, gate).to(dtype), ConvolvedState(after.kv, *last)

    def _step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ConvolvedState,
        *,
        dt: Tensor,
        gate: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, ConvolvedState]:
        """The recurrence of the module's docstring, written out: the reference of `extend`."""
        dtype = v.dtype
        (q, k, v), last = self.convolve(q, k, v, state, None)
        q, k = (q, k) if rope is None else (rope(q), rope(k))
        step = self._step_size(dt)[:, 0, :, None, None]
        decay = (-self.A_log.to(step.dtype).exp()[:, None, None] * step).exp()
        k = k[:, 0].repeat_interleave(self.value_heads // self.kv_heads, 1)
        kv = decay * state.kv + step * torch.einsum("bod,boe->bode", k, v[:, 0])
        y = read(q, kv)
        return self._finish(y, v, gate).to(dtype), ConvolvedState(kv, *last)

    def _step_size(self, dt: Tensor) -> Tensor:
        (dt,) = widened(dt)
        return step_sizes(dt, self.dt_bias.to(dt.dtype), dt_softplus=True)

    def _finish(self, y: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
        """The skip, the gate, and the norm over all heads."""
        if self.config.skip:
            y = y + self.D.to(y.dtype)[:, None] * v.repeat_interleave(self.out_heads // self.value_heads, 2)
        flat = y.flatten(2)
        flat = flat if gate is None else flat * functional.silu(gate.to(y.dtype))
        return gated_norm(flat, None, weight=self.norm).view(y.shape)

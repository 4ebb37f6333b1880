"""Gated DeltaNet: Yang et al. 2024, "Gated delta networks", arXiv:2412.06464; without decay DeltaNet,
Schlag et al. 2021, arXiv:2102.11174, as in Yang et al. 2024, arXiv:2406.06484.

Linear attention adds every value to what its key already holds; here a token first reads what is there, and
writes the share beta of what is missing:

    kv_t = a_t kv_{t-1} + beta_t k_t (v_t - a_t kv_{t-1}^T k_t)^T      y_t = norm(kv_t^T q_t) * silu(gate_t)
    beta_t = sigmoid(x_t W)        a_t = exp(-exp(A_log) softplus(x_t W' + dt_bias))

with k and q of unit length, q then times d^(-1/2). Before that q, k and v pass a short causal convolution
over time, each channel by itself, and SiLU. With `negative_eigenvalues` beta is doubled, so that a key may
also be reflected: Grazzi et al. 2024, arXiv:2411.12537.

Cost of t tokens: 3 t d e multiplications and additions a head forward, besides triangles within chunks,
3 d e a token to generate; the state holds d e numbers and the last inputs of the convolution.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lintra.attention._convolved import ConvolvedRecurrence, ConvolvedState
from lintra.attention._state import read
from lintra.config import fields
from lintra.ops.autocast import widened
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import Impl, LinearState, linear_attention
from lintra.ops.norms import gated_norm, l2_norm
from lintra.ops.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Config:
    """Gated DeltaNet."""

    decay: bool = True  # the state fades at a rate each token decides; False: DeltaNet
    negative_eigenvalues: bool = False  # beta in [0, 2] instead of [0, 1]
    conv: int | None = 4  # tokens that the convolution sees, its own included; None: no convolution, no SiLU
    gate: bool = True  # multiply by silu of a projection of the layer's input
    value_heads: int | None = None  # heads of v, each with its own state; None: as many as key heads
    chunk: int = 64  # tokens per block of the parallel form; changes speed, not the result
    impl: Impl = "auto"  # which implementation of the recurrence

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, conv=1, value_heads=1, chunk=1)

    def build(self, **shape) -> "DeltaNet":
        return DeltaNet(self, **shape)


class DeltaNet(ConvolvedRecurrence):
    """Gated DeltaNet. State: kv [b o d e] and the last inputs of the convolution."""

    paper = "Yang et al. 2024, arXiv:2412.06464"
    paper_block: ClassVar = {"norm": "pre", "norm_kind": "rms", "activation": "swiglu", "position": "none"}
    matrix_transition = True

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        self.norm = nn.Parameter(torch.ones(self.value_dim))

    def rates(self) -> tuple[int, ...] | None:
        return (self.value_heads,) if self.config.decay else None

    def extra_inputs(self) -> dict[str, int]:
        config = self.config
        widths = {"beta": self.value_heads}
        if config.decay:
            widths["decay"] = self.value_heads
        if config.gate:
            widths["gate"] = self.out_heads * self.value_dim
        return widths

    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ConvolvedState,
        layout: Layout,
        *,
        beta: Tensor,
        decay: Tensor | None = None,
        gate: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, ConvolvedState]:
        dtype = v.dtype
        (q, k, v), last = self.convolve(q, k, v, state, layout)
        q, k = self._unit(q, rope) * self.dim**-0.5, self._unit(k, rope)
        given = {"log_decay": self.log_decay(decay), "beta": self._beta(beta)}
        options = {"layout": layout, "normalize": False, "chunk": self.config.chunk, "impl": self.config.impl}
        y, after = linear_attention(q, k, v, **given, state=LinearState.of(state.kv), **options)
        return self._finish(y, gate).to(dtype), ConvolvedState(after.kv, *last)

    def _step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ConvolvedState,
        *,
        beta: Tensor,
        decay: Tensor | None = None,
        gate: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, ConvolvedState]:
        """The recurrence of the module's docstring, written out: the reference of `extend`."""
        dtype = v.dtype
        (q, k, v), last = self.convolve(q, k, v, state, None)
        q, k = self._unit(q, rope) * self.dim**-0.5, self._unit(k, rope)[:, 0]
        log_decay = self.log_decay(decay)
        k, kv = k.repeat_interleave(self.value_heads // self.kv_heads, 1), state.kv
        if log_decay is not None:
            kept = log_decay[:, 0].exp()  # [b o] or [b o d]
            kv = kept.reshape(*kept.shape[:2], -1, 1) * kv
        missing = v[:, 0] - torch.einsum("bode,bod->boe", kv, k)
        kv = kv + torch.einsum("bo,bod,boe->bode", self._beta(beta)[:, 0], k, missing)
        y = read(q, kv)
        return self._finish(y, gate).to(dtype), ConvolvedState(kv, *last)

    def _finish(self, y: Tensor, gate: Tensor | None) -> Tensor:
        return gated_norm(y, gate, weight=self.norm)

    def _unit(self, x: Tensor, rope: RotaryEmbedding | None) -> Tensor:
        """x of unit length, rotated."""
        return l2_norm(x) if rope is None else rope(l2_norm(x))

    def _beta(self, beta: Tensor) -> Tensor:
        (beta,) = widened(beta)
        return beta.sigmoid() * (2 if self.config.negative_eigenvalues else 1)

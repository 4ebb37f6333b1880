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
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention._short_conv import conv_weight, convolve_heads
from lintra.attention.base import Attention, Capabilities
from lintra.config import fields
from lintra.ops import checks
from lintra.ops.autocast import widened
from lintra.ops.gated_norm import gated_norm
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import LinearState, RecurrenceImpl, linear_attention
from lintra.ops.rope import RotaryEmbedding

EPS = 1e-6  # added to the square of a length: a key of zeros stays 0


@dataclass(frozen=True, kw_only=True)
class Config:
    """Gated DeltaNet."""

    decay: bool = True  # the state fades at a rate each token decides; False: DeltaNet
    negative_eigenvalues: bool = False  # beta in [0, 2] instead of [0, 1]
    conv: int | None = 4  # tokens the convolution before sees, its own included; None: none, and no SiLU
    gate: bool = True  # multiply by silu of a projection of the layer's input
    chunk: int = 64  # tokens per block of the parallel form; changes speed, not the result
    impl: RecurrenceImpl = "auto"  # which implementation of the recurrence

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, conv=1, chunk=1)

    def build(self, **shape) -> "DeltaNet":
        return DeltaNet(self, **shape)


class DeltaState(NamedTuple):
    """kv [b g d e]; the last s = conv - 1 inputs of the convolution, q [b s h d], k [b s g d], v [b s g e].

    All in float32 (float64 for float64 inputs)."""

    kv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class DeltaNet(Attention):
    """Gated DeltaNet. State: kv [b g d e] and the last inputs of the convolution."""

    paper = "Yang et al. 2024, arXiv:2412.06464"
    supports_bf16_state = rotates = reads_packed = True
    no_weight_decay = ("A_log", "dt_bias")
    can = Capabilities(
        causal=True, bidirectional=False, cross=False, recurrent=True, state="constant", cost="O(t d^2)"
    )

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        h, g, d, e = self.heads, self.kv_heads, self.dim, self.value_dim
        if config.conv is not None:
            channels = ((h, d), (g, d), (g, e))
            self.conv_q, self.conv_k, self.conv_v = (conv_weight(*each, config.conv) for each in channels)
        if (rates := self._rates()) is not None:
            # A rate in (0, 16], and a step between 1e-3 and 1e-1 that dt_bias gives through softplus.
            self.A_log = nn.Parameter((16 * (1 - torch.rand(g))).log())
            step = 10 ** torch.empty(rates).uniform_(-3, -1)
            self.dt_bias = nn.Parameter(step + (-torch.expm1(-step)).log())
        self.norm = nn.Parameter(torch.ones(e))

    def _rates(self) -> tuple[int, ...] | None:
        """The shape of a token's decays; None: nothing decays."""
        return (self.kv_heads,) if self.config.decay else None

    def extra_inputs(self) -> dict[str, int]:
        config = self.config
        widths = {"beta": self.kv_heads}
        if config.decay:
            widths["decay"] = self.kv_heads
        if config.gate:
            widths["gate"] = self.heads * self.value_dim
        return widths

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> DeltaState:
        dtype = checks.sum_dtype(dtype or torch.get_default_dtype())
        h, g, d, e = self.heads, self.kv_heads, self.dim, self.value_dim
        last = (self.config.conv or 1) - 1
        shapes = ((g, d, e), (last, h, d), (last, g, d), (last, g, e))
        return DeltaState(*(torch.zeros(batch, *shape, device=device, dtype=dtype) for shape in shapes))

    def _extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: DeltaState,
        layout: Layout,
        *,
        beta: Tensor,
        decay: Tensor | None = None,
        gate: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, DeltaState]:
        dtype = v.dtype
        (q, k, v), last = self._convolve(q, k, v, state, layout)
        q, k = self._unit(q, rope) * self.dim**-0.5, self._unit(k, rope)
        given = {"log_decay": self._log_decay(decay), "beta": self._beta(beta)}
        options = {"layout": layout, "normalize": False, "chunk": self.config.chunk, "impl": self.config.impl}
        y, after = linear_attention(q, k, v, **given, state=LinearState.of(state.kv), **options)
        return self._finish(y, gate).to(dtype), DeltaState(after.kv, *last)

    def _step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: DeltaState,
        *,
        beta: Tensor,
        decay: Tensor | None = None,
        gate: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, DeltaState]:
        """The recurrence of the module's docstring, written out: the reference of `extend`."""
        dtype = v.dtype
        (q, k, v), last = self._convolve(q, k, v, state, None)
        q, k = self._unit(q, rope) * self.dim**-0.5, self._unit(k, rope)[:, 0]
        log_decay = self._log_decay(decay)
        kv = state.kv
        if log_decay is not None:
            kept = log_decay[:, 0].exp()  # [b g] or [b g d]
            kv = kept.reshape(*kept.shape[:2], -1, 1) * kv
        missing = v[:, 0] - torch.einsum("bgde,bgd->bge", kv, k)
        kv = kv + torch.einsum("bg,bgd,bge->bgde", self._beta(beta)[:, 0], k, missing)
        y = torch.einsum("bthd,bhde->bthe", q, kv.repeat_interleave(self.group, 1))
        return self._finish(y, gate).to(dtype), DeltaState(kv, *last)

    def _finish(self, y: Tensor, gate: Tensor | None) -> Tensor:
        return gated_norm(y, gate, weight=self.norm)

    def _convolve(
        self, q: Tensor, k: Tensor, v: Tensor, state: DeltaState, layout: Layout | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """q, k, v after the convolution and SiLU, and its last inputs, in the dtype of sums."""
        q, k, v = widened(q, k, v)
        if self.config.conv is None:
            return (q, k, v), state[1:]
        weights = (self.conv_q, self.conv_k, self.conv_v)
        impl = self.config.impl if layout is not None else "reference"
        each = zip((q, k, v), weights, state[1:], strict=True)
        found, last = zip(*(convolve_heads(*given, layout, impl) for given in each), strict=True)
        return found, last

    def _unit(self, x: Tensor, rope: RotaryEmbedding | None) -> Tensor:
        """x of unit length, rotated."""
        x = x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
        return x if rope is None else rope(x)

    def _beta(self, beta: Tensor) -> Tensor:
        (beta,) = widened(beta)
        return beta.sigmoid() * (2 if self.config.negative_eigenvalues else 1)

    def _log_decay(self, decay: Tensor | None) -> Tensor | None:
        if decay is None:
            return None
        (decay,) = widened(decay)
        rate, bias = (x.to(decay.dtype) for x in (self.A_log, self.dt_bias))
        # logsigmoid(-x) is -softplus(x), of whose gradient torch.compile expects other strides than it has.
        return rate.exp() * functional.logsigmoid(-(decay + bias))

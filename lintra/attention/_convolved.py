"""The base of recurrences with a short convolution before them and decays that tokens decide.

    q, k, v = silu(conv(q)), silu(conv(k)), silu(conv(v))
    a_t = exp(-exp(A_log) softplus(x_t W + dt_bias))

Every channel is convolved with itself over the last few tokens (`lintra.ops.causal_conv1d`). The decays are
those of Mamba: Gu and Dao 2023, arXiv:2312.00752, section 3.6.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention.base import Attention, Capabilities, Exchange
from lintra.ops import checks
from lintra.ops.autocast import widened
from lintra.ops.conv1d import causal_conv1d, conv_impl, conv_weight
from lintra.ops.layout import Layout


class ConvolvedState(NamedTuple):
    """kv [b o d e]; the last s = conv - 1 inputs of the convolution, q [b s h d], k [b s g d], v [b s o e].

    o value heads, g unless there are more. All in float32 (float64 for float64 inputs)."""

    kv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class ConvolvedRecurrence(Attention):
    """A recurrence after a convolution, with fields `conv` and `impl` in its configuration.

    State: kv [b o d e] and the last inputs of the convolution."""

    A_log: nn.Parameter
    dt_bias: nn.Parameter
    conv_bias: ClassVar[bool] = False
    slowest: ClassVar[float] = 0.0  # slowest initial rate exp(A_log) of the heads; the fastest is 16
    supports_bf16_state = rotates = reads_packed = True
    no_weight_decay = ("A_log", "dt_bias")
    can = Capabilities(
        causal=True, bidirectional=False, cross=False, recurrent=True, state="constant", cost="O(t d^2)"
    )

    def __init__(self, config: Any, **shape):
        super().__init__(config, **shape)
        h, g, o, d, e = self.heads, self.kv_heads, self.value_heads, self.dim, self.value_dim
        if config.conv is not None:
            channels = ((h, d), (g, d), (o, e))
            self.conv_q, self.conv_k, self.conv_v = (conv_weight(*each, config.conv) for each in channels)
            if self.conv_bias:
                self.bias_q, self.bias_k, self.bias_v = (nn.Parameter(torch.zeros(each)) for each in channels)
        if (rates := self.rates()) is None:
            self.register_parameter("A_log", None)
            self.register_parameter("dt_bias", None)
        else:
            # dt_bias gives, through softplus, a step between 1e-3 and 1e-1.
            self.A_log = nn.Parameter((16 - (16 - self.slowest) * torch.rand(o)).log())
            step = 10 ** torch.empty(rates).uniform_(-3, -1)
            self.dt_bias = nn.Parameter(step + (-torch.expm1(-step)).log())

    def rates(self) -> tuple[int, ...] | None:
        """Return the shape of a token's decays; None: nothing decays."""
        return (self.value_heads,)

    def exchange(self) -> Exchange:
        return "scan"

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ConvolvedState:
        dtype = checks.sum_dtype(dtype or torch.get_default_dtype())
        h, g, o, d, e = self.heads, self.kv_heads, self.value_heads, self.dim, self.value_dim
        last = (self.config.conv or 1) - 1
        shapes = ((o, d, e), (last, h, d), (last, g, d), (last, o, e))
        return ConvolvedState(*(torch.zeros(batch, *shape, device=device, dtype=dtype) for shape in shapes))

    def convolve(
        self, q: Tensor, k: Tensor, v: Tensor, state: ConvolvedState, layout: Layout | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return q, k and v after the convolution and SiLU, in the dtype of sums, and its last inputs.

        layout: None for one token, by the definition."""
        inputs = widened(q, k, v)
        if self.config.conv is None:
            return inputs, state[1:]
        impl = conv_impl(self.config.impl)
        if layout is None:
            layout, impl = Layout(q.shape[0], 1, q.device), "reference"
        if layout.shard is not None:
            state, layout = self._inputs_before(inputs, state, layout), layout.after(layout.seen)
        found = []
        for name, x, before in zip("qkv", inputs, state[1:], strict=True):
            weight, bias = getattr(self, f"conv_{name}"), getattr(self, f"bias_{name}", None)
            y, last = causal_conv1d(
                x.flatten(2),
                weight.flatten(0, 1),
                None if bias is None else bias.flatten(),
                activation="silu",
                state=before.flatten(2),
                layout=layout,
                impl=impl,
            )
            found.append((y.unflatten(2, x.shape[2:]), last.unflatten(2, x.shape[2:])))
        values, last = zip(*found, strict=True)
        return values, last

    def _inputs_before(
        self, inputs: tuple[Tensor, ...], state: ConvolvedState, layout: Layout
    ) -> ConvolvedState:
        """The state with the last inputs of the convolution on earlier ranks, in one exchange."""
        assert layout.shard is not None
        flat = torch.cat([x.flatten(2) for x in inputs], -1)
        (before,), _ = layout.shard.window([flat], state.q.shape[1], layout)
        parts = before.split([x[0, 0].numel() for x in inputs], -1)
        last = (x.unflatten(2, y.shape[2:]) for x, y in zip(parts, inputs, strict=True))
        return ConvolvedState(state.kv, *last)

    def log_decay(self, step: Tensor | None) -> Tensor | None:
        """Return the logarithms of the decays [b t o], from the layer's projection for them."""
        if step is None:
            return None
        (step,) = widened(step)
        rate, bias = (x.to(step.dtype) for x in (self.A_log, self.dt_bias))
        # logsigmoid(-x) is -softplus(x); torch.compile expects other strides of the latter's gradient.
        return rate.exp() * functional.logsigmoid(-(step + bias))

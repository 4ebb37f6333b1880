"""Random feature attention: Peng et al. 2021, arXiv:2103.02143, sections 3.1 and 3.2.

Queries and keys are brought to length 1 and projected by random rows w = sigma * w~ / tau, w~ being standard
normal and sigma learned. Linear attention over features of the projections estimates that of a kernel:

    trig     sin(w . x), cos(w . x)   exp(-|sigma * (q - k)|^2 / 2 tau^2), which is softmax of the cosine
                                      of q and k times (sigma / tau)^2 where sigma is one number
    arccos   max(w . x, 0)            (sin a + (pi - a) cos a) / 2 pi, a being the angle between q and k

With `gate` the past is forgotten by a factor g_t that the layer's input decides:

    kv_t = g_t kv_{t-1} + (1 - g_t) phi(k_t) v_t^T      z_t likewise, with 1 for v_t
    n_t  = g_t n_{t-1} + (1 - g_t)
    y_t  = phi(q_t)^T kv_t / max(phi(q_t) . z_t, den_eps n_t |phi|^2)

Without it the factors g_t and 1 - g_t are 1. Weights of trig have both signs, and their sum may come near 0
by chance. With the bound, |y| is at most max |v| / den_eps, since no weight exceeds |phi|^2. A weight that m
rows estimate has a standard error of up to (2 m)^(-1/2) |phi|^2. That part of n is the default bound: a
denominator below it is noise.

Cost of t tokens with f features: 2 t f d for the features (t f d where a row makes two of them) and 2 t f e
for the sum, in multiplications and additions a head; 2 f e a token to generate. The state holds f (e + 1) + 1
numbers whatever the length.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra import ops
from lintra.attention._kernel import KernelAttention
from lintra.attention._state import read
from lintra.attention.base import Capabilities, Exchange
from lintra.config import fields
from lintra.ops import LinearState
from lintra.ops.checks import sum_dtype
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import Impl, divide
from lintra.ops.norms import unit
from lintra.ops.random_features import arc_cosine, independent_gaussian, orthogonal_gaussian, trigonometric
from lintra.ops.rope import RotaryEmbedding

FEATURES = {"trig": trigonometric, "arccos": arc_cosine}
STEEPEST = 60.0  # gates stay within sigmoid(+-60): the logarithm of one that is exactly 0 is no number


@dataclass(frozen=True, kw_only=True)
class Config:
    """Random feature attention."""

    features: int = 64  # rows w of the projection of a head; trig makes two features of each
    kernel: Literal["trig", "arccos"] = "trig"  # trig: weights of both signs; arccos: not negative
    gate: bool = False  # forget the past by a gate of the layer's input; causal only
    gate_bias: float = 0.0  # the gate's bias before training; 0: half is forgotten, 3: 5 %
    tau: float = 1.0  # temperature: projections are divided by it; no unit
    learn_sigma: bool = True  # learn a scale for every entry of w; else 1
    orthogonal: bool = False  # directions of rows orthogonal in blocks of d; else independent
    den_eps: float | None = None  # smallest denominator of trig, as part of the sum of the keys' weights; no
    # unit; None: (2 features) ** -0.5, the standard error of one weight
    redraw_every: int | None = 1  # training steps with one set of rows, by lintra.train or
    # `attention.redraw`; None: the first one stays
    seed: int = 0  # of the first set
    chunk: int = 64  # tokens per block of the parallel form; changes speed, not the result
    impl: Impl = "auto"  # which implementation of the sum

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, features=1, redraw_every=1, chunk=1)
        fields.finite(self, "gate_bias")
        fields.positive(self, "tau", "den_eps")
        fields.together(self, "gate_bias", gate=True)
        fields.together(self, "den_eps", kernel="trig")

    def build(self, **shape) -> "RandomFeatureAttention":
        return RandomFeatureAttention(self, **shape)


class RfaState(NamedTuple):
    """kv [b g f e+1], its last column z; n [b g], the sum of the keys' weights. Cross-attention keeps that
    too."""

    kv: Tensor
    n: Tensor


class Gate(NamedTuple):
    """ln g and ln (1 - g) [b t g]; None both: no gate."""

    keep: Tensor | None
    write: Tensor | None


class RandomFeatureAttention(KernelAttention):
    """Random feature attention. State: kv [b g f e+1] and n [b g]."""

    paper = "Peng et al. 2021, arXiv:2103.02143"
    memory = RfaState
    rotates = True
    can = Capabilities(
        causal=True, bidirectional=True, cross=True, recurrent=True, state="constant", cost="O(t d f)"
    )
    rows: Tensor

    def __init__(self, config: Config, **shape):
        if config.gate:
            self.can = replace(self.can, bidirectional=False, cross=False)
        super().__init__(config, **shape)
        self.features = 2 * config.features if config.kernel == "trig" else config.features
        self.den_eps = (2 * config.features) ** -0.5 if config.den_eps is None else config.den_eps
        sampled = self._draw(torch.Generator(device="cpu").manual_seed(config.seed))
        self._register_buffers(rows=sampled)
        self.sigma = nn.Parameter(torch.ones(self.kv_heads, self.dim)) if config.learn_sigma else None
        self.gate_bias = (
            nn.Parameter(torch.full((self.kv_heads,), float(config.gate_bias))) if config.gate else None
        )

    def extra_inputs(self) -> dict[str, int]:
        return {"gate": self.kv_heads} if self.config.gate else {}

    def redraw(self, generator: torch.Generator) -> None:
        self.rows.copy_(self._draw(generator))

    def exchange(self) -> Exchange:
        return "scan"

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> RfaState:
        dtype = sum_dtype(dtype or torch.get_default_dtype())
        shape = (batch, self.kv_heads)
        return RfaState(
            torch.zeros(*shape, self.features, self.value_dim + 1, device=device, dtype=dtype),
            torch.zeros(shape, device=device, dtype=dtype),
        )

    def _step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: RfaState,
        *,
        rope: RotaryEmbedding | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, RfaState]:
        """The recurrence of the module's docstring, written out: the reference of `extend`."""
        alone = Layout(q.shape[0], 1, q.device)
        keep, write = (
            torch.ones_like(state.n) if x is None else x[:, 0].exp() for x in self._gate(gate, alone)
        )
        values = torch.cat((v, torch.ones_like(v[..., :1])), -1).to(state.n.dtype)
        q, k = self._features(q, rope), self._features(k, rope)
        new = torch.einsum("btgf,btge->bgfe", k, values)
        kv = keep[..., None, None] * state.kv + write[..., None, None] * new
        n = keep * state.n + write
        y = read(q, kv)
        return self._ratio(y, n[:, None]).to(v.dtype), RfaState(kv, n)

    def _sum(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: RfaState,
        layout: Layout,
        *,
        rope: RotaryEmbedding | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, RfaState]:
        config = self.config
        keep, write = self._gate(gate, layout)
        # The denominator is the same sum with the value 1: a column more costs next to nothing.
        values = torch.cat((v, torch.ones_like(v[..., :1])), -1).to(state.kv.dtype)
        y, (kv, _) = ops.linear_attention(
            self._features(q, rope),
            self._features(k, rope),
            values,
            log_decay=keep,
            log_input=write,
            state=LinearState.of(state.kv),
            layout=layout,
            causal=self.causal,
            normalize=False,
            chunk=config.chunk,
            impl=config.impl,
        )
        n = self._weights(self._weight_before(state.n, keep, layout), k, layout.mask, keep)
        y = self._ratio(y, n[:, 1:] if self.causal else n[:, -1:])
        return y.to(v.dtype), RfaState(kv, n[:, -1].clone())

    def _features(self, x: Tensor, rope: RotaryEmbedding | None) -> Tensor:
        """[b t h d] -> [b t h f], in the dtype of the sums; those of trig have the length features^(1/2)."""
        x = x.to(sum_dtype(x.dtype))
        x = x if rope is None else rope(x)
        x = unit(x)
        weight = self.rows.to(x.dtype) / self.config.tau
        if self.sigma is not None:
            weight = weight * self.sigma.to(x.dtype)[:, None]
        return FEATURES[self.config.kernel](x, weight)

    def _gate(self, gate: Tensor | None, layout: Layout) -> Gate:
        if self.gate_bias is None or gate is None:
            return Gate(None, None)
        dtype = sum_dtype(gate.dtype)
        gate = (gate.to(dtype) + self.gate_bias.to(dtype)).clamp(-STEEPEST, STEEPEST)
        # NaN in one sample passes on through the key's weight alone: a decay has to be a number.
        keep = functional.logsigmoid(gate).nan_to_num(0.0)
        return Gate(*(layout.zero(x) for x in (keep, functional.logsigmoid(-gate))))

    def _weight_before(self, n: Tensor, keep: Tensor | None, layout: Layout) -> Tensor:
        """n of the state, or of the shards on earlier ranks."""
        if layout.shard is None:
            return n
        if keep is None:
            return n if layout.seen is None else n + layout.seen[:, None]
        total = keep.sum(1)
        like = n[..., None, None]

        def own(transition: bool) -> tuple[Tensor, Tensor | None]:
            return -total.expm1()[..., None, None], total.exp() if transition else None

        return layout.shard.state(like, tuple(n.shape), own)[..., 0, 0]

    def _weights(self, before: Tensor, k: Tensor, mask: Tensor | None, keep: Tensor | None) -> Tensor:
        """n [b t+1 g] before the first token of k and after each."""
        if keep is None:
            real = k.new_ones(k.shape[:2], dtype=before.dtype) if mask is None else mask.to(before.dtype)
            new = real[..., None].expand(-1, -1, self.kv_heads)
            return before[:, None] + torch.cat((torch.zeros_like(before[:, None]), new.cumsum(1)), 1)
        # What is forgotten is replaced: g n + (1 - g) - 1 = g (n - 1).
        kept = torch.cat((torch.zeros_like(before[:, None]), keep.cumsum(1)), 1)
        return before[:, None] * kept.exp() - kept.expm1()

    def _ratio(self, y: Tensor, n: Tensor) -> Tensor:
        """y [b t h e+1] with the denominator as its last column, n [b t g] -> [b t h e]."""
        y, weight = y[..., :-1], y[..., -1]
        if self.config.kernel == "trig":
            bound = self.den_eps * self.config.features * n
            bound = bound.repeat_interleave(self.group, 2)
            weight = torch.where(weight > bound, weight, bound)
        return divide(y, weight)

    def _draw(self, generator: torch.Generator) -> Tensor:
        draw = orthogonal_gaussian if self.config.orthogonal else independent_gaussian
        size = (self.config.features, self.dim, "chi")
        return torch.stack([draw(*size, generator) for _ in range(self.kv_heads)])

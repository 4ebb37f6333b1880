"""Performer (FAVOR+): Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv:2009.14794.

The exponential of softmax is the mean of products of positive random features (lemma 1), so that linear
attention over them estimates softmax attention, with an error that falls as features^-1/2:

    exp(q . k / sqrt(d)) = E_w[exp(w . x - |x|^2 / 2) exp(w . y - |y|^2 / 2)],  x, y = d^-1/4 q, d^-1/4 k

Exponents are kept at or below 0. The constant subtracted from a query's cancels in its ratio; the constant of
the keys is, when causal, their running maximum, which is a decay of the sum (e is the exponent of a key):

    c_t  = max(c_{t-1}, max_r e_{t,r})
    kv_t = exp(c_{t-1} - c_t) kv_{t-1} + exp(e_t - c_t) v_t^T        z_t likewise, with 1 for v_t

Cost of t tokens with f features: 2 t f d for the features (t f d of `hyperbolic`) and 2 t f e for the sum, in
multiplications and additions a head; 2 f e a token to generate. The state holds f (e + 1) + 1 numbers
whatever the length.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lintra import ops
from lintra.attention._kernel import KernelAttention
from lintra.attention._state import read
from lintra.attention.base import Capabilities, Exchange
from lintra.config import fields
from lintra.ops import LinearState
from lintra.ops.checks import sum_dtype
from lintra.ops.dispatch import eager
from lintra.ops.features import FeatureMapName, apply_feature_map, elu_plus_one, squared_relu
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import Impl, divide
from lintra.ops.random_features import (
    Norms,
    independent_gaussian,
    orthogonal_gaussian,
    project,
    softmax_offset,
    softmax_projection,
)
from lintra.ops.rope import RotaryEmbedding
from lintra.ops.running import running_max

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "squared_relu": squared_relu,
    "elu+1": elu_plus_one,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Performer."""

    features: int | None = None  # rows w of the projection; None: d ln d, rounded down
    kernel: Literal["positive", "hyperbolic", "generalized"] = "positive"  # w | w and -w | activation of w.x
    activation: Literal["relu", "squared_relu", "elu+1"] = "relu"  # of the generalized kernel
    kernel_eps: float = 1e-3  # added to the features of the generalized kernel; no unit
    kernel_eps_scaled: bool = False  # kernel_eps times rows ** -0.5, as the activations: the paper's form
    orthogonal: bool = True  # directions orthogonal in blocks of d rows; else independent
    row_norms: Norms = "chi"  # lengths of the rows: as of normal vectors (unbiased), or all sqrt(d)
    per_head: bool = False  # a projection for each key-value head; else one for all
    redraw_every: int | None = 1000  # training steps with one projection, by lintra.train or
    # `attention.redraw`; None: the first one stays
    eps: float = 1e-32  # added to the denominator; no unit
    seed: int = 0  # of the first projection
    chunk: int = 64  # tokens per block of the parallel form; changes speed, not the result
    impl: Impl = "auto"  # which implementation of the sum

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, features=1, redraw_every=1, chunk=1)
        fields.not_negative(self, "kernel_eps", "eps")
        fields.together(self, "activation", "kernel_eps", "kernel_eps_scaled", kernel="generalized")

    def build(self, **shape) -> "Performer":
        return Performer(self, **shape)


class PerformerState(NamedTuple):
    """kv [b g f e] and z [b g f], both divided by exp(c); c [b g], the largest exponent of a key so far, -inf
    before any and with the generalized kernel. What cross-attention keeps has the same form."""

    kv: Tensor
    z: Tensor
    c: Tensor


class Keys(NamedTuple):
    """Keys for `_map` [b s g f], the decay of what came before each [b s g], c after the last [b g]."""

    unmapped: Tensor
    log_decay: Tensor | None
    c: Tensor


class Performer(KernelAttention):
    """Performer. State: kv [b g f e], z [b g f] and c [b g]."""

    paper = "Choromanski et al. 2021, arXiv:2009.14794"
    memory = PerformerState
    rotates = True
    supports_bf16_state = True
    can = Capabilities(
        causal=True, bidirectional=True, cross=True, recurrent=True, state="constant", cost="O(t d f)"
    )
    weight: Tensor

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        rows = config.features
        self.rows = max(1, int(self.dim * math.log(self.dim))) if rows is None else rows
        self.features = 2 * self.rows if config.kernel == "hyperbolic" else self.rows
        sampled = self._draw(torch.Generator(device="cpu").manual_seed(config.seed))
        self._register_buffers(weight=sampled)

    def redraw(self, generator: torch.Generator) -> None:
        self.weight.copy_(self._draw(generator))

    def exchange(self) -> Exchange:
        return "scan"

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> PerformerState:
        sizes = (batch, self.kv_heads, self.features, self.value_dim)
        kv, z = LinearState.empty(*sizes, device=device, dtype=dtype)
        return PerformerState(kv, z, torch.full_like(z[..., 0], -torch.inf))

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: PerformerState, *, rope: RotaryEmbedding | None = None
    ) -> tuple[Tensor, PerformerState]:
        """The recurrence of the module's docstring, written out: the reference of `extend`."""
        kv, z, c = state
        q, k = (x.to(z.dtype) if rope is None else rope(x.to(z.dtype)) for x in (q, k))
        q = apply_feature_map(self._map, self._queries(q))
        if self.config.kernel == "generalized":
            k, c = self._activated(k), c.clone()
        else:
            exponents = (self._projection(k) - softmax_offset(k)[..., None])[:, 0]
            now = torch.maximum(c, exponents.detach().amax(-1))
            kept = (c - now).exp()[..., None]
            kv, z, c, k = kept[..., None] * kv, kept * z, now, (exponents - now[..., None]).exp()[:, None]
        kv = kv + torch.einsum("btgf,btge->bgfe", k, v.to(z.dtype))
        z = z + k[:, 0]
        y = read(q, kv)
        weight = torch.einsum("bthf,bhf->bth", q, z.repeat_interleave(self.group, 1))
        return divide(y, weight + self.config.eps).to(v.dtype), PerformerState(kv, z, c)

    def _sum(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: PerformerState,
        layout: Layout,
        *,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, PerformerState]:
        config, dtype = self.config, sum_dtype(v.dtype)
        q, k = (x.to(dtype) if rope is None else rope(x.to(dtype)) for x in (q, k))
        keys = self._keys(k, state.c, layout)
        y, (kv, z) = ops.linear_attention(
            self._queries(q),
            keys.unmapped,
            v.to(dtype),
            log_decay=keys.log_decay,
            state=LinearState(state.kv, state.z),
            layout=layout,
            causal=self.causal,
            eps=config.eps,
            feature_map=self._map,
            chunk=config.chunk,
            impl=config.impl,
        )
        return y.to(v.dtype), PerformerState(kv, z, keys.c)

    @property
    def _map(self) -> FeatureMapName | None:
        """The map that makes features of queries and keys inside the sum, so that they are never written."""
        return None if self.config.kernel == "generalized" else "exp"

    def _queries(self, q: Tensor) -> Tensor:
        """[b t h d] -> [b t h f] for `_map`. What depends on the query alone cancels: the largest is 0."""
        if self.config.kernel == "generalized":
            return self._activated(q)
        projection = self._projection(q)
        return projection.sub_(projection.detach().amax(-1, keepdim=True))

    def _keys(self, k: Tensor, before: Tensor, layout: Layout) -> Keys:
        """Return [b s g f] of k [b s g d] for `_map` after keys whose largest exponent was `before` [b g]."""
        if self.config.kernel == "generalized":
            return Keys(self._activated(k), None, before.clone())
        projection, offset = self._projection(k), softmax_offset(k)
        with torch.no_grad():  # c cancels in every ratio
            largest = projection.amax(-1) - offset
            if layout.mask is not None:
                largest = largest.masked_fill(~layout.mask[..., None], -torch.inf)
            if layout.shard is not None:
                before = torch.stack((before, *layout.shard.gather(largest.amax(1)))).amax(0)
            c = running_max(torch.cat((before[:, None], largest), 1))
            # -inf before the first key, where there is nothing to decay.
            log_decay = (c[:, :-1] - c[:, 1:]).nan_to_num(0.0, neginf=0.0) if self.causal else None
            last, c = c[:, -1].clone(), c[:, 1:] if self.causal else c[:, -1:]
            c = c.nan_to_num(torch.nan, neginf=0.0)
        # A sum: the gradient of a difference would be a negative copy of all features.
        shift = (-offset - c)[..., None]
        # In place, except in transforms: vmap may have more states than keys.
        return Keys(projection.add_(shift) if eager() else projection + shift, log_decay, last)

    def _projection(self, x: Tensor) -> Tensor:
        return softmax_projection(x, self.weight.to(x.dtype), self.config.kernel == "hyperbolic")

    def _activated(self, x: Tensor) -> Tensor:
        """The features of the generalized kernel, equation 5.

        There kernel_eps belongs to the activation, before both are divided by the root of the rows, as with
        kernel_eps_scaled. The default adds it afterwards, as the authors' TensorFlow code does for relu."""
        config, scale = self.config, self.rows**-0.5
        features = ACTIVATIONS[config.activation](project(x * self.dim**-0.25, self.weight.to(x.dtype)))
        return features * scale + config.kernel_eps * (scale if config.kernel_eps_scaled else 1.0)

    def _draw(self, generator: torch.Generator) -> Tensor:
        draw = orthogonal_gaussian if self.config.orthogonal else independent_gaussian
        heads = self.kv_heads if self.config.per_head else 1
        rows = [draw(self.rows, self.dim, self.config.row_norms, generator) for _ in range(heads)]
        return torch.stack(rows)

"""Linear attention: Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236.

The exponential of softmax is replaced by a product of features, phi(q) . phi(k), so that the keys and
values can be summed once (equations 4 to 6) and, when causal, carried along as the state of an RNN
(equations 9 to 12, 16 to 20):

    kv_i = kv_{i-1} + phi(k_i) v_i^T      z_i = z_{i-1} + phi(k_i)      y_i = phi(q_i)^T kv_i / phi(q_i) . z_i

Cost of t tokens: 2 t f e multiplications and additions a head to train, 2 f e a token to generate; the state
holds f (e + 1) numbers whatever the length.

Rotary positions turn the features, in the numerator alone (Su et al. 2021, arXiv:2104.09864, equation 19):

    y_i = sum_j (R_i phi(q_i)) . (R_j phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j)

Features that share no entry are still rotated onto each other: the denominator is then 0 and the numerator is
not, so that this needs a map whose products are above 0. `rotary="inputs"` turns q and k before any map: the
weights agree above and below, and y is an average of values, though no longer a function of distances alone.
`rotary="unbounded"` is the equation with the other maps too, for weights that were trained with it.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lintra import ops
from lintra.attention._feature_maps import (
    T2R,
    Dpfp,
    EluPlusOne,
    FeatureMap,
    Hedgehog,
    Identity,
    Relu,
    SquaredRelu,
    Taylor2,
)
from lintra.attention._kernel import KernelAttention
from lintra.attention._state import read
from lintra.attention.base import Capabilities, Exchange
from lintra.config import fields
from lintra.ops import LinearState
from lintra.ops.checks import sum_dtype
from lintra.ops.features import apply_feature_map
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import Impl, divide
from lintra.ops.rope import RotaryEmbedding

__all__ = [
    "T2R",
    "Config",
    "Dpfp",
    "EluPlusOne",
    "FeatureMap",
    "Hedgehog",
    "Identity",
    "LinearAttention",
    "LinearState",
    "Relu",
    "SquaredRelu",
    "Taylor2",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Linear attention."""

    # Earlier versions rotated every map above a denominator; some are now refused.
    ABSENT: ClassVar = {"rotary": "unbounded"}

    feature_map: FeatureMap = field(default_factory=EluPlusOne)  # applied to q and k
    normalize: bool = True  # divide by the sum of the weights
    eps: float = 1e-6  # added to the denominator; no unit
    # What positions turn: phi(x) in the numerator | x | phi(x) where the denominator may be 0 too
    rotary: Literal["features", "inputs", "unbounded"] = "features"
    chunk: int = 64  # tokens per block of the parallel form; changes speed, not the result
    impl: Impl = "auto"  # which implementation of the sum

    def __post_init__(self):
        fields.check(self)
        fields.not_negative(self, "eps")
        fields.at_least(self, chunk=1)
        if self.normalize and not self.feature_map.positive:
            name = type(self.feature_map).__name__
            raise ValueError(f"feature_map {name} gives weights of both signs: it needs normalize=False")
        if self.rotary == "unbounded" and not self.may_divide_by_zero:  # one name for one thing
            object.__setattr__(self, "rotary", "features")

    @property
    def may_divide_by_zero(self) -> bool:
        """Return whether a denominator may be 0 where the products of rotated features are not."""
        return self.normalize and not self.feature_map.never_zero

    def build(self, **shape) -> "LinearAttention":
        return LinearAttention(self, **shape)


class LinearAttention(KernelAttention):
    """Linear attention. State: kv [b g f e] and z [b g f]."""

    paper = "Katharopoulos et al. 2020, arXiv:2006.16236"
    memory = LinearState
    supports_bf16_state = True
    reads_padded = reads_packed = rotates = True
    can = Capabilities(
        causal=True, bidirectional=True, cross=True, recurrent=True, state="constant", cost="O(t d^2)"
    )

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        self.features = config.feature_map.size(self.dim)
        if config.rotary != "inputs":
            self.rope_dim = self.features
        if config.rotary != "inputs" and config.may_divide_by_zero:
            reason = (
                f"divides by products of {config.feature_map}, which may be 0 where those of rotated "
                "features are not"
            )
            if config.rotary == "features":
                self.rope_dim = 0
                self.no_rope_reason = (
                    f'{reason}: rotary="inputs" turns q and k instead, in a model yet to be trained, and '
                    '"unbounded" is for weights that were trained so'
                )
            else:
                self.rope_warning = f"{reason}: outputs may be as large as a numerator over eps={config.eps}"
        self.query_map = config.feature_map.build(self.heads, self.dim)
        self.key_map = config.feature_map.build(self.kv_heads, self.dim)

    def exchange(self) -> Exchange:
        return "scan"

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LinearState:
        sizes = (batch, self.kv_heads, self.features, self.value_dim)
        return LinearState.empty(*sizes, device=device, dtype=dtype)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, rope: RotaryEmbedding | None = None
    ) -> Tensor:
        if rope is not None or self.config.feature_map.fused is None:
            return super()._forward(q, k, v, layout, rope=rope)
        # The base class gives the same, with more calls and a state of zeros: much of the time of few tokens.
        config = self.config
        return ops.linear_attention(
            q if self.causal else layout.zero(q),
            k,
            v,
            layout=layout,
            causal=self.causal,
            normalize=config.normalize,
            eps=config.eps,
            feature_map=config.feature_map.fused,
            chunk=config.chunk,
            impl=config.impl,
        )[0]

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState, *, rope: RotaryEmbedding | None = None
    ) -> tuple[Tensor, LinearState]:
        """The recurrence of the module's docstring, written out: the reference of `extend`."""
        dtype = state.z.dtype
        q, k, rope = self._rotated_inputs(q, k, dtype, rope)
        q, k = self._features(q, k, dtype)
        rotated_q, rotated_k = (q, k) if rope is None else (rope(q), rope(k))
        kv = state.kv + torch.einsum("btgf,btge->bgfe", rotated_k, v.to(dtype))
        z = state.z + k[:, 0]
        y = read(rotated_q, kv)
        if self.config.normalize:
            weight = torch.einsum("bthf,bhf->bth", q, z.repeat_interleave(self.group, 1))
            y = divide(y, weight + self.config.eps)
        return y.to(v.dtype), LinearState(kv, z)

    def _rotated_inputs(
        self, q: Tensor, k: Tensor, dtype: torch.dtype, rope: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor, RotaryEmbedding | None]:
        """q and k in `dtype`, rotated if that is before the map, and the rotation left for after it."""
        if rope is None or self.config.rotary != "inputs":
            return q, k, rope
        return rope(q.to(dtype)), rope(k.to(dtype)), None

    def _features(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """phi(q), phi(k) in `dtype`, of 32 bits at least: the gradient of a feature may be 1 / eps, and
        float16 ends at 65504."""
        fused = self.config.feature_map.fused
        q, k = self.query_map(q.to(dtype)), self.key_map(k.to(dtype))
        return apply_feature_map(fused, q), apply_feature_map(fused, k)

    def _sum(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LinearState,
        layout: Layout,
        *,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, LinearState]:
        config = self.config
        fused = config.feature_map.fused
        options = {"layout": layout, "causal": self.causal, "chunk": config.chunk, "impl": config.impl}
        divided = {"normalize": config.normalize, "eps": config.eps}
        if rope is None and fused is not None:
            return ops.linear_attention(q, k, v, state=state, feature_map=fused, **divided, **options)
        given, dtype = v.dtype, sum_dtype(v.dtype)
        k, v = layout.zero(k), v.to(dtype)
        q = layout.zero(q) if self.causal else q
        q, k, rope = self._rotated_inputs(q, k, dtype, rope)
        q, k = self._features(q, k, dtype)
        if rope is None:
            y, state = ops.linear_attention(q, k, v, state=state, **divided, **options)
            return y.to(given), state
        options |= {"normalize": False}
        # The denominator is the same sum over unrotated features with the value 1.
        ones = k.new_ones(*k.shape[:3], 1)
        counted = LinearState(state.z[..., None], state.z)
        y, (kv, _) = ops.linear_attention(rope(q), rope(k), v, state=state, **options)
        weight, (_, z) = ops.linear_attention(q, k, ones, state=counted, **options)
        if config.normalize:
            y = divide(y, weight[..., 0] + config.eps)
        return y.to(given), LinearState(kv, z)

"""Nystromformer: Xiong et al. 2021, arXiv:2102.03902. Attention through landmarks.

m landmarks q~, k~ are the means of m segments of the queries and of the keys. With

    F = softmax(scale q k~^T)      A = softmax(scale q~ k~^T)      B = softmax(scale q~ k^T)

the matrix of attention weights is approximated by F A^+ B, so that y = F (A^+ (B v)). The pseudo-inverse A^+
comes from a few iterations of matrix products. With at most m queries or keys nothing has to be approximated:
y is that of softmax attention. A convolution over the values, one kernel a head, may be added to y.

Cost of t tokens: 2 t m (d + e) multiplications and additions a head, and 4 m^3 an iteration. A landmark
of keys mixes later tokens into earlier ones, so there is no causal form.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention._scores import ScoredAttention
from lintra.attention.base import Capabilities
from lintra.config import fields
from lintra.ops.landmarks import Segments, exact_inverse, iterative_inverse, segment_means
from lintra.ops.layout import Layout
from lintra.ops.state import map_state


@dataclass(frozen=True, kw_only=True)
class Config:
    """Nystromformer."""

    landmarks: int = 64  # segments of the queries and of the keys; in the paper m
    iterations: int = 6  # towards the inverse; few of them regularise it
    inverse: Literal["iterative", "exact"] = "iterative"  # exact: from singular values, slow
    # Where iterations begin: by the norm of each head's matrix | by the largest norm of the sample's heads
    inverse_start: Literal["head", "sample"] = "head"
    conv: int | None = None  # tokens a convolution of the values spans, odd; None: there is none
    scale: float | None = None  # multiplies the scores; no unit; None: (size of a head) ** -0.5
    dropout: float = 0.0  # probability of dropping a weight of F in training

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, landmarks=1, iterations=1)
        fields.together(self, "iterations", "inverse_start", inverse="iterative")
        if self.conv is not None and (self.conv < 1 or self.conv % 2 == 0):
            raise ValueError(f"conv must be odd and at least 1 token, got {self.conv}")
        fields.finite(self, "scale")
        fields.probability(self, "dropout")

    def build(self, **shape) -> "NystromAttention":
        return NystromAttention(self, **shape)


class NystromMemory(NamedTuple):
    """Memory of cross-attention: k [b s g d], v [b s g e], real [b s]; the means of k and v over segments,
    [b m g d] and [b m g e], in float32 (float64 for float64)."""

    k: Tensor
    v: Tensor
    real: Tensor
    key_means: Tensor
    value_means: Tensor


class NystromAttention(ScoredAttention):
    """Nystromformer. No state; the memory of cross-attention is the keys, the values and the landmarks."""

    paper = "Xiong et al. 2021, arXiv:2102.03902"
    memory = NystromMemory
    can = Capabilities(
        causal=False,
        bidirectional=True,
        cross=True,
        recurrent=False,
        state="none",
        cost="O(t m d)",
        joint_queries=True,
    )

    def __init__(self, config: Config, **shape):
        if config.conv is not None:
            self.can = replace(self.can, cross=False)
        super().__init__(config, **shape)
        self.conv = None
        if config.conv is not None:
            bound = config.conv**-0.5
            self.conv = nn.Parameter(torch.empty(self.kv_heads, config.conv).uniform_(-bound, bound))

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **_: Any) -> Tensor:
        y = self._attend(q, self._memory(k, v, layout), layout.mask, layout.mask)
        if self.conv is not None and v.numel():
            y = y + self._convolve(self.conv.to(y.dtype), v.to(y.dtype), layout)
        elif self.conv is not None:  # no tokens: the weights have a gradient all the same
            y = y + self.conv[:0].sum().to(y.dtype)
        return y.to(v.dtype)

    def _encode_memory(self, k: Tensor, v: Tensor, layout: Layout) -> NystromMemory:
        return map_state(torch.clone, self._memory(k, v, layout))

    def _cross_attend(self, q: Tensor, memory: NystromMemory, layout: Layout) -> Tensor:
        """Every query reads all of the memory; query landmarks are those of the queries given."""
        return self._attend(q, memory, layout.mask, memory.real).to(q.dtype)

    def _memory(self, k: Tensor, v: Tensor, layout: Layout) -> NystromMemory:
        count = self.config.landmarks
        segments = None if layout.mask is None else Segments.of(layout.mask, count)
        means = (segment_means(x, count, segments) for x in (k, v))
        return NystromMemory(k, v, layout.real(k), *means)

    def _attend(self, q: Tensor, memory: NystromMemory, mask: Tensor | None, real: Tensor | None) -> Tensor:
        """y [b t h e] in the sum dtype: rounded to 16 bits, landmarks would be far from their inverse.

        `mask` is of the queries, `real` of the keys; None: there is no padding.
        """
        count, dtype = self.config.landmarks, memory.key_means.dtype
        q, k, v = q.to(dtype), memory.k.to(dtype), memory.v.to(dtype)
        visible = None if real is None else real[:, None]
        if min(q.shape[1], k.shape[1]) <= count:
            return self.attend(q, k, v, visible)
        queries = None if mask is None else Segments.of(mask, count)
        q_means = segment_means(q, count, queries)  # [b m h d]
        k_means, v_means = (x.repeat_interleave(self.group, 2) for x in memory[3:])
        among = torch.einsum("bihd,bjhd->bhij", q_means * self.scale, k_means).softmax(-1)  # A
        # Weights of F alone are dropped: A^+ would multiply what is missing in F by what is missing in B.
        read = self.attend(q_means, k, v, visible, dropout=0.0)  # B v [b m h e]
        values = torch.einsum("bhji,bihe->bjhe", self._inverse(among), read)  # A^+ B v
        # A sample with fewer queries or keys than landmarks has segments without tokens, and does not need A:
        # such keys are their own landmarks, with F the softmax over them; such queries too, with B theirs.
        used = None
        if real is not None:
            keys = real.sum(1, keepdim=True)
            used = (torch.arange(count, device=q.device) < keys)[:, None]
            values = torch.where((keys <= count)[..., None, None], v_means, values)
        y = self.attend(q, k_means, values, used)
        if queries is not None:
            few = queries.real.sum(1, keepdim=True) <= count
            read = self.attend(q_means, k, v, visible) if self.weighing()["dropout"] else read
            y = torch.where(few[..., None, None], queries.spread(read), y)
        return y

    def _inverse(self, among: Tensor) -> Tensor:
        if self.config.inverse == "exact":
            return exact_inverse(among)
        return iterative_inverse(among, self.config.iterations, alone=self.config.inverse_start == "head")

    def _convolve(self, weight: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """v [b t g e] with the kernel [g c] of its head over its real neighbours -> [b t h e]."""
        front = layout.left_align()
        v = v if front is None else front.gather(v)
        near = functional.conv2d(
            v.movedim(2, 1), weight[:, None, :, None], padding=(weight.shape[1] // 2, 0), groups=v.shape[2]
        ).movedim(1, 2)
        near = near if front is None else front.restore(near)
        return near.repeat_interleave(self.group, 2)

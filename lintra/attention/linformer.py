"""Linformer: Wang et al. 2020, arXiv:2006.04768, equation 7. A sequence seen through r rows.

The keys and the values of n tokens are each mixed down to r rows, and the queries attend to those:

    K' = E[:, :n] K      V' = F[:, :n] V      y_i = softmax(scale q_i . K') V'

E and F [r, max_length] are learned; a shorter sequence uses their first columns, one for each real token in
its order. Section 4 names pooling over windows of max_length / r tokens as the other choices: the mean, the
largest number of each channel, or a convolution whose stride is the window; a window without tokens
is not seen.

Cost of t tokens: 2 t r (d + e) multiplications and additions a head. Every row mixes all tokens, the later
ones too, so there is no causal form. Cross-attention keeps r (d + e) numbers a key-value head.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lintra.attention._scores import ScoredAttention
from lintra.attention.base import Capabilities
from lintra.config import fields
from lintra.ops import checks
from lintra.ops.layout import Layout
from lintra.ops.padding import real_tokens


@dataclass(frozen=True, kw_only=True)
class Config:
    """Linformer."""

    max_length: int = 4096  # tokens, padding included; a longer sequence is refused
    rank: int = 256  # rows that the tokens are mixed down to; k in the paper
    projection: Literal["learned", "mean", "max", "convolution"] = "learned"  # how tokens become rows
    sharing: Literal["none", "headwise", "key-value"] = "headwise"  # weights for each head | for all | E = F
    scale: float | None = None  # multiplies the scores; no unit; None: (size of a head) ** -0.5
    dropout: float = 0.0  # probability of dropping a weight in training

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, max_length=1, rank=1)
        if self.projection in ("mean", "max") and self.sharing != "headwise":
            raise ValueError(
                f"sharing is of learned weights: with projection={self.projection!r} it must stay "
                f"'headwise', got {self.sharing!r}"
            )
        fields.finite(self, "scale")
        fields.probability(self, "dropout")

    @property
    def window(self) -> int:
        """Tokens to a row, where rows are pooled."""
        return -(-self.max_length // self.rank)

    def build(self, **shape) -> "LinformerAttention":
        return LinformerAttention(self, **shape)


class LinformerMemory(NamedTuple):
    """Memory of cross-attention: the rows k [b r g d], v [b r g e], and which of them are seen, real [b r].

    The dtype is that of the keys: each sum is rounded to it once.
    """

    k: Tensor
    v: Tensor
    real: Tensor


class LinformerAttention(ScoredAttention):
    """Linformer. No state; the memory of cross-attention has `rank` rows, whatever the length."""

    paper = "Wang et al. 2020, arXiv:2006.04768"
    memory = LinformerMemory
    can = Capabilities(
        causal=False, bidirectional=True, cross=True, recurrent=False, state="none", cost="O(t r d)"
    )

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        # E and F; one of them where they are the same.
        self.projections = nn.ParameterList()
        if config.projection in ("mean", "max"):
            return
        each = (config.rank, config.max_length) if config.projection == "learned" else (config.window,)
        bound = each[0] ** -0.5
        for _ in range(1 if config.sharing == "key-value" else 2):
            weight = torch.empty(*((self.kv_heads,) if config.sharing == "none" else ()), *each)
            self.projections.append(nn.Parameter(weight.uniform_(-bound, bound)))

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **_: Any) -> Tensor:
        return self._attend(q, self._encode_memory(k, v, layout), layout.mask is not None)

    def _cross_attend(self, q: Tensor, memory: LinformerMemory, layout: Layout) -> Tensor:
        return self._attend(q, memory, True)

    def _encode_memory(self, k: Tensor, v: Tensor, layout: Layout) -> LinformerMemory:
        """Keys and values, padding zero, as rows. Raises ValueError above the declared length."""
        config, length = self.config, k.shape[1]
        if length > config.max_length:
            raise ValueError(f"linformer reaches max_length={config.max_length} tokens, got {length}")
        left = layout.left_align()
        if left is not None:
            k, v = left.gather(k), left.gather(v)
        if config.projection == "learned":
            k, v = (_mix(self.projections[i], x) for i, x in ((0, k), (-1, v)))
            return LinformerMemory(k, v, real_tokens(None, k))
        here = layout.real(k) if left is None else left.mask
        here, k, v = (_windows(x, config.window) for x in (here, k, v))
        if config.projection == "convolution":
            k, v = (_convolve(self.projections[i], x) for i, x in ((0, k), (-1, v)))
        else:
            pool = _mean if config.projection == "mean" else _max
            k, v = pool(k, here), pool(v, here)
        return LinformerMemory(k, v, here.any(2))

    def _attend(self, q: Tensor, memory: LinformerMemory, padded: bool) -> Tensor:
        """y [b t h e]; `padded`: some rows may stand for no token."""
        visible = memory.real[:, None] if padded and self.config.projection != "learned" else None
        return self.attend(q, memory.k, memory.v, visible)


def _mix(weight: Tensor, x: Tensor) -> Tensor:
    """weight [r n] or, one for each head, [g r n]; x [b s g w] with s <= n -> [b r g w]."""
    weight = weight[..., : x.shape[1]].to(x.dtype)
    if weight.dim() == 3:
        return (weight @ x.movedim(2, 1)).movedim(1, 2)
    return (weight @ x.flatten(2)).unflatten(2, x.shape[2:])


def _windows(x: Tensor, window: int) -> Tensor:
    """x [b s ...] -> [b n window ...], the last one filled with zeros."""
    x = torch.cat((x, x.new_zeros(x.shape[0], -x.shape[1] % window, *x.shape[2:])), 1)
    return x.unflatten(1, (x.shape[1] // window, window))


def _convolve(weight: Tensor, x: Tensor) -> Tensor:
    """weight [w] or [g w], x [b n w g d] -> [b n g d]: the same weights for every channel of a head."""
    letters = "bnwgd,w->bngd" if weight.dim() == 1 else "bnwgd,gw->bngd"
    return torch.einsum(letters, x, weight.to(x.dtype))


def _mean(x: Tensor, here: Tensor) -> Tensor:
    """x [b n w g d] over the tokens that are `here` [b n w] (elsewhere x is 0) -> [b n g d]."""
    count = here.sum(2).clamp(min=1)[..., None, None]
    return (x.sum(2, dtype=checks.sum_dtype(x.dtype)) / count).to(x.dtype)


def _max(x: Tensor, here: Tensor) -> Tensor:
    here = here[..., None, None]
    return x.masked_fill(~here, -math.inf).amax(2).masked_fill(~here.any(2), 0.0)

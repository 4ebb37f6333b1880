"""Exact attention over a set of keys, with what it takes to join the results over several sets.

For a query and a set J of keys, L(J) = log sum_J exp(a_j) and o(J) = sum_J exp(a_j - L(J)) v_j. For disjoint
sets L = logaddexp(L1, L2) and o = exp(L1 - L) o1 + exp(L2 - L) o2: windows, blocks, hash rounds, global and
compressed tokens are all sets. Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
"""

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lintra.ops.autocast import no_autocast
from lintra.ops.checks import sum_dtype, transforming
from lintra.ops.operator import differentiable
from lintra.ops.padding import connected_zeros


class PartialAttention(NamedTuple):
    """Attention over one set of keys: o [... i e] and logsumexp [... i], 0 and -inf where the set is empty.

    Both are in float32 (float64 for float64 inputs).
    """

    o: Float[Tensor, "*b i e"]
    logsumexp: Float[Tensor, "*b i"]


def softmax_attention(
    q: Float[Tensor, "*#b i d"],
    k: Float[Tensor, "*#b j d"],
    v: Float[Tensor, "*#b j e"],
    *,
    visible: Bool[Tensor, "*#b #i j"] | None = None,
    bias: Float[Tensor, "*#b #i j"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> PartialAttention:
    """Attention of every query to the keys `visible` to it, all i j scores at once: for blocks.

    The leading axes broadcast, and i of `visible` and `bias`. `bias` is added to the scores and must be
    finite; `scale` multiplies q . k and has no unit (default d**-0.5); dropout drops weights. An empty row
    has no gradient."""
    dtype = sum_dtype(v.dtype)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    with no_autocast(q):  # rounded to 16 bits, a large score is off by more than a weight may be
        scores = (q.to(dtype) * factor) @ k.to(dtype).mT
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if k.shape[-2] == 0:
        empty = scores.sum(-1)
        return PartialAttention((scores @ v.to(dtype)).to(dtype), torch.full_like(empty, -math.inf))
    highest = scores.amax(-1, keepdim=True).detach()
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    logsumexp = (total.log() + highest).masked_fill(empty, -math.inf)[..., 0]
    if dropout:
        weights = functional.dropout(weights, dropout)
    # The product takes the dtype of v: 16-bit values meet 16-bit weights, as in the textbook.
    o = ((weights / total).to(v.dtype) @ v).to(dtype)
    return PartialAttention(o, logsumexp)


def fused_attention(
    q: Float[Tensor, "b h i d"],
    k: Float[Tensor, "b g j d"],
    v: Float[Tensor, "b g j e"],
    *,
    visible: Bool[Tensor, "#b #h #i j"] | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b h i e"]:
    """The o of `softmax_attention` alone, through PyTorch's kernels, which keep no scores. All scores are
    kept inside torch.func and in forward mode, which these kernels support in part, and in a backward pass
    that is itself to be differentiated; there, with dropout, the kernel raises."""
    if not q.numel() or not k.numel():
        return connected_zeros((*q.shape[:3], v.shape[3]), q, k, v)
    blind = None
    if visible is not None:
        blind = ~visible.any(-1, keepdim=True)
        # A softmax over nothing is NaN: a row that sees nothing is shown everything and its result is
        # dropped.
        visible = visible | blind
    if scale is not None and scale <= 0:  # PyTorch scales the masked scores too: -inf times 0 is NaN
        q, scale = q * scale, 1.0
    options = {
        "attn_mask": visible,
        "is_causal": causal,
        "scale": scale,
        "enable_gqa": True if q.shape[1] != k.shape[1] else False,  # noqa: SIM210 (compiled, != is a symbol)
    }
    with sdpa_kernel(SDPBackend.MATH) if transforming(q, k, v) else nullcontext():
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **options)
    if y.requires_grad and not (dropout or torch.compiler.is_compiling() or transforming(q, k, v)):
        del options["attn_mask"]
        y = _TwiceDifferentiable.apply(y, q, k, v, visible, options)
    return y if blind is None else y.masked_fill(blind, 0.0)


class _TwiceDifferentiable(torch.autograd.Function):
    """Identity on y, attention of q, k, v by a kernel whose gradient has no gradient.

    A backward pass continues with that kernel's gradient. With create_graph=True it computes attention again
    from all scores instead, which PyTorch differentiates any number of times. `options` are those of the
    kernel, its tensors left out."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(q, k, v, visible)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return dy, None, None, None, None, None
        q, k, v, visible = ctx.saved_tensors

        def again(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
            with sdpa_kernel(SDPBackend.MATH):
                return (functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, **ctx.options),)

        return None, *differentiable(again, (q, k, v), (dy,)), None, None


def merge_lse(one: PartialAttention, *others: PartialAttention) -> PartialAttention:
    """Attention over the union of disjoint sets of keys. The order does not matter; a set may be empty."""
    for other in others:
        highest = torch.maximum(one.logsumexp, other.logsumexp).detach()
        highest = highest.masked_fill(highest == -math.inf, 0.0)
        left, right = (one.logsumexp - highest).exp(), (other.logsumexp - highest).exp()
        total = left + right
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        o = (left / total)[..., None] * one.o + (right / total)[..., None] * other.o
        one = PartialAttention(o, (total.log() + highest).masked_fill(empty, -math.inf))
    return one

"""Calls that benchmarks of attention time: forward + backward of a mechanism, and of softmax in two ways."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lintra import attention, ops
from lintra.attention import Attention, for_length

Inputs = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Call = Callable[[], object]


def modes(name: str) -> list[bool]:
    """Return the forms to measure, True for causal and False for bidirectional; where a benchmark measures
    only one form, it is the first."""
    can = attention.mechanism(name).can
    return [causal for causal, possible in ((True, can.causal), (False, can.bidirectional)) if possible]


def draw(
    batch: int,
    tokens: int,
    heads: int,
    dim: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Random q, k and v [b t h d] that require gradients."""
    shape = (batch, tokens, heads, dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v


def mechanism(name: str, inputs: Inputs, *, causal: bool, **options: Any) -> Call:
    """Forward + backward of a mechanism with its default `Config`, except for `options`."""
    q, k, v = inputs
    batch, tokens, heads, dim = q.shape
    config = for_length(attention.load(name).Config, tokens, **options)
    built: Attention = config.build(heads=heads, dim=dim, causal=causal).to(q.device)
    given = {
        what: torch.randn(batch, tokens, width, device=q.device, requires_grad=True)
        for what, width in built.extra_inputs().items()
    }
    wanted = [q, v] if built.shared_key else [q, k, v]
    wanted += [*given.values(), *built.parameters()]

    def both() -> None:
        y = built(q, q if built.shared_key else k, v, **given)
        torch.autograd.grad(y.sum(), wanted, allow_unused=True)

    return both


def passes(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Call:
    """Forward + backward of a function of these inputs, from the sum of y."""

    def both() -> None:
        torch.autograd.grad(attend(*inputs).sum(), inputs)

    return both


def each_pass(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Call, Call]:
    """Forward alone, and forward + backward from a given gradient."""
    gradient = torch.randn_like(attend(*inputs))

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    return forward, lambda: torch.autograd.grad(attend(*inputs), inputs, gradient)


def linear(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The linear sum with its usual feature map."""
    return ops.linear_attention(q, k, v, feature_map="elu+1", **options)[0]


def fused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """Softmax through PyTorch's own kernels. q, k, v [b t h d] -> [b h t d]"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def written_out(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """Softmax attention with every score in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q.shape[-1] ** -0.5 * q @ k.mT
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ v

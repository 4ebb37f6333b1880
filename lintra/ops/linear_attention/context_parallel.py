"""Shards of longer sequences on several ranks: every rank computes the effect of its shard on a state.

    kv_out = D_n .. D_1 kv_in + sum_t D_n .. D_{t+1} exp(log_input_t) k_t v_t^T         the sum
    kv_out = M_n .. M_1 kv_in + kv_n from 0,   M_t = (I - beta_t k_t k_t^T) D_t         the delta rule

A sequence that begins on a rank leaves a state there, which computing its outputs gives anyway. For others a
pass without outputs finds what they add, before the incoming state is known: a sum without decay needs one
query for it, the delta rule runs from the state [0 I] with the values [v 0], which gives the addition and,
beside it, the product of all M_t. Only ranks that have others on both sides need that product.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lintra.ops.checks import sum_dtype
from lintra.ops.layout import Layout
from lintra.ops.linear_attention.reference import LinearState
from lintra.ops.padding import zero_padding


def attend_shard(
    attend: Callable[..., tuple[Tensor, LinearState]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: LinearState | None,
    layout: Layout,
    scale: float | None,
    eps: float,
    normalize: bool,
    **given: Any,
) -> tuple[Tensor, LinearState]:
    """Return y [b t h e] of the tokens of `layout.shard`, and the state after them.

    attend: `lintra.ops.linear_attention`, which takes the other, validated arguments; `state` gives dtypes
    and form alone."""
    shard = layout.shard
    assert shard is not None
    log_decay, beta = given["log_decay"], given["beta"]
    g, f, e = max(k.shape[2], v.shape[2]), k.shape[3], v.shape[3]
    dtype = sum_dtype(k.dtype)
    like = k.new_zeros(layout.n, g, f, e + normalize, dtype=dtype)
    sizes: tuple[int, ...] = (layout.n, g)
    if beta is not None:
        sizes = (layout.n, g, f, f)
    elif log_decay is not None and log_decay.dim() == 4:
        sizes = (layout.n, g, f)
    has_z = normalize or len(sizes) == 2
    kept = dtype if state is None else state.kv.dtype

    def start(kv: Tensor) -> LinearState:
        return LinearState(kv, like.new_zeros(layout.n, g, f if has_z else 0))

    def joined(after: LinearState) -> Tensor:
        return torch.cat((after.kv, after.z[..., None]), -1) if normalize else after.kv

    def own(transition: bool) -> tuple[Tensor, Tensor | None]:
        alone = Layout(layout.rows, layout.time, layout.device, mask=layout.mask)
        kv, values = like[..., :e], v
        matrix = transition and beta is not None
        if matrix:
            identity = torch.eye(f, dtype=dtype, device=k.device).expand(layout.n, g, f, f)
            kv, values = torch.cat((kv, identity), -1), torch.cat((v, v.new_zeros(*v.shape[:3], f)), -1)
        ordered = beta is not None or log_decay is not None
        query = k if ordered else k[:, :1]  # one reads the state of a sum; where there is an order, all must
        options = {"state": start(kv), "layout": alone, "causal": ordered, "normalize": normalize}
        after = attend(query, k, values, **given, **options)[1]
        if matrix:
            return after.kv[..., :e], after.kv[..., e:]
        return joined(after), _left_of_a_state(log_decay, like, sizes, layout) if transition else None

    behind = layout.after(layout.seen)
    options = {"layout": behind, "normalize": normalize, "eps": eps, "scale": scale}
    if shard.begins:
        y, after = attend(q, k, v, **given, **options, state=start(like[..., :e]))
        return shard.send_state(y, joined(after), sizes), LinearState(after.kv.to(kept), after.z)
    before = shard.state(like, sizes, own)
    if normalize:
        state = LinearState(before[..., :-1].to(kept).contiguous(), before[..., -1].contiguous())
    else:
        state = start(before.to(kept))
    return attend(q, k, v, **given, **options, state=state)


def _left_of_a_state(
    log_decay: Tensor | None, like: Tensor, sizes: tuple[int, ...], layout: Layout
) -> Tensor:
    """Return the factors, of `sizes`, that the decays of all tokens leave of a state."""
    if log_decay is None:
        return like.new_ones(sizes)
    return zero_padding(layout.mask, log_decay.to(like.dtype))[0].sum(1).exp()

"""The state before a rank's piece of longer sequences: every rank says what its piece does to a state.

    kv_out = D_n .. D_1 kv_in + sum_t D_n .. D_{t+1} exp(log_input_t) k_t v_t^T         the sum
    kv_out = M_n .. M_1 kv_in + kv_n from 0,   M_t = (I - beta_t k_t k_t^T) D_t         the delta rule

The sum takes one product of matrices, without queries and outputs. The delta rule runs from the state [0 I]
with the values [v 0]: side by side along the value axis it gives what is added and the product of all M_t.
Only ranks that have others on both sides need that product.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lintra.ops.autocast import no_autocast
from lintra.ops.checks import sum_dtype
from lintra.ops.features import FeatureMapName, apply_feature_map
from lintra.ops.layout import Layout
from lintra.ops.linear_attention.recurrence import recur, same_heads
from lintra.ops.linear_attention.reference import LinearState
from lintra.ops.padding import zero_padding
from lintra.ops.piece import Piece


def state_before(
    piece: Piece,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    log_input: Tensor | None,
    beta: Tensor | None,
    state: LinearState | None,
    layout: Layout,
    normalize: bool,
    feature_map: FeatureMapName | None,
    chunk: int,
    impl: str,
) -> LinearState:
    """Return the state before the tokens of a piece, with z where `normalize` divides by it.

    Arguments are those of `lintra.ops.linear_attention`, validated; `state` gives dtypes and form alone."""
    g, f, e = max(k.shape[2], v.shape[2]), k.shape[3], v.shape[3]
    dtype = sum_dtype(k.dtype)
    kept = dtype if state is None else state.kv.dtype
    like = k.new_zeros(layout.n, g, f, e + normalize, dtype=dtype)
    sizes: tuple[int, ...] = (layout.n, g)
    if beta is not None:
        sizes = (layout.n, g, f, f)
    elif log_decay is not None and log_decay.dim() == 4:
        sizes = (layout.n, g, f)
    wide, wide_v = (x.to(dtype) for x in zero_padding(layout.mask, k, v))

    def own(transition: bool) -> tuple[Tensor, Tensor | None]:
        with no_autocast(k):
            if beta is not None:
                options: dict[str, Any] = {"chunk": chunk, "impl": impl}
                return _delta(wide, wide_v, log_decay, beta, layout, transition, **options)
            features = zero_padding(layout.mask, apply_feature_map(feature_map, wide))[0]
            return _sum(features, wide_v, log_decay, log_input, layout, transition, normalize)

    before = piece.state(like, sizes, own)
    if normalize:
        return LinearState(before[..., :-1].to(kept).contiguous(), before[..., -1].contiguous())
    if state is None:
        return LinearState(before, like.new_zeros(layout.n, g, f if len(sizes) == 2 else 0))
    return LinearState(before.to(kept), state.z)


def _sum(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    log_input: Tensor | None,
    layout: Layout,
    transition: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sum that features [b s g f] and values add to a state, z as a last column, and what is left of one."""
    k, v = same_heads(k, k, v)[1:]
    kept = None
    if log_decay is not None:
        (log_decay,) = zero_padding(layout.mask, log_decay.to(k.dtype))
        # Sums from the end, no differences: they keep their digits beside a token that decays by a lot.
        behind = log_decay[:, 1:].flip(1).cumsum(1).flip(1)
        until = functional.pad(behind, (0, 0) * (log_decay.dim() - 2) + (0, 1))
        until = until if log_decay.dim() == 4 else until[..., None]
        kept = log_decay.sum(1).exp() if transition else None
        k = k * until.exp()
    elif transition:
        kept = k.new_ones(k.shape[0], k.shape[2])
    if log_input is not None:
        k = k * zero_padding(layout.mask, log_input.to(k.dtype))[0].exp()[..., None]
    added = k.permute(0, 2, 3, 1) @ v.movedim(1, 2)
    return torch.cat((added, k.sum(1)[..., None]), -1) if normalize else added, kept


def _delta(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    layout: Layout,
    transition: bool,
    *,
    chunk: int,
    impl: str,
) -> tuple[Tensor, Tensor | None]:
    """Sum that the delta rule adds to a state, and the matrix [b g f f] that it multiplies one by."""
    alone = Layout(layout.rows, layout.time, layout.device, mask=layout.mask)
    f, e = k.shape[3], v.shape[3]
    g = max(k.shape[2], v.shape[2])
    state = k.new_zeros(k.shape[0], g, f, e)
    if transition:
        v = torch.cat((v, v.new_zeros(*v.shape[:3], f)), -1)
        identity = torch.eye(f, dtype=k.dtype, device=k.device).expand(k.shape[0], g, f, f)
        state = torch.cat((state, identity), -1)
    options: dict[str, Any] = {"normalize": False, "eps": 0.0, "feature_map": None, "scale": None}
    options |= {"log_input": None, "chunk": chunk, "impl": impl, "inplace": False}
    after = recur(k, k, v, log_decay, beta, LinearState.of(state), alone, **options)[1].kv
    return (after[..., :e], after[..., e:]) if transition else (after, None)

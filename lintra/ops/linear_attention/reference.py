"""Linear attention by its definition, from a state and to a state.

    kv_t = exp(log_decay_t) kv_{t-1} + exp(log_input_t) phi(k_t) v_t^T
    z_t  = exp(log_decay_t) z_{t-1}  + exp(log_input_t) phi(k_t)
    y_t  = phi(q_t)^T kv_t / (phi(q_t) . z_t + eps)

Katharopoulos et al. 2020, arXiv:2006.16236, equations 8 to 20; the decay as in Sun et al. 2023,
arXiv:2307.08621, section 2.1. With a decay D_t = diag(exp(log_decay_t)) for every feature (Yang et al. 2023,
arXiv:2312.06635, section 4), and by the delta rule, where a token writes what is missing of its value under
its key (Schlag et al. 2021, arXiv:2102.11174, section 4; with decay Yang et al. 2024, arXiv:2412.06464,
section 3; with one for every feature Kimi Team 2025, arXiv:2510.26692):

    kv_t = D_t kv_{t-1} + k_t v_t^T                                          the sum
    kv_t = D_t kv_{t-1} + beta_t k_t (v_t - (D_t kv_{t-1})^T k_t)^T          the delta rule
    y_t  = kv_t^T q_t

The delta rule is stable for keys of at most unit length and beta in [0, 2]: the state is then multiplied by
matrices (I - beta k k^T) D that lengthen nothing. Longer keys make it grow without bound.

Letters: b batch, t query time, s key time, h heads, g key-value heads, r = h / g query heads to a key-value
head, f features, e width of v.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lintra.ops import checks


class LinearState(NamedTuple):
    """State of linear attention: kv [b g f e] and z [b g f], float32 (float64 for float64 inputs).

    z is [b g 0] where no denominator is kept: by the delta rule, with a decay for every feature unless
    `normalize` asks for one, and without `normalize` where the state before has none. kv may be bfloat16: it
    is read as float32, and the new one is rounded to bfloat16 once, when y is made.
    """

    kv: Tensor
    z: Tensor

    @classmethod
    def empty(
        cls,
        b: int,
        g: int,
        f: int,
        e: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        denominator: bool = True,
    ) -> "LinearState":
        """Return the state before all tokens, for inputs of `dtype` (None: the default)."""
        dtype = checks.sum_dtype(dtype or torch.get_default_dtype())
        kv = torch.zeros(b, g, f, e, device=device, dtype=dtype)
        return cls(kv, torch.zeros(b, g, f, device=device, dtype=dtype)) if denominator else cls.of(kv)

    @classmethod
    def of(cls, kv: Tensor) -> "LinearState":
        """Return the state of a recurrence without a denominator, kv [b g f e]."""
        return cls(kv, kv.new_zeros(*kv.shape[:2], 0, dtype=checks.sum_dtype(kv.dtype)))


class LinearAttentionInputs(NamedTuple):
    """Arguments of the PyTorch implementations: features, values and states, all in the sum dtype."""

    q: Float[Tensor, "b t h f"]
    k: Float[Tensor, "b s g f"]
    v: Float[Tensor, "b s g e"]
    log_decay: Float[Tensor, "b s g"] | None
    log_input: Float[Tensor, "b s g"] | None
    state: LinearState


class LinearAttentionOutputs(NamedTuple):
    """y before the division, numerator over denominator, in the sum dtype; the latter is without eps."""

    numerator: Float[Tensor, "b t h e"]
    denominator: Float[Tensor, "b t h"]
    state: LinearState


def linear_attention_reference(
    q: Float[Tensor, "b t h f"],
    k: Float[Tensor, "b s g f"],
    v: Float[Tensor, "b s g e"],
    log_decay: Float[Tensor, "b s g"] | None,
    log_input: Float[Tensor, "b s g"] | None,
    state: LinearState,
    causal: bool,
) -> LinearAttentionOutputs:
    """Linear attention by definition, O(t s): the weight of every key for every query, the future masked."""
    t, s, g = q.shape[1], *k.shape[1:3]
    log_decay = k.new_zeros(k.shape[:3]) if log_decay is None else log_decay
    log_input = k.new_zeros(k.shape[:3]) if log_input is None else log_input
    if causal:
        ahead = torch.ones(t, s, dtype=torch.bool, device=q.device).triu()  # keys from each query's own on
        # [b t s g]. Sums of their own, not differences: decays keep their digits beside one far larger.
        faded = log_decay[:, :, None].expand(-1, -1, s, -1).masked_fill(ahead[..., None], 0.0).cumsum(1)
        weight = (faded + log_input[:, None]).masked_fill(ahead.triu(1)[..., None], -math.inf).exp()
        past = log_decay.cumsum(1).exp()  # [b t g]
    else:
        weight = log_input.exp()[:, None].expand(-1, t, -1, -1)
        past = q.new_ones(q.shape[0], t, g)
    q = q.unflatten(2, (g, -1))  # [b t g r f]
    scores = torch.einsum("btgrf,bsgf,btsg->btgrs", q, k, weight)
    numerator = torch.einsum("btgrs,bsge->btgre", scores, v)
    numerator = numerator + torch.einsum("btg,btgrf,bgfe->btgre", past, q, state.kv)
    denominator = scores.sum(-1) + torch.einsum("btg,btgrf,bgf->btgr", past, q, state.z)

    later = torch.cat((log_decay[:, 1:], torch.zeros_like(log_decay[:, :1])), 1).flip(1).cumsum(1).flip(1)
    k = k * (later + log_input).exp()[..., None]
    kept = log_decay.sum(1).exp()[..., None]  # [b g 1]
    final = LinearState(
        kept[..., None] * state.kv + torch.einsum("bsgf,bsge->bgfe", k, v), kept * state.z + k.sum(1)
    )
    return LinearAttentionOutputs(numerator.flatten(2, 3), denominator.flatten(2, 3), final)


def recurrence_reference(
    q: Float[Tensor, "b t h f"],
    k: Float[Tensor, "b t g f"],
    v: Float[Tensor, "b t g e"],
    log_decay: Float[Tensor, "b t g #f"] | None,
    beta: Float[Tensor, "b t g"] | None,
    state: Float[Tensor, "b g f e"],
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g f e"]]:
    """The sum, or with beta the delta rule, without a denominator, token by token."""
    q = q.unflatten(2, (k.shape[2], -1))  # [b t g r f]
    ys = [q.new_zeros(q.shape[0], 0, *q.shape[2:4], v.shape[3])]
    for i in range(q.shape[1]):
        if log_decay is not None:
            state = log_decay[:, i, ..., None].exp() * state
        written = v[:, i]
        if beta is not None:
            written = beta[:, i, :, None] * (written - torch.einsum("bgfe,bgf->bge", state, k[:, i]))
        state = state + k[:, i, ..., None] * written[:, :, None]
        ys.append((q[:, i] @ state)[:, None])
    return torch.cat(ys, 1).flatten(2, 3), state


def divide(numerator: Float[Tensor, "b t h e"], denominator: Float[Tensor, "b t h"]) -> Tensor:
    """Return the ratio; 0 where the denominator is 0, with no gradient there."""
    nothing = (denominator == 0)[..., None]
    return (numerator / denominator[..., None].masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)

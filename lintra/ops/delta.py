"""The delta rule, with decay: the recurrence, and the same in chunks.

    kv_t = a_t kv_{t-1} + beta_t k_t (v_t - a_t kv_{t-1}^T k_t)^T     y_t = kv_t^T q_t     a = exp(log_decay)

A token writes what is missing of its value under its key: Widrow and Hoff's rule. Schlag et al. 2021,
arXiv:2102.11174, section 4; the chunk form of Yang et al. 2024, arXiv:2406.06484, section 3; with decay
Yang et al. 2024, arXiv:2412.06464, section 3. Stable for keys of at most unit length and beta in [0, 2]: the
state is then multiplied by matrices a (I - beta k k^T) that lengthen nothing. Longer keys make it grow
without bound.

Within a chunk the values written depend on each other, in a triangle: with b the elapsed decay,

    (I + A) new = beta v - beta exp(b) k kv_0      A_ts = beta_t k_t . k_s exp(b_t - b_s) for s < t

Solved for both terms at once, for all chunks, it leaves one product by a d x d matrix a chunk to do in order.

Letters: b batch, t time, h heads, g key-value heads, r = h / g, d width of q and k, e width of v, n chunks, c
tokens to a chunk.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lintra.ops import checks
from lintra.ops.autocast import no_autocast
from lintra.ops.gated import check_state
from lintra.ops.linear_attention.chunked import fading, into_chunks
from lintra.ops.padding import zero_padding


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The delta rule, from a state and to a state.

    q [b t h d], k [b t g d], v [b t g e], beta [b t g], log_decay [b t g] <= 0 (a natural logarithm; None: no
    decay), state [b g d e] -> y [b t h e] in v's dtype and the state after the last token, float32 (float64
    for float64 inputs), or bfloat16 as the given one: see `LinearState`. Query head j reads key-value head j
    // (h / g). `mask` [b t] is True for real tokens: padded ones neither decay the state nor write to it, and
    their y is 0. chunk: tokens to a block; changes speed, not the result. Raises ValueError or TypeError for
    arguments that disagree."""
    _validate(q, k, v, beta, log_decay, state, mask, chunk)
    dtype = v.dtype
    log_decay = torch.zeros_like(beta) if log_decay is None else log_decay
    wide = (x.to(checks.sum_dtype(dtype)) for x in (q, k, v, beta, log_decay))
    q, k, v, beta, log_decay = zero_padding(mask, *wide)
    if state is None:
        state = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[3])
    kept, state = state.dtype, state.to(q.dtype)
    with no_autocast(q):
        if q.shape[1] == 1:
            y, state = delta_rule_reference(q, k, v, beta, log_decay, state)
        else:
            y, state = _chunked(q, k, v, beta, log_decay, state, chunk)
    return y.to(dtype), state.to(kept)


def delta_rule_reference(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    beta: Float[Tensor, "b t g"],
    log_decay: Float[Tensor, "b t g"],
    state: Float[Tensor, "b g d e"],
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g d e"]]:
    """The recurrence as printed at the top, token by token."""
    q = q.unflatten(2, (k.shape[2], -1))  # [b t g r d]
    ys = [q.new_zeros(q.shape[0], 0, *q.shape[2:4], v.shape[3])]
    for i in range(q.shape[1]):
        state = log_decay[:, i, :, None, None].exp() * state
        missing = v[:, i] - torch.einsum("bgde,bgd->bge", state, k[:, i])
        state = state + torch.einsum("bg,bgd,bge->bgde", beta[:, i], k[:, i], missing)
        ys.append((q[:, i] @ state)[:, None])
    return torch.cat(ys, 1).flatten(2, 3), state


def _chunked(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    beta: Float[Tensor, "b t g"],
    log_decay: Float[Tensor, "b t g"],
    state: Float[Tensor, "b g d e"],
    chunk: int,
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g d e"]]:
    """Chunks of tokens, each solved as a triangle, and a state carried between them."""
    t, h, g = *q.shape[1:3], k.shape[2]
    r, c = h // g, max(1, min(chunk, t))
    q = into_chunks(q.unflatten(2, (g, r)), c).flatten(3, 4)  # [b g n cr d]: time, then the heads of a group
    k, v, beta = into_chunks(k, c), into_chunks(v, c), into_chunks(beta, c)[..., None]
    log_decay = into_chunks(log_decay, c)
    since, left = log_decay.cumsum(-1).exp()[..., None], fading(log_decay)
    among = (beta * (k @ k.mT) * left).tril(-1)
    sides = torch.cat((v, since * k), -1) * beta
    solved = torch.linalg.solve_triangular(among, sides, upper=False, unitriangular=True)
    written, erased = solved.split((v.shape[-1], k.shape[-1]), -1)  # new = written - erased kv_0
    late = (k * left[..., -1, :, None]).mT  # [b g n d c]: keys as they have faded at the end
    kept = since[..., -1:, :] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - late @ erased
    states = [state]
    for carry, added in zip(kept.unbind(2), (late @ written).unbind(2), strict=True):
        states.append(carry @ states[-1] + added)
    before = torch.stack(states, 2)[:, :, :-1]  # [b g n d e]
    scores = (q @ k.mT) * left.repeat_interleave(r, -2)
    y = scores @ (written - erased @ before) + (q * since.repeat_interleave(r, -2)) @ before
    return y.unflatten(3, (c, r)).flatten(2, 3)[:, :, :t].movedim(1, 2).flatten(2, 3), states[-1]


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    chunk: int,
) -> None:
    sizes: dict[str, int] = {}
    checks.qkv(q, k, v, mask, sizes, same_length=True)
    checks.heads(sizes["h"], sizes["g"])
    for name, x in (("beta", beta), ("log_decay", log_decay)):
        if x is not None:
            checks.shape(name, x, "b s g", sizes)
            checks.floating(name, x)
    check_state(state, q, sizes)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    if log_decay is not None:
        checks.decay(log_decay, mask, finite=False)

"""The causal sum whose state forgets every feature at a rate of its own: the definition, by halves, one step.

    kv_t = diag(exp(log_decay_t)) kv_{t-1} + k_t v_t^T      y_t = kv_t^T q_t

Yang et al. 2024, arXiv:2312.06635, section 4. With b the elapsed decay, the weight of key s for query t is
sum_d q_td k_sd exp(b_td - b_sd), which no single product of matrices gives without exp(-b), and that
overflows. Between two neighbouring runs of tokens it splits at their border, exp(b_t - border) and
exp(border - b_s), both at most 1. So the later half of each pair of runs reads the earlier one by two
products: runs of one token first, then of two, four, up to half a chunk.

Letters: b batch, t time, h heads, g key-value heads, r = h / g, d width of q and k, e width of v, n chunks, c
tokens to a chunk.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lintra.ops import checks
from lintra.ops.autocast import no_autocast
from lintra.ops.linear_attention.chunked import into_chunks, scan_chunks
from lintra.ops.padding import zero_padding


def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The sum, from a state and to a state, without a denominator.

    q [b t h d], k [b t g d], v [b t g e], log_decay [b t g d] <= 0 (natural logarithms), state [b g d e] -> y
    [b t h e] in v's dtype and the state after the last token, float32 (float64 for float64 inputs), or
    bfloat16 as the given one: see `LinearState`. Query head j reads key-value head j // (h / g). `mask` [b t]
    is True for real tokens: padded ones neither decay the state nor write to it, and their y is 0. chunk:
    tokens to a block, a power of two; changes speed, not the result. Raises ValueError or TypeError for
    arguments that disagree."""
    _validate(q, k, v, log_decay, state, mask, chunk)
    dtype = v.dtype
    wide = (x.to(checks.sum_dtype(dtype)) for x in (q, k, v, log_decay))
    q, k, v, log_decay = zero_padding(mask, *wide)
    if state is None:
        state = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[3])
    kept, state = state.dtype, state.to(q.dtype)
    with no_autocast(q):
        if q.shape[1] == 1:
            y, state = _step(q, k, v, log_decay, state)
        else:
            y, state = _chunked(q, k, v, log_decay, state, chunk)
    return y.to(dtype), state.to(kept)


def gated_attention_reference(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    log_decay: Float[Tensor, "b t g d"],
    state: Float[Tensor, "b g d e"],
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g d e"]]:
    """The definition, O(t^2 d): what is left of every key at every query, then the future struck out."""
    t, g = q.shape[1], k.shape[2]
    q = q.unflatten(2, (g, -1))  # [b t g r d]
    ahead = torch.ones(t, t, dtype=torch.bool, device=q.device).triu()
    # [b t s g d]. Sums of their own, not differences: beside a decay of 0 those would be inf - inf.
    faded = log_decay[:, :, None].expand(-1, -1, t, -1, -1).masked_fill(ahead[..., None, None], 0.0).cumsum(1)
    left = faded.masked_fill(ahead.triu(1)[..., None, None], -math.inf).exp()
    scores = torch.einsum("btgrd,bsgd,btsgd->btgrs", q, k, left)
    y = torch.einsum("btgrs,bsge->btgre", scores, v)
    y = y + torch.einsum("btgrd,btgd,bgde->btgre", q, log_decay.cumsum(1).exp(), state)
    later = torch.cat((log_decay[:, 1:], torch.zeros_like(log_decay[:, :1])), 1).flip(1).cumsum(1).flip(1)
    whole = log_decay.sum(1)
    added = torch.einsum("bsgd,bsge->bgde", k * later.exp(), v)
    return y.flatten(2, 3), whole.exp()[..., None] * state + added


def _step(
    q: Float[Tensor, "b 1 h d"],
    k: Float[Tensor, "b 1 g d"],
    v: Float[Tensor, "b 1 g e"],
    log_decay: Float[Tensor, "b 1 g d"],
    state: Float[Tensor, "b g d e"],
) -> tuple[Float[Tensor, "b 1 h e"], Float[Tensor, "b g d e"]]:
    """The recurrence as printed at the top, for one token."""
    state = log_decay[:, 0, :, :, None].exp() * state + k[:, 0, :, :, None] * v[:, 0, :, None]
    y = q[:, 0].unflatten(1, (k.shape[2], -1)) @ state  # [b g r e]
    return y.flatten(1, 2)[:, None], state


def _chunked(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    log_decay: Float[Tensor, "b t g d"],
    state: Float[Tensor, "b g d e"],
    chunk: int,
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g d e"]]:
    """Chunks of tokens, halved inside, and a state carried between them."""
    t, g = q.shape[1], k.shape[2]
    c = min(chunk, 1 << max(0, t - 1).bit_length()) if isinstance(t, int) else chunk
    q = into_chunks(q.unflatten(2, (g, -1)), c)  # [b g n c r d]
    k, v = into_chunks(k, c), into_chunks(v, c)
    y, since, until = _within(q, k, v, into_chunks(log_decay, c))
    added = (k * until.exp()).mT @ v  # [b g n d e]
    states = scan_chunks(added, state, since[..., -1, :])  # [b g n+1 d e]
    y = y + _read(q * since.exp()[..., None, :], states[:, :, :-1])
    return y.flatten(2, 3)[:, :, :t].movedim(1, 2).flatten(2, 3), states[:, :, -1].clone()


def _within(
    q: Float[Tensor, "*b c r d"],
    k: Float[Tensor, "*b c d"],
    v: Float[Tensor, "*b c e"],
    log_decay: Float[Tensor, "*b c d"],
) -> tuple[Float[Tensor, "*b c r e"], Float[Tensor, "*b c d"], Float[Tensor, "*b c d"]]:
    """Read the tokens of a chunk by each other, and return the decay since its start and until its end.

    From single tokens, which read themselves, to halves: the decays are sums and never differences, so they
    keep their digits beside a token that decays by a lot."""
    y = (q * k[..., None, :]).sum(-1, keepdim=True) * v[..., None, :]
    since, until = log_decay, torch.zeros_like(log_decay)
    half = 1
    while half < k.shape[-2]:
        _, q_late = _halves(q, half, -3)
        (k_early, _), (v_early, _) = _halves(k, half, -2), _halves(v, half, -2)
        (since_early, since_late), (until_early, until_late) = (_halves(x, half, -2) for x in (since, until))
        scores = _read(q_late * since_late.exp()[..., None, :], (k_early * until_early.exp()).mT)
        found = _read(scores, v_early)
        y = y + torch.stack((torch.zeros_like(found), found), -4).flatten(-5, -3)
        since = torch.stack((since_early, since_late + since_early[..., -1:, :]), -3).flatten(-4, -2)
        until = torch.stack((until_early + since_late[..., -1:, :], until_late), -3).flatten(-4, -2)
        half *= 2
    return y, since, until


def _halves(x: Tensor, half: int, axis: int) -> tuple[Tensor, Tensor]:
    """The earlier and the later `half` tokens of every two."""
    early, late = x.unflatten(axis, (-1, 2, half)).unbind(axis - 1)
    return early, late


def _read(rows: Float[Tensor, "*b c r i"], matrix: Float[Tensor, "*b i j"]) -> Float[Tensor, "*b c r j"]:
    return (rows.flatten(-3, -2) @ matrix).unflatten(-2, rows.shape[-3:-1])


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    chunk: int,
) -> None:
    sizes: dict[str, int] = {}
    checks.qkv(q, k, v, mask, sizes, same_length=True)
    checks.heads(sizes["h"], sizes["g"])
    checks.shape("log_decay", log_decay, "b s g d", sizes)
    checks.floating("log_decay", log_decay)
    check_state(state, q, sizes)
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk must be a power of two, got {chunk}")
    checks.decay(log_decay, mask, finite=False)


def check_state(state: Tensor | None, q: Tensor, sizes: dict[str, int]) -> None:
    """Raises unless the state [b g d e] goes with q."""
    if state is None:
        return
    checks.shape("state", state, "b g d e", sizes)
    checks.state_dtype("state", state, q)

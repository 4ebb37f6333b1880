"""Linear attention in plain PyTorch at linear cost: causal in chunks, bidirectional, one token.

**Decay.** With b the elapsed decay, the weight of key s for query t is sum_f q_tf k_sf exp(b_tf - b_sf). A
number for each head multiplies the product of matrices. For decays of every feature no single product gives
it without exp(-b), which overflows. Between two neighbouring runs of tokens it splits at their border,
exp(b_t - border) and exp(border - b_s), both at most 1: the later half of each pair of runs reads the earlier
one by a product, runs of one token first, then of two, four, up to half a chunk (the secondary chunks of Yang
et al. 2024, arXiv:2312.06635, section 4.3, carried to the end).

**The delta rule.** Within a chunk the values written depend on each other, in a triangle:

    (I + A) written = beta (v - exp(b) k kv_0)      A_ts = beta_t k_t . k_s exp(b_t - b_s) for s < t

Solved for both terms at once, for all chunks (the WY representation of Yang et al. 2024, arXiv:2406.06484,
section 3), it leaves one product by an f x f matrix a chunk to do in order.

Letters as in `reference`, and n chunks, c tokens to a chunk.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lintra.ops.linear_attention.reference import LinearAttentionOutputs, LinearState


def linear_attention_chunked(
    q: Float[Tensor, "b t h f"],
    k: Float[Tensor, "b t g f"],
    v: Float[Tensor, "b t g e"],
    log_decay: Float[Tensor, "b t g"] | None,
    log_input: Float[Tensor, "b t g"] | None,
    state: LinearState,
    chunk: int,
) -> LinearAttentionOutputs:
    """Causal linear attention with quadratic blocks of `chunk` tokens and a state carried between them.

    What a chunk adds to the state is one matrix product for all chunks at once.
    """
    t, h, g = *q.shape[1:3], k.shape[2]
    r, c = h // g, max(1, min(chunk, t)) if isinstance(t, int) else chunk
    future = torch.ones(c, c, dtype=torch.bool, device=q.device).triu(1).repeat_interleave(r, 0)
    q = into_chunks(q.unflatten(2, (g, r)), c).flatten(3, 4)  # [b g n cr f]: time, then the heads of a group
    k, v = into_chunks(k, c), into_chunks(v, c)  # [b g n c f], [b g n c e]
    scores = q @ k.mT  # [b g n cr c]
    faded = None
    if log_decay is None and log_input is None:
        scores = scores.masked_fill(future, 0.0)
        added_k = k
    else:
        log_input = k.new_zeros(k.shape[:4]) if log_input is None else into_chunks(log_input, c)
        log_decay = None if log_decay is None else into_chunks(log_decay, c)
        weight = log_input[..., None, :].expand(*log_input.shape, c)
        weight = weight if log_decay is None else weight + _faded(log_decay)
        # Masked before the exponential: after it, inf * 0 would be NaN in the gradient.
        scores = scores * weight.repeat_interleave(r, -2).masked_fill(future, -math.inf).exp()
        added_k = k * weight[..., -1, :, None].exp()  # the state keeps what the last token sees
        if log_decay is not None:
            elapsed = log_decay.cumsum(-1)  # [b g n c]
            q = q * elapsed.exp().repeat_interleave(r, -1)[..., None]
            faded = elapsed[..., -1]
    kv = _scan(added_k.mT @ v, state.kv, faded)  # [b g n+1 f e]
    z = _scan(added_k.sum(-2)[..., None], state.z[..., None], faded)[..., 0]  # [b g n+1 f]
    numerator = scores @ v + q @ kv[:, :, :-1]
    denominator = scores.sum(-1) + (q @ z[:, :, :-1, :, None])[..., 0]

    def join(x: Tensor) -> Tensor:
        """[b g n cr ...] -> [b t h ...]"""
        return x.unflatten(3, (c, r)).flatten(2, 3)[:, :, :t].movedim(1, 2).flatten(2, 3)

    final = LinearState(kv[:, :, -1].clone(), z[:, :, -1].clone())  # views would keep all of them
    return LinearAttentionOutputs(join(numerator), join(denominator), final)


def recurrence_chunked(
    q: Float[Tensor, "b t h f"],
    k: Float[Tensor, "b t g f"],
    v: Float[Tensor, "b t g e"],
    log_decay: Float[Tensor, "b t g #f"] | None,
    beta: Float[Tensor, "b t g"] | None,
    state: Float[Tensor, "b g f e"],
    chunk: int,
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g f e"]]:
    """The sum or, with beta, the delta rule, without a denominator: chunks and a state between them."""
    t, g, f = q.shape[1], *k.shape[2:]
    halved = log_decay is not None and log_decay.shape[-1] > 1
    chunk = 1 << (chunk.bit_length() - 1) if halved else chunk
    longest = 1 << max(0, t - 1).bit_length() if isinstance(t, int) else chunk
    c = min(chunk, longest)
    q = into_chunks(q.unflatten(2, (g, -1)), c)  # [b g n c r f]
    k, v = into_chunks(k, c), into_chunks(v, c)
    log_decay = k.new_zeros(*k.shape[:-1], 1) if log_decay is None else into_chunks(log_decay, c)
    readers = [q] if beta is None else [q, k[..., None, :]]
    elapsed, remaining, scores = (_halved if halved else _weighted)(readers, k, log_decay)
    since, until = elapsed.exp(), remaining.exp()
    late = (k * until).mT  # [b g n f c]: keys as they have faded at the end
    if beta is None:
        written = v
        before = scan_chunks(late @ v, state, elapsed[..., -1, :])
        before, state = before[:, :, :-1], before[:, :, -1].clone()
    else:
        rate = into_chunks(beta, c)[..., None]
        among = (rate * scores[1][..., 0, :]).tril(-1)
        sides = torch.cat((v, since * k), -1) * rate
        solved = torch.linalg.solve_triangular(among, sides, upper=False, unitriangular=True)
        new, erased = solved.split((v.shape[-1], f), -1)  # written = new - erased kv_0
        kept = since[..., -1, :, None] * torch.eye(f, dtype=k.dtype, device=k.device) - late @ erased
        states = [state]
        for carry, added in zip(kept.unbind(2), (late @ new).unbind(2), strict=True):
            states.append(carry @ states[-1] + added)
        state, before = states[-1], torch.stack(states, 2)[:, :, :-1]  # [b g n f e]
        written = new - erased @ before
    y = _rows_times(scores[0], written) + _rows_times(q * since[..., None, :], before)
    return y.flatten(2, 3)[:, :, :t].movedim(1, 2).flatten(2, 3), state


def _weighted(
    readers: list[Float[Tensor, "*b c r f"]], k: Float[Tensor, "*b c f"], log_decay: Float[Tensor, "*b c 1"]
) -> tuple[Float[Tensor, "*b c 1"], Float[Tensor, "*b c 1"], list[Float[Tensor, "*b c r c"]]]:
    """Return the log decay since the start of a chunk and until its end, and what readers see of keys."""
    faded = _faded(log_decay[..., 0])
    left = faded.exp().tril()
    scores = [_rows_times(x, k.mT) * left[..., None, :] for x in readers]
    return log_decay.cumsum(-2), faded[..., -1, :, None], scores


def _halved(
    readers: list[Float[Tensor, "*b c r f"]], k: Float[Tensor, "*b c f"], log_decay: Float[Tensor, "*b c f"]
) -> tuple[Float[Tensor, "*b c f"], Float[Tensor, "*b c f"], list[Float[Tensor, "*b c r c"]]]:
    """Like `_weighted`, with decays of every feature: from single tokens, which read themselves, to halves.

    The decays are sums and never differences, so they keep their digits beside a token that decays by a
    lot."""
    scores = [(x * k[..., None, :]).sum(-1)[..., None, :, None] for x in readers]  # [.. runs half r half]
    since, until = log_decay, torch.zeros_like(log_decay)
    half = 1
    while half < k.shape[-2]:
        (k_early, _), (since_early, since_late), (until_early, until_late) = (
            _halves(x, half, -2) for x in (k, since, until)
        )
        keys = (k_early * until_early.exp()).mT
        for i, x in enumerate(readers):
            across = _rows_times(_halves(x, half, -3)[1] * since_late.exp()[..., None, :], keys)
            early, late = scores[i].unflatten(-4, (-1, 2)).unbind(-4)
            above = torch.cat((early, torch.zeros_like(early)), -1)
            scores[i] = torch.cat((above, torch.cat((across, late), -1)), -3)
        since = torch.stack((since_early, since_late + since_early[..., -1:, :]), -3).flatten(-4, -2)
        until = torch.stack((until_early + since_late[..., -1:, :], until_late), -3).flatten(-4, -2)
        half *= 2
    return since, until, [x.squeeze(-4) for x in scores]


def _halves(x: Tensor, half: int, axis: int) -> tuple[Tensor, Tensor]:
    """Return the earlier and the later `half` tokens of every two runs."""
    early, late = x.unflatten(axis, (-1, 2, half)).unbind(axis - 1)
    return early, late


def _rows_times(
    rows: Float[Tensor, "*b c r i"], matrix: Float[Tensor, "*b i j"]
) -> Float[Tensor, "*b c r j"]:
    return (rows.flatten(-3, -2) @ matrix).unflatten(-2, rows.shape[-3:-1])


def into_chunks(x: Float[Tensor, "b t g *rest"], c: int) -> Float[Tensor, "b g n c *rest"]:
    """Cut time into chunks of `c`, the last one filled with zeros (which add nothing to any sum)."""
    t = x.shape[1]
    n = (t + c - 1) // c
    if not isinstance(t, int):  # n c = t + missing cannot be proved in an exported graph of any length
        places = torch.arange(n * c, device=x.device)
        behind = (places >= t).reshape(-1, *[1] * (x.dim() - 2))
        x = x.index_select(1, places.clamp(max=t - 1)).masked_fill(behind, 0.0)
    elif missing := n * c - t:
        x = torch.cat((x, x.new_zeros(x.shape[0], missing, *x.shape[2:])), 1)
    return x.unflatten(1, (n, c)).movedim(3, 1)


def _scan(
    added: Float[Tensor, "b g n f e"],
    start: Float[Tensor, "b g f e"],
    log_decay: Float[Tensor, "b g n"] | None,
) -> Float[Tensor, "b g m f e"]:
    """Return the states before each of n chunks and after the last one, m = n + 1."""
    if log_decay is None:
        return torch.cat((start[:, :, None], added), 2).cumsum(2)
    return scan_chunks(added, start, log_decay[..., None])


def scan_chunks(
    added: Float[Tensor, "b g n f e"], start: Float[Tensor, "b g f e"], log_decay: Float[Tensor, "b g n #f"]
) -> Float[Tensor, "b g m f e"]:
    """Return the states before each chunk and after the last, where chunks fade by feature or all alike.

    Where n is a symbol, in an exported graph of any length, nothing can loop over the chunks: every state is
    then a sum over all of them, each decayed as far as it has, O(n^2)."""
    if isinstance(added.shape[2], int):
        states = [start]
        # Not by index: the gradient of each would be an array for all chunks.
        for kept, new in zip(log_decay.exp()[..., None].unbind(2), added.unbind(2), strict=True):
            states.append(kept * states[-1] + new)
        return torch.stack(states, 2)
    added = torch.cat((start[:, :, None], added), 2)
    log_decay = torch.cat((torch.zeros_like(log_decay[:, :, :1]), log_decay), 2)
    return (fading(log_decay.mT) @ added.movedim(3, 2)).movedim(2, 3)


def fading(log_decay: Float[Tensor, "*b c"]) -> Float[Tensor, "*b c c"]:
    """Return the part that is left at each token of every earlier one; 0 for later ones."""
    c = log_decay.shape[-1]
    future = torch.ones(c, c, dtype=torch.bool, device=log_decay.device).triu(1)
    return _faded(log_decay).masked_fill(future, -math.inf).exp()


def _faded(log_decay: Float[Tensor, "*b c"]) -> Float[Tensor, "*b c c"]:
    """Return the logarithm of `fading` for the earlier tokens, 0 for the others.

    Every entry is a sum of its own and no difference of two: the decays keep their digits beside a token
    that decays by a lot."""
    c = log_decay.shape[-1]
    future = torch.ones(c, c, dtype=torch.bool, device=log_decay.device).triu()
    return log_decay[..., None].expand(*log_decay.shape, c).masked_fill(future, 0.0).cumsum(-2)


def linear_attention_bidirectional(
    q: Float[Tensor, "b t h f"],
    k: Float[Tensor, "b s g f"],
    v: Float[Tensor, "b s g e"],
    log_decay: Float[Tensor, "b s g"] | None,
    log_input: Float[Tensor, "b s g"] | None,
    state: LinearState,
) -> LinearAttentionOutputs:
    """Every query reads the totals over all keys: two matrix products. (log_decay is None: validated.)"""
    if log_input is not None:
        k = k * log_input.exp()[..., None]
    kv = state.kv + k.permute(0, 2, 3, 1) @ v.movedim(1, 2)
    z = state.z + k.sum(1)
    return _read(q, LinearState(kv, z))


def linear_attention_step(
    q: Float[Tensor, "b 1 h f"],
    k: Float[Tensor, "b 1 g f"],
    v: Float[Tensor, "b 1 g e"],
    log_decay: Float[Tensor, "b 1 g"] | None,
    log_input: Float[Tensor, "b 1 g"] | None,
    state: LinearState,
) -> LinearAttentionOutputs:
    """The recurrence of `reference`, for one token."""
    kv, z = state
    if log_decay is not None:
        kept = log_decay[:, 0].exp()[..., None]
        kv, z = kept[..., None] * kv, kept * z
    return linear_attention_bidirectional(q, k, v, None, log_input, LinearState(kv, z))


def _read(q: Float[Tensor, "b t h f"], state: LinearState) -> LinearAttentionOutputs:
    q = q.unflatten(2, (state.z.shape[1], -1)).permute(0, 2, 1, 3, 4)  # [b g t r f]
    rows = q.flatten(2, 3)
    numerator = (rows @ state.kv).unflatten(2, q.shape[2:4])
    denominator = (rows @ state.z[..., None]).unflatten(2, q.shape[2:4])[..., 0]
    return LinearAttentionOutputs(
        numerator.movedim(1, 2).flatten(2, 3), denominator.movedim(1, 2).flatten(2, 3), state
    )

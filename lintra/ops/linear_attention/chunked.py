"""Linear attention in plain PyTorch at linear cost: causal in chunks, bidirectional, one token.

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
        # Struck out before the exponential: after it, inf * 0 would be NaN in the gradient.
        scores = scores * weight.repeat_interleave(r, -2).masked_fill(future, -math.inf).exp()
        added_k = k * weight[..., -1, :, None].exp()  # what the last token sees is what the state keeps
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


def into_chunks(x: Float[Tensor, "b t g *rest"], c: int) -> Float[Tensor, "b g n c *rest"]:
    """Cut time into chunks of `c`, the last one filled with zeros (which add nothing to any sum)."""
    t = x.shape[1]
    n = (t + c - 1) // c
    if not isinstance(t, int):  # in an exported graph of any length, that n c = t + missing cannot be proved
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

    Where n is a symbol, in an exported graph of any length, nothing can walk through the chunks: every state
    is then a sum over all of them, each as far as it has faded, O(n^2)."""
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
    """Return what is left at each token of every earlier one; 0 of a later one."""
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

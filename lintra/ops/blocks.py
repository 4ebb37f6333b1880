"""Exact attention of blocks of queries to blocks of keys named in lists: no score outside of them is
computed.

Zaheer et al. 2020, arXiv:2007.14062, appendix D. Every block of queries has a list of blocks of keys for each
key-value head, which are gathered and read at once. Letters: b batch, t queries, s keys, h heads, g key-value
heads, r = h / g, d width of q and k, e width of v, c tokens to a block, n blocks of queries, m of keys, l
entries of a list.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from lintra.ops import checks
from lintra.ops.autocast import without_autocast
from lintra.ops.softmax_attention import PartialAttention, fused_attention, softmax_attention
from lintra.ops.softmax_native import by_all_scores, runs_natively, softmax_native


@without_autocast
def block_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    blocks: Int[Tensor, "#b g n l"],
    listed: Bool[Tensor, "#b #g n l"],
    *,
    block: int,
    own: Int[Tensor, "#b n"] | None = None,
    visible: Bool[Tensor, "b s"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b t h e"]:
    """Attention of every query to the `visible` keys of the blocks on its own block's list; 0 without any.

    Block j has the places j c .. (j + 1) c - 1, c = `block`. An entry that is not `listed` is ignored
    but must name a block; a block listed twice counts twice. `own` makes it causal: one more block, of
    which the query at offset i sees the keys at offsets up to i. `scale` multiplies q . k and has no unit
    (default d**-0.5); dropout drops weights. Hidden places of k and v must be finite. Memory O(t l c), in
    C++ O(t + s). Raises ValueError unless t and s are multiples of c.
    """
    _validate(q, k, v, blocks, listed, block, own, visible)
    where: dict[str, Any] = {
        "blocks": blocks,
        "listed": listed,
        "own": own,
        "unit": block,
        "visible": visible,
    }
    if runs_natively(q, k, v, dropout):
        return softmax_native(q, k, v, "blocks", scale=scale, **where).o.to(v.dtype)
    y = fused_attention(**_gathered(q, k, v, **where), scale=scale, dropout=dropout)
    return _scattered(y, q.shape, k.shape[2], block)


def block_attention_reference(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    blocks: Int[Tensor, "#b g n l"],
    listed: Bool[Tensor, "#b #g n l"],
    *,
    block: int,
    own: Int[Tensor, "#b n"] | None = None,
    visible: Bool[Tensor, "b s"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b t h e"]:
    """The definition, O(t s): every score plus the logarithm of how often it counts."""
    r, n, m = q.shape[2] // k.shape[2], q.shape[1] // block, k.shape[1] // block
    counts = (functional.one_hot(blocks, m) * listed[..., None]).sum(-2)
    times = counts.repeat_interleave(block, -2).repeat_interleave(block, -1)  # b g t s
    if own is not None:
        named = functional.one_hot(own, m).repeat_interleave(block, -2).repeat_interleave(block, -1)
        past = torch.ones(block, block, dtype=torch.int64, device=q.device).tril().repeat(n, m)
        times = times + (named * past)[:, None]
    if visible is not None:
        times = times * visible[:, None, None]
    times = times.repeat_interleave(r, 1) if times.shape[1] > 1 else times
    k, v = (x.repeat_interleave(r, 2).movedim(1, 2) for x in (k, v))
    often = times.clamp(min=1).to(k.dtype).log()
    partial = softmax_attention(q.movedim(1, 2), k, v, visible=times > 0, bias=often, scale=scale)
    return partial.o.movedim(1, 2)


def random_ranks(
    seeds: Int[Tensor, "g r"], row: Int[Tensor, "b n"], others: Int[Tensor, "b n"]
) -> Int[Tensor, "b g n r"]:
    """r different numbers in 0 .. others - 1 for each row, uniform; any at all once `others` have been taken.

    They depend on the seeds, below 2^32, on the number of the row and on `others` alone: nothing is stored
    for a longest sequence.
    """
    taken = seeds.new_empty(*row.shape[:1], seeds.shape[0], row.shape[1], 0)
    for i, fallen in enumerate(hash_uint32(seeds, row).unbind(-1)):
        # A place among those that are left; every taken one before it moves it on.
        rank = fallen * (others - i).clamp(min=1)[:, None] >> 32
        for each in taken.sort(-1).values.unbind(-1):
            rank = rank + (rank >= each)
        taken = torch.cat((taken, rank[..., None]), -1)
    return taken


def hash_uint32(seeds: Int[Tensor, "g r"], row: Int[Tensor, "b n"]) -> Int[Tensor, "b g n r"]:
    """Return a number below 2^32 for every seed and row, always the same one."""
    return _mixed(seeds[:, None] ^ _mixed(row)[:, None, :, None])


def take_blocks(x: Tensor, which: Int[Tensor, "b n"], block: int) -> Tensor:
    """Return the blocks of x [b t ...] with the numbers `which`, one after another."""
    m = x.shape[1] // block
    first = m * torch.arange(x.shape[0], device=x.device)[:, None]
    found = x.unflatten(1, (m, block)).flatten(0, 1).index_select(0, (first + which).flatten())
    return found.unflatten(0, which.shape).flatten(1, 2)


def pad_time(x: Tensor, time: int) -> Tensor:
    """Return x [b t ...] with zeros up to that time."""
    return functional.pad(x, (0, 0) * (x.dim() - 2) + (0, time - x.shape[1]))


@by_all_scores("blocks")
def _by_all_scores(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **where: Any) -> PartialAttention:
    o, logsumexp = softmax_attention(**_gathered(q, k, v, **where), scale=scale)
    o, logsumexp = (_scattered(x, q.shape, k.shape[2], where["unit"]) for x in (o, logsumexp[..., None]))
    return PartialAttention(o, logsumexp[..., 0])


def _gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    blocks: Tensor,
    listed: Tensor,
    own: Tensor | None,
    unit: int,
    visible: Tensor | None,
    **_: Any,
) -> dict[str, Any]:
    """q [bg n rc d], k and v [bg n lc _] of its list, `visible` [bg n rc lc] or with ones in front."""
    b, g, n, m = q.shape[0], k.shape[2], q.shape[1] // unit, k.shape[1] // unit
    r = q.shape[2] // g
    seen = listed.repeat_interleave(unit, -1)[..., None, :]  # b g n rc lc
    if own is not None:
        past = torch.ones(unit, unit, dtype=torch.bool, device=q.device).tril().repeat(r, 1)
        seen = _join(seen, past)
        blocks = _join(blocks, own[:, None, :, None])
    if visible is not None:
        sample = torch.arange(b, device=q.device)[:, None, None, None]
        seen = seen & visible.unflatten(1, (m, unit))[sample, blocks].flatten(-2)[..., None, :]
    if seen.shape[:2] != (1, 1):
        seen = seen.expand(b, g, -1, -1, -1)
    q = q.unflatten(2, (g, r)).unflatten(1, (n, unit)).permute(0, 3, 1, 4, 2, 5).flatten(3, 4).flatten(0, 1)
    return {
        "q": q,
        "k": _gather(k, blocks, unit),
        "v": _gather(v, blocks, unit),
        "visible": seen.flatten(0, 1),
    }


def _scattered(y: Float[Tensor, "bg n rc w"], shape: torch.Size, g: int, unit: int) -> Tensor:
    """Return results of blocks of queries as those of queries of a shape [b t h d]: [b t h w]."""
    b, _, h, _ = shape
    y = y.unflatten(2, (h // g, unit)).unflatten(0, (b, g)).permute(0, 2, 4, 1, 3, 5)  # b n c g r w
    return y.flatten(3, 4).flatten(1, 2)


def _join(x: Tensor, y: Tensor) -> Tensor:
    """Both in a row of the last axis, the other axes broadcast."""
    shape = torch.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    return torch.cat((x.expand(*shape, -1), y.expand(*shape, -1)), -1)


def _gather(
    x: Float[Tensor, "b s g w"], blocks: Int[Tensor, "#b g n l"], block: int
) -> Float[Tensor, "bg n lc w"]:
    """The tokens of the blocks on each list."""
    b, s, g, w = x.shape
    n, entries, m = *blocks.shape[2:], s // block
    first = m * torch.arange(b * g, device=x.device).reshape(b, g, 1, 1)
    rows = x.unflatten(1, (m, block)).permute(0, 3, 1, 2, 4).reshape(b * g * m, block * w)
    return rows.index_select(0, (first + blocks).flatten()).reshape(b * g, n, entries * block, w)


def _mixed(x: Tensor) -> Tensor:
    """x below 2^32 -> another such number, one to one; each bit depends on all of x."""
    for shift, factor in ((16, 0x4F1BBCDD), (15, 0x3504F335)):  # odd, and no product reaches 2^63
        x = ((x ^ x >> shift) * factor) & 0xFFFFFFFF
    return x ^ x >> 16


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    listed: Tensor,
    block: int,
    own: Tensor | None,
    visible: Tensor | None,
) -> None:
    """Raise ValueError or TypeError for arguments of `block_attention` that disagree."""
    sizes: dict[str, int] = {}
    checks.qkv(q, k, v, visible, sizes, same_length=False, mask_name="visible")
    checks.heads(sizes["h"], sizes["g"])
    if block < 1:
        raise ValueError(f"block must be at least 1 token, got {block}")
    for name, letter in (("q", "t"), ("k", "s")):
        if sizes[letter] % block:
            raise ValueError(f"{name} must be whole blocks of {block} tokens, got {letter}={sizes[letter]}")
    sizes |= {"n": sizes["t"] // block, "m": sizes["s"] // block, "l": blocks.shape[-1]}
    for name, x, letters in (
        ("blocks", blocks, "b g n l"),
        ("listed", listed, "b g n l"),
        ("own", own, "b n"),
    ):
        if x is not None:
            shared = {
                a: 1 for a, size in zip(letters.split(), x.shape, strict=False) if size == 1 and a in "bg"
            }
            checks.shape(name, x, letters, sizes | shared)
    for name, x in (("blocks", blocks), ("own", own)):
        if x is not None:
            checks.symbols(name, x, sizes["m"] - 1)
    if listed.dtype != torch.bool:
        raise TypeError(f"listed must be boolean, True for an entry that counts, got {listed.dtype}")

"""BigBird, block-sparse attention: Zaheer et al. 2020, arXiv:2007.14062, sections 2 and 3, appendix D.

Tokens are divided into blocks of c. A query of block i sees the keys of a set of blocks,

    the first and the last (global), i - 1, i, i + 1 (window), and r sampled at random from the others,

and softmax attention over them gives y; queries of the global blocks see all keys. Blocks count real tokens:
the last one is that of the sample's own length. The random ones are fixed at construction, by a few numbers
for each key-value head from which the blocks of any row and any length follow.

The causal form extends the paper: the same sets, of earlier tokens. Row i has the first block, the past part
of its window, r random earlier blocks, and its own block up to the query. None of this depends on later
tokens, so a generated token reads the same blocks from a cache of all keys and values.

Cost of t tokens: t w (d + e) multiplications and additions a head with w = (5 + r) c keys to a query, and
2 c t (d + e) for the global queries. A token generated: w (d + e).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional

from lintra.attention._scores import ScoredAttention
from lintra.attention._state import append
from lintra.attention.base import Capabilities
from lintra.config import fields
from lintra.ops.blocks import block_attention, pad_time, random_ranks, take_blocks
from lintra.ops.layout import Layout
from lintra.ops.padding import real_tokens, take, take_by_head
from lintra.ops.softmax_attention import softmax_attention


@dataclass(frozen=True, kw_only=True)
class Config:
    """BigBird, block-sparse attention."""

    block: int = 64  # tokens to a block
    random_blocks: int = 3  # random blocks that a row sees beside the others
    window_blocks: int = 3  # around each block, itself included; odd
    left_blocks: int = 1  # global blocks at the beginning: all see them, they see all
    right_blocks: int | None = None  # the same at the end; None: 1, or 0 where causal
    random_limit: int | None = None  # random blocks are taken from this many first tokens; None: from all
    seed: int = 0  # of the random blocks
    scale: float | None = None  # multiplies the scores; no unit; None: (size of a head) ** -0.5
    dropout: float = 0.0  # probability of dropping a weight in training

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, block=1, random_blocks=0, left_blocks=0, right_blocks=0)
        if self.window_blocks < 1 or self.window_blocks % 2 == 0:
            raise ValueError(f"window_blocks must be odd and at least 1, got {self.window_blocks}")
        if self.random_limit is not None and self.random_limit < self.block:
            raise ValueError(f"random_limit must be a block of {self.block} or more, got {self.random_limit}")
        fields.finite(self, "scale")
        fields.probability(self, "dropout")

    def build(self, **shape) -> "BigBirdAttention":
        return BigBirdAttention(self, **shape)


class BigBirdState(NamedTuple):
    """The cache: k [b s g d], v [b s g e] in the dtype they came in; order [b s], which of them is the real
    token at place 0, 1, ..; seen [b], how many are real."""

    k: Tensor
    v: Tensor
    order: Tensor
    seen: Tensor


class BigBirdAttention(ScoredAttention):
    """BigBird. State: the keys and values so far, of which a token reads a few blocks."""

    paper = "Zaheer et al. 2020, arXiv:2007.14062"
    can = Capabilities(
        causal=True, bidirectional=True, cross=False, recurrent=True, state="grows", cost="O(t w d)"
    )
    seeds: Tensor  # [g r]

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        if self.causal and config.right_blocks:
            raise ValueError(
                "right_blocks must be 0 or None where causal, as no token may see the end, "
                f"got {config.right_blocks}"
            )
        self.right = int(not self.causal) if config.right_blocks is None else config.right_blocks
        self.side = config.window_blocks // 2
        # As long as there are no more blocks than that, the set of every row is all of them.
        self.full = config.left_blocks + self.right + self.side + 1 + config.random_blocks
        if config.random_limit is not None:
            self.full = 1
        self._register_buffers(seeds=self._draw(torch.Generator("cpu").manual_seed(config.seed)))

    def redraw(self, generator: torch.Generator) -> None:
        self.seeds.copy_(self._draw(generator))

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **_: Any) -> Tensor:
        if self.causal:
            return super()._forward(q, k, v, layout)
        left = layout.left_align()
        if left is None:
            return self._both_ways(q, k, v, None)
        q, k, v = (left.gather(x) for x in (q, k, v))
        return left.restore(self._both_ways(q, k, v, left.mask))

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> BigBirdState:
        return BigBirdState(
            *self.no_tokens(batch, device, dtype),
            torch.empty(batch, 0, device=device, dtype=torch.int64),
            torch.zeros(batch, device=device, dtype=torch.int64),
        )

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: BigBirdState, layout: Layout, **_: Any
    ) -> tuple[Tensor, BigBirdState]:
        here = layout.after(state.seen).positions()
        after = _append(state, k, v, here)
        if q.shape[1] == 1:
            y = self._token(q, after, here)
        elif q.shape[1] and (layout.mask is not None or state.k.shape[1]):
            y = self._after(q, after, state, here)
        elif q.shape[1] <= self.full * self.config.block:
            y = self.attend(q, k, v, None, causal=True)
        else:
            y = self._past(q, k, v, state.seen.new_zeros(1))
        return y, after

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: BigBirdState, **_: Any
    ) -> tuple[Tensor, BigBirdState]:
        """One token, which reads the blocks of its row. The paper has no recurrence."""
        return BigBirdAttention._extend(self, q, k, v, state, Layout(q.shape[0], 1, q.device))

    def lists(
        self, row: Int[Tensor, "b n"], number: Int[Tensor, "b #n"]
    ) -> tuple[Int[Tensor, "b g n l"], Bool[Tensor, "b 1 n l"]]:
        """Return the blocks that these rows of `number` blocks see, as a list, and which entries count; none
        twice.

        When causal, the row's own block is not listed, and there are row + 1 blocks for it.
        """
        left, limit = self.config.left_blocks, self.config.random_limit
        number = row + 1 if self.causal else number.expand_as(row)
        low, high, last = row - self.side, row + self.side + 1, number - self.right
        around = torch.arange(-self.side, 0 if self.causal else self.side + 1, device=row.device)
        window = row[..., None] + around
        ends = torch.arange(left + self.right, device=row.device).expand(*row.shape, -1)
        ends = torch.where(ends < left, ends, last[..., None] + ends - left)
        # Right ones that are left ones too, and those in the window, have been named.
        new = (torch.arange(left + self.right, device=row.device) < left) | (ends >= left)
        new = new & ((ends < low[..., None]) | (ends >= high[..., None]))
        fixed = torch.cat((window, ends), -1)
        counts = torch.cat((torch.ones_like(window, dtype=torch.bool), new), -1)
        counts = counts & (fixed >= 0) & (fixed < number[..., None])
        # The others stand before and after the window: a rank among them is a block.
        end = last if limit is None else last.clamp(max=limit // self.config.block)
        before = (torch.minimum(low, end) - left).clamp(min=0)
        resume = high.clamp(min=left)
        others = before + (end - resume).clamp(min=0)
        rank, beyond = random_ranks(self.seeds, row, others), (resume - before)[:, None, :, None]
        sampled = torch.where(rank < before[:, None, :, None], left + rank, beyond + rank)
        enough = torch.arange(self.config.random_blocks, device=row.device) < others[..., None]
        blocks = torch.cat((fixed[:, None].expand(-1, self.kv_heads, -1, -1), sampled), -1)
        listed = torch.cat((counts, enough), -1)[:, None]
        return blocks.masked_fill(~listed, 0), listed

    def _both_ways(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Bidirectional, real tokens first: every row by its list, then the global ones."""
        c, (b, t) = self.config.block, q.shape[:2]
        if t <= self.full * c:
            return self.attend_all(q, k, v, real)
        n = -(-t // c)
        row = torch.arange(n, device=q.device)[None]
        number = row.new_full((1, 1), n) if real is None else -(-real.sum(1, keepdim=True) // c)
        if real is None and t % c:
            real = real_tokens(None, q)
        q, k, v = (pad_time(x, n * c) for x in (q, k, v))
        real = None if real is None else pad_time(real, n * c)
        y = self._listed(q, k, v, *self.lists(row.expand(number.shape[0], -1), number), visible=real)
        if not self.config.left_blocks + self.right:
            return y[:, :t]
        left = row[:, : self.config.left_blocks].expand(number.shape[0], -1)
        ends = torch.cat((left, number - 1 - row[:, : self.right]), 1).clamp(min=0).expand(b, -1)
        both = torch.cat((y, self.attend_all(take_blocks(q, ends, c), k, v, real)), 1)
        where = row.expand(b, -1)
        for i in range(ends.shape[1]):
            where = where.masked_fill(row == ends[:, i : i + 1], n + i)
        return take_blocks(both, where, c)[:, :t]

    def _past(self, q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        """Causal: queries from the beginning of block `first` [b] or [1] on, keys from the beginning."""
        c, t = self.config.block, q.shape[1]
        n, m = -(-t // c), -(-k.shape[1] // c)
        row = first[:, None] + torch.arange(n, device=q.device)
        blocks, listed = self.lists(row, row)
        # Rows that are padding only may be later than all keys.
        blocks, own = blocks.clamp(max=m - 1), row.clamp(max=m - 1)
        q, k, v = pad_time(q, n * c), pad_time(k, m * c), pad_time(v, m * c)
        return self._listed(q, k, v, blocks, listed, own=own)[:, :t]

    def _after(self, q: Tensor, after: BigBirdState, state: BigBirdState, here: Tensor) -> Tensor:
        """Causal, after a state or with padding: by their places, the queries from a block's beginning on."""
        c, t, s = self.config.block, q.shape[1], state.k.shape[1]
        first = state.seen // c if s else state.seen.new_zeros(1)
        time = t + c - 1 if s else t
        places = c * first[:, None] + torch.arange(time, device=q.device)
        places = places.clamp(max=s + t - 1).expand(q.shape[0], -1)
        # Places without a query hold an arbitrary one, whose output is discarded.
        placed = take(q, (after.order.gather(1, places) - s).clamp(min=0))
        y = self._past(placed, take(after.k, after.order), take(after.v, after.order), first)
        return take(y, (here - c * first[:, None]).clamp(min=0))

    def _token(self, q: Tensor, after: BigBirdState, here: Tensor) -> Tensor:
        """Causal, one query [b 1 h d] at place `here` [b 1]: the blocks of its row, read from the cache."""
        c, g = self.config.block, self.kv_heads
        row = here.clamp(min=0) // c
        blocks, listed = self.lists(row, row)
        blocks = torch.cat((blocks, row[:, None, :, None].expand(-1, g, -1, -1)), -1)[:, :, 0]
        listed = torch.cat((listed, listed.new_ones(*listed.shape[:-1], 1)), -1)[:, :, 0]
        places = (blocks[..., None] * c + torch.arange(c, device=q.device)).flatten(2)  # b g lc
        visible = listed.repeat_interleave(c, -1) & (places <= here[:, None])
        index = after.order.gather(1, places.clamp(max=after.order.shape[1] - 1).flatten(1))
        k, v = (take_by_head(x, index.unflatten(1, (g, -1))) for x in (after.k, after.v))
        q = q[:, 0].unflatten(1, (g, -1))
        o, _ = softmax_attention(q, k, v, visible=visible[:, :, None], **self.weighing())
        return o.flatten(1, 2)[:, None].to(v.dtype)

    def _listed(self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, listed: Tensor, **where) -> Tensor:
        block = self.config.block
        return block_attention(q, k, v, blocks, listed, block=block, **where, **self.weighing())

    def _draw(self, generator: torch.Generator) -> Tensor:
        shape = (self.kv_heads, self.config.random_blocks)
        return torch.randint(2**32, shape, generator=generator, device=generator.device)


def _append(state: BigBirdState, k: Tensor, v: Tensor, here: Tensor) -> BigBirdState:
    """The cache with new tokens."""
    t, s = k.shape[1], state.k.shape[1]
    k, v = append((state.k, state.v), (k, v))
    new = torch.arange(s, s + t, device=k.device).expand_as(here)
    # Padding goes to a last place, which is cut off.
    order = functional.pad(state.order, (0, t + 1)).scatter(1, here.masked_fill(here < 0, s + t), new)
    return BigBirdState(k, v, order[:, :-1], state.seen + (here >= 0).sum(1))

"""A rank's shard of sequences: the tokens before it, and what layers receive from earlier ranks.

Ranks exchange once, before the first layer, how many tokens of each sequence they hold and where packed
sequences end. Later messages need not repeat it: every rank knows how many tokens of each sequence come
before each shard, and over how many ranks the last ones are spread.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional

from lintra.ops.layout import Layout
from lintra.ops.padding import put_last, take, zero_padding
from lintra.ops.ranks import Ranks


class Span(NamedTuple):
    """Contents of a rank's shard: places [t]; real tokens of its last sequence, of each row; whether the
    first one began before it; whether its last one continues after it; whether they are the same; of a
    packed batch the tokens of its first and of its longest one."""

    time: int
    counts: list[int]
    begun: bool
    unfinished: bool
    single: bool
    first: int = 0
    longest: int = 0


class _Header(NamedTuple):
    """What a rank tells the others of its shard, in one message of integers: sequences and places; tokens
    of the last, first and longest sequence; what it holds of them, as in `Span`."""

    rows: int
    time: int
    last: int
    first: int
    longest: int
    packed: bool
    masked: bool
    begun: bool
    unfinished: bool
    single: bool
    ends_unknown: bool  # packed, and made from bounds that do not say what other ranks hold

    @classmethod
    def of(cls, layout: Layout) -> "_Header":
        lengths = [layout.time]
        if layout.cu_seqlens is not None:
            lengths = layout.cu_seqlens.diff().tolist() or [0]
        return cls(
            rows=layout.rows,
            time=layout.time,
            last=lengths[-1],
            first=lengths[0],
            longest=max(lengths),
            packed=layout.packed,
            masked=layout.mask is not None,
            begun=bool(layout.begun),
            unfinished=bool(layout.unfinished),
            single=layout.n == 1,
            ends_unknown=layout.packed and layout.begun is None,
        )

    def span(self, counts: list[int]) -> Span:
        """Return what the shard holds; counts: the real tokens of its last sequence, of each row."""
        if not self.packed:
            return Span(self.time, counts, begun=True, unfinished=True, single=True)
        ends = bool(self.begun), bool(self.unfinished), bool(self.single)
        return Span(self.time, counts, *ends, self.first, self.longest)


class SequenceShard:
    """A shard of sequences that begin on earlier ranks, seen from within a layer.

    What a shard passes on is that of its last sequence, and what it receives is for its first one. They are
    the same except in a packed batch: there the last sequence runs first (`last`) and stashes what it passes
    on, and the first one (`first`) exchanges that for what it needs."""

    def __init__(self, ranks: Ranks, spans: list[Span]):
        self.ranks, self.spans = ranks, spans
        # Whether these tokens pass something on; whether they receive something.
        self.sends = self.receives = True
        self._stashed: list[list[Tensor]] = []
        self._parts: tuple[Layout, Layout | None, Layout | None] | None = None
        rank = ranks.rank
        self.chain = self.chain_of(rank)
        self.readers = [r for r in range(rank + 1, ranks.size) if rank in self.chain_of(r)]
        self.continues = spans[rank].unfinished and rank + 1 < ranks.size  # the next rank continues it
        self.between = 0 < rank < ranks.size - 1
        counts = [torch.tensor(spans[p].counts) for p in self.chain]
        self.seen = sum(counts, torch.zeros(len(spans[rank].counts), dtype=torch.int64))  # [b], on the CPU

    @classmethod
    def of(cls, ranks: Ranks, layout: Layout) -> "SequenceShard":
        """Return the shard that `layout` describes. All ranks must call this at the same time.

        Raises ValueError, on all of them, unless they have shards of the same sequences, and for packed ones
        of which it is not known whether other ranks have a part."""
        header = _Header.of(layout)
        found = [_Header(*x.tolist()) for x in ranks.gather(torch.tensor(header, device=layout.device))]
        ranks.release_sent()
        if len({x.rows for x in found}) > 1:
            raise ValueError(
                "all ranks must have shards of the same sequences, got "
                + ", ".join(f"{x.rows} on rank {i}" for i, x in enumerate(found))
            )
        if len({x.packed for x in found}) > 1:
            some = [i for i, x in enumerate(found) if x.packed]
            raise ValueError(f"all ranks must have packed sequences or none, got them on ranks {some} alone")
        if some := [i for i, x in enumerate(found) if x.ends_unknown]:
            raise ValueError(
                "packed sequences over several ranks need cu_seqlens=shard_packed(cu_seqlens, mesh), made "
                f"from the bounds in the whole batch; ranks {some} have other bounds"
            )
        counts = [[x.last] * layout.rows for x in found]
        if any(x.masked for x in found):
            real = torch.full((layout.rows,), layout.time, device=layout.device)
            real = real if layout.mask is None else layout.mask.sum(1)
            counts = [x.tolist() for x in ranks.gather(real)]
        spans = [x.span(each) for x, each in zip(found, counts, strict=True)]
        return cls(ranks, spans)

    def longest(self) -> int:
        """Return the number of real tokens of the longest sequence, over all ranks."""
        none = [0] * len(self.seen)
        longest, before = 0, none
        for span in self.spans:
            first = span.counts if span.single else [span.first]
            if span.begun:
                first = [seen + new for seen, new in zip(before, first, strict=True)]
            longest = max(longest, span.longest, *first)
            before = none if not span.unfinished else first if span.single else span.counts
        return longest

    def chain_of(self, rank: int) -> list[int]:
        """Return the ranks before `rank` on which its first sequence lies, nearest first."""
        found: list[int] = []
        for p in range(rank - 1, -1, -1):
            if not (self.spans[p].unfinished and self.spans[p + 1].begun):
                break
            found.append(p)
            if not self.spans[p].single:
                break
        return found

    def first(self, layout: Layout, *, alone: bool) -> Layout:
        """Return the layout of the first sequence, after its part on earlier ranks; `alone`: it
        is the last one too."""
        layout = layout.after(self.seen.to(layout.device))
        layout.shard = self if alone else self._part(sends=False, receives=True)
        return layout

    def last(self, layout: Layout) -> Layout:
        """Return the layout of a last sequence that is not the first."""
        layout = layout.after(torch.zeros(1, dtype=torch.int64, device=layout.device))
        layout.shard = self._part(sends=True, receives=False)
        return layout

    def parts(self, layout: Layout) -> tuple[Layout, Layout | None, Layout | None]:
        """Return the layouts of the first sequence of a packed batch, of those between, and of the last."""
        if self._parts is None:
            first, middle, last = layout.split_ends()
            last = None if last is None else self.last(last)
            self._parts = self.first(first, alone=last is None), middle, last
        return self._parts

    def _part(self, *, sends: bool, receives: bool) -> "SequenceShard":
        part = SequenceShard(self.ranks, self.spans)
        part.sends, part.receives, part._stashed = sends, receives, self._stashed
        return part

    def stash(self, tensors: list[Tensor]) -> None:
        """Keep what the last sequence has for the other ranks until the first one runs, and sends it."""
        self._stashed.append(tensors)

    def unstash(self) -> list[Tensor]:
        """Return what the last sequence has stashed, in its order."""
        return self._stashed.pop(0)

    def state(
        self,
        like: Tensor,
        sizes: tuple[int, ...],
        own: Callable[[bool], tuple[Tensor, Tensor | None]],
    ) -> Tensor:
        """Return the state [b g f e] before these tokens, as `like`; where nothing is received, 0.

        own: gives what they add to a state, and with True the transition too, which is of `sizes`, as
        `Ranks.scan` takes them. It is called where that is needed elsewhere."""
        added, transition = torch.zeros_like(like), None
        if self.sends and self.continues:
            added, transition = own(self.receives and self.between)
        return self._scan(added, transition, sizes)

    @property
    def begins(self) -> bool:
        """Return whether its first sequence begins here, so that nothing comes in."""
        return not (self.receives and self.chain)

    def send_state(self, y: Tensor, added: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return y as it is, of tokens that begin here, and send what they add to a state to the next ranks.

        Where `state` needs a pass before the outputs are computed, this needs none. `sizes` are those of the
        other ranks' transitions."""
        if not (self.sends and self.continues):
            added = torch.zeros_like(added)
        return cast("Tensor", _Tied.apply(y, self._scan(added, None, sizes)))

    def _scan(self, added: Tensor, transition: Tensor | None, sizes: tuple[int, ...]) -> Tensor:
        """The state before these tokens, of what all shards add; where nothing is received, 0."""
        if not self.receives:
            self.stash([added])
            return torch.zeros_like(added)
        if not self.sends:
            (added,) = self.unstash()
        if transition is None and self.between:  # what comes in ends here
            transition = added.new_zeros(sizes)
        return self.ranks.scan(added, transition, sizes)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return what the earlier shards of these sequences have of x [b ...], nearest first, without a
        gradient."""
        if not self.receives:
            self.stash([x])
            return []
        if not self.sends:
            (x,) = self.unstash()
        found = self.ranks.gather(x)
        return [found[p] for p in self.chain]

    def window(
        self, tensors: list[Tensor], count: int, layout: Layout
    ) -> tuple[list[Tensor], Bool[Tensor, "b m"]]:
        """Return the last `count` = m real places before these tokens, [b m ...] of each x [b t ...], and
        which of them there are: the last ones; elsewhere x is 0.

        A message from each rank that any shard needs places of, without waiting for a chain: one, where
        shards are as long as the window."""
        if not count:
            return [x[:, :0] for x in tensors], torch.ones(
                layout.rows, 0, dtype=torch.bool, device=layout.device
            )
        places = [_latest(x, layout.mask, count) for x in tensors] if self.sends else self.unstash()
        if not self.receives:
            self.stash(places)
            none = torch.zeros(places[0].shape[:2], dtype=torch.bool, device=layout.device)
            return [torch.zeros_like(x) for x in places], none
        hops = max(self._hops(rank, count) for rank in range(self.ranks.size))
        found = self.ranks.halo(places, hops)
        there = [self._there(hop, count, layout) for hop in range(1, hops + 1)]
        if hops == 1:
            real = there[0]
            return list(zero_padding(real, *found[0])), real
        real = torch.cat(there[::-1], 1)
        order = put_last(real)[:, -count:]
        real = real.gather(1, order)
        joined = (torch.cat(x[::-1], 1) for x in zip(*found, strict=True))
        return list(zero_padding(real, *(take(x, order) for x in joined))), real

    def positions(self, real: Bool[Tensor, "b m"]) -> Int[Tensor, "b m"]:
        """Return the positions of the last places before these tokens, as `window` has them; -1 where there
        is none."""
        count = real.shape[1]
        back = torch.arange(-count, 0, device=real.device)
        return torch.where(real, self.seen.to(real.device)[:, None] + back, -1)

    def _hops(self, rank: int, count: int) -> int:
        """Count the ranks before `rank` that have any of its last `count` places."""
        found = torch.zeros(len(self.spans[rank].counts), dtype=torch.int64)
        for hop, p in enumerate(self.chain_of(rank), 1):
            found += torch.tensor(self.spans[p].counts)
            if bool((found >= count).all()):
                return hop
        return max(1, len(self.chain_of(rank)))

    def _there(self, hop: int, count: int, layout: Layout) -> Bool[Tensor, "b m"]:
        """Mask of the last `count` places that a rank has for the first sequence here."""
        p = self.ranks.rank - hop
        counts = self.spans[p].counts if p in self.chain else [0] * len(self.seen)
        first = count - torch.tensor(counts, device=layout.device)
        return torch.arange(count, device=layout.device) >= first[:, None]


class _Tied(torch.autograd.Function):
    """Identity on y that keeps a receive in the graph, so that its backward runs on every rank."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, received: Tensor) -> Tensor:
        ctx.like = torch.empty_like(received, device="meta")
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dy, torch.zeros_like(ctx.like, device=dy.device)


def _latest(x: Tensor, mask: Bool[Tensor, "b t"] | None, count: int) -> Tensor:
    """The last `count` real places of x [b t ...], zeros before them where there are fewer."""
    if mask is not None:
        x = take(x, put_last(mask)[:, max(0, x.shape[1] - count) :])
    x = x[:, max(0, x.shape[1] - count) :]
    return functional.pad(x, (0, 0) * (x.dim() - 2) + (count - x.shape[1], 0))

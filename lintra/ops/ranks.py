"""Messages between the processes that each hold a shard of the same sequences.

Of a group of R processes of torch.distributed, rank r holds the r-th shard. A shard gets what it needs of the
earlier ones in one of three ways, each with its own backward:

    scan      states that compose, x -> A x + s: the composition of all earlier shards, in log2 R messages
    halo      the last places of the shards before: a message from each of the nearest ranks, without a chain
    gather    small numbers of all ranks, without a gradient

The adjoint of an exclusive scan is an exclusive scan from the other side, with A transposed. Hillis and
Steele 1986, "Data parallel algorithms"; of recurrences Martin and Cundy 2018, arXiv:1709.04057, section 2.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Tensors being sent, by their sender, which they must outlive: the last gradients of a dropped model.
_under_way: dict[int, list[tuple[Any, Tensor]]] = {}
_NUMBERS = count()


class Ranks:
    """The processes of `group`, in the order of their ranks, seen from one of them.

    `bytes_sent` counts what this rank has sent: states, places and gradients."""

    def __init__(self, group: "dist.ProcessGroup"):
        self.everyone = dist.get_process_group_ranks(group)
        self.group, self.rank, self.size = group, dist.get_rank(group), len(self.everyone)
        self.bytes_sent = 0
        self._number = next(_NUMBERS)  # in _under_way
        self._releasable = 0  # how many of those there the last `release_sent` has seen
        self.record: list[list[Tensor]] | None = None  # where received tensors are recorded
        self.replay: Iterator[list[Tensor]] | None = None  # tensors received before, to be replayed

    def __deepcopy__(self, memo: Any) -> "Ranks":
        """Return the same processes: a copy of a model has its shards on them, too."""
        return self

    def record_or_replay(self, record: list[list[Tensor]], *, replays: bool) -> AbstractContextManager[None]:
        """Record received tensors in `record` within this context or, where it replays, take them from there:
        for layers that are computed again in the backward, each time that it is entered."""
        return _RecordOrReplay(self, record, replays)

    def recorded(self, receive: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the received tensors, or those recorded the first time."""
        if self.replay is not None:
            return next(self.replay)
        found = receive()
        if self.record is not None:
            self.record.append([x.detach() for x in found])
        return found

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to a rank of the group, without waiting until it is there."""
        x = x.detach().contiguous()
        if x.numel():
            work = dist.isend(x, self.everyone[to], group=self.group)
            _under_way.setdefault(self._number, []).append((work, x))
            self.bytes_sent += x.nbytes

    def release_sent(self) -> None:
        """Release the tensors sent before the last call.

        All ranks call this after a collective in each pass of a model: by then all of that has been received.
        gloo reports so only where it is waited for."""
        sent = _under_way.get(self._number, [])
        for work, _ in sent[: self._releasable]:
            work.wait()
        del sent[: self._releasable]
        self._releasable = len(sent)

    def under_way(self) -> int:
        """Return how many sent tensors are held."""
        return len(_under_way.get(self._number, []))

    def finish_sent(self, since: int) -> None:
        """Wait for the sends after the first `since` of those that are held, and release their tensors."""
        sent = _under_way.get(self._number, [])
        for work, _ in sent[since:]:
            work.wait()
        del sent[since:]

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Return the next tensor from a rank of the group, of the shape and dtype of `like`."""
        x = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if x.numel():
            dist.recv(x, self.everyone[source], group=self.group)
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return the tensor of one rank on all of them, of the shape and dtype of x on each, without a
        gradient."""
        x = x.detach().contiguous()
        if x.numel():
            dist.broadcast(x, self.everyone[source], group=self.group)
            self.bytes_sent += x.nbytes * (self.size - 1) if self.rank == source else 0
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return each rank's tensor, of one shape on all of them, without a gradient."""
        return self.recorded(lambda: self._gather(x.detach().contiguous()))

    def _gather(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in self.everyone]
        dist.all_gather(found, x, group=self.group)
        self.bytes_sent += x.nbytes * (self.size - 1)
        return found

    def scan(self, added: Tensor, transition: Tensor | None, sizes: tuple[int, ...]) -> Tensor:
        """Return what the shards before this rank's have made of 0 [b g f e].

        A shard makes `transition` x + `added` of x. transition is [b g], a factor; [b g f], one for every
        feature; or [b g f f], a matrix: `sizes` on all ranks. The first and the last rank need none."""
        return cast("Tensor", _Scan.apply(self, sizes, anchor(added.device), added, transition))

    def halo(self, places: list[Tensor], hops: int) -> list[list[Tensor]]:
        """Return, for each of the `hops` ranks before this one, nearest first, the tensors it gives here.

        Where there is no rank they are 0. All have one shape on all ranks; integers carry no gradient."""
        found = cast("tuple[Tensor, ...]", _Halo.apply(self, hops, anchor(places[0].device), *places))
        return [list(found[i * len(places) : (i + 1) * len(places)]) for i in range(hops)]


def anchor(device: torch.device | None = None) -> Tensor:
    """Return an input that gives an exchange a backward on every rank, though nothing before it may need one:
    a gradient that one rank sends must be received by the other."""
    return torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())


class _RecordOrReplay:
    def __init__(self, ranks: Ranks, record: list[list[Tensor]], replays: bool):
        self.ranks, self.record, self.replays = ranks, record, replays

    def __enter__(self) -> None:
        ranks = self.ranks
        self.before = ranks.record, ranks.replay
        ranks.record, ranks.replay = (None, iter(self.record)) if self.replays else (self.record, None)

    def __exit__(self, *_: object) -> None:
        self.ranks.record, self.ranks.replay = self.before


def compose(transition: Tensor | None, x: Tensor) -> Tensor:
    """Return `transition` x, of x [b g f e]."""
    assert transition is not None, "a rank between the first and the last has a transition"
    if transition.dim() == x.dim():
        return transition @ x
    return transition.reshape(*transition.shape, *[1] * (x.dim() - transition.dim())) * x


def compose_transitions(late: Tensor | None, early: Tensor) -> Tensor:
    """Return the transition of two shards, one after the other."""
    assert late is not None, "a rank between the first and the last has a transition"
    return late @ early if late.dim() == 4 else late * early


def _exclusive(
    ranks: Ranks, added: Tensor, transition: Tensor | None, sizes: tuple[int, ...], *, back: bool
) -> Tensor:
    """The state that ranks before (`back`: behind) make of 0, in rounds that reach twice as far each time.

    A rank has composed what its last `reach` ranks with its own do, and what they do without it. Where that
    begins with the first rank, nothing comes in that a transition would be applied to: none is sent."""
    last = ranks.size - 1
    rank = last - ranks.rank if back else ranks.rank
    before, kept = None, None
    reach = 1
    while reach < ranks.size:
        if rank + reach < ranks.size:
            to = last - rank - reach if back else rank + reach
            ranks.send(added, to)
            if rank >= reach:
                assert transition is not None, "a rank between the first and the last has a transition"
                ranks.send(transition, to)
        if rank >= reach:
            source = last - rank + reach if back else rank - reach
            came, then = ranks.receive(added, source), None
            if rank >= 2 * reach:
                then = ranks.receive(added.new_empty(sizes), source)
            if rank + 2 * reach < ranks.size:
                added = added + compose(transition, came)
                transition = None if then is None else compose_transitions(transition, then)
            if before is None:
                before, kept = came, then
            else:
                before = before + compose(kept, came)
                kept = None if then is None else compose_transitions(kept, then)
        reach *= 2
    return torch.zeros_like(added) if before is None else before


class _Scan(torch.autograd.Function):
    """Exclusive scan over ranks; its backward is the scan of the gradients from the last rank."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, sizes: Any, anchor: Tensor, added: Tensor, transition: Any) -> Tensor:
        (before,) = ranks.recorded(lambda: [_exclusive(ranks, added, transition, sizes, back=False)])
        ctx.ranks, ctx.sizes = ranks, sizes
        ctx.save_for_backward(before, transition)
        return before

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dbefore: Tensor) -> tuple[Any, ...]:
        before, transition = ctx.saved_tensors
        matrix = len(ctx.sizes) == before.dim()
        adjoint = transition.mT if matrix and transition is not None else transition
        after = _exclusive(ctx.ranks, dbefore, adjoint, ctx.sizes, back=True)
        dtransition = None
        if transition is not None and matrix:
            dtransition = after @ before.mT
        elif transition is not None:
            dtransition = (after * before).sum(tuple(range(len(ctx.sizes), before.dim())))
        return None, None, None, after, dtransition


def _nearest(ranks: Ranks, hops: int, places: tuple[Tensor, ...]) -> list[Tensor]:
    """The places of so many ranks before, nearest first."""
    for hop in range(1, hops + 1):  # send everything first, so that no rank waits for one that waits
        if ranks.rank + hop < ranks.size:
            for x in places:
                ranks.send(x, ranks.rank + hop)
    found: list[Tensor] = []
    for hop in range(1, hops + 1):
        there = ranks.rank >= hop
        found += [ranks.receive(x, ranks.rank - hop) if there else torch.zeros_like(x) for x in places]
    return found


class _Halo(torch.autograd.Function):
    """The places that the ranks before give; backward, their gradients are sent there."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, hops: int, anchor: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.hops = ranks, hops
        ctx.like = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in places]
        found = ranks.recorded(lambda: _nearest(ranks, hops, places))
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ranks, count = ctx.ranks, len(ctx.like)
        floating = [i for i, x in enumerate(ctx.like) if x.is_floating_point()]
        for hop in range(1, ctx.hops + 1):
            if ranks.rank >= hop:
                for i in floating:
                    ranks.send(gradients[(hop - 1) * count + i], ranks.rank - hop)
        sums: list[Tensor | None] = [None] * count
        for hop in range(1, ctx.hops + 1):
            for i in floating:
                like = torch.empty_like(ctx.like[i], device=gradients[i].device)
                if ranks.rank + hop < ranks.size:
                    came, earlier = ranks.receive(like, ranks.rank + hop), sums[i]
                    sums[i] = came if earlier is None else earlier + came
                elif sums[i] is None:
                    sums[i] = torch.zeros_like(like)
        return None, None, None, *sums

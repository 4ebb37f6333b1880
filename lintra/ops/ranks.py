"""Messages between the processes that each hold a piece of the same sequences.

Of a group of R processes of torch.distributed rank r holds the r-th piece. What a piece needs of the ones
before it comes in one of three ways, each with a backward of its own:

    scan      states that compose, x -> A x + s: the composition of all earlier pieces, in log2 R messages
    halo      the last places of the pieces before: a message from each of the nearest ranks, without a chain
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
        self._number, self._settled = next(_NUMBERS), 0  # in _under_way; how many of these `settle` has seen
        self.kept: list[list[Tensor]] | None = None  # where what comes in is put
        self.replayed: Iterator[list[Tensor]] | None = None  # what comes in, where it has before

    def __deepcopy__(self, memo: Any) -> "Ranks":
        """Return the same processes: a copy of a model has its pieces on them, too."""
        return self

    def keeping(self, kept: list[list[Tensor]], *, replays: bool) -> AbstractContextManager[None]:
        """Have what comes in within this context put into `kept` or, where it replays, taken from there: for
        layers that are computed again in the backward, each time that it is entered."""
        return _Keeping(self, kept, replays)

    def once(self, receive: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return what comes in, or has come in the first time."""
        if self.replayed is not None:
            return next(self.replayed)
        found = receive()
        if self.kept is not None:
            self.kept.append([x.detach() for x in found])
        return found

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to a rank of the group, without waiting until it is there."""
        x = x.detach().contiguous()
        if x.numel():
            work = dist.isend(x, self.everyone[to], group=self.group)
            _under_way.setdefault(self._number, []).append((work, x))
            self.bytes_sent += x.nbytes

    def settle(self) -> None:
        """Let go of what was sent before the last call.

        All ranks call this after a collective in each pass of a model: by then all of that has been received.
        gloo reports so only where it is waited for."""
        sent = _under_way.get(self._number, [])
        for work, _ in sent[: self._settled]:
            work.wait()
        del sent[: self._settled]
        self._settled = len(sent)

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
        """Return what each rank has, of one shape on all of them, without a gradient."""
        return self.once(lambda: self._gather(x.detach().contiguous()))

    def _gather(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in self.everyone]
        dist.all_gather(found, x, group=self.group)
        self.bytes_sent += x.nbytes * (self.size - 1)
        return found

    def scan(self, added: Tensor, transition: Tensor | None, sizes: tuple[int, ...]) -> Tensor:
        """Return what the pieces before this rank's have made of 0 [b g f e].

        A piece makes `transition` x + `added` of x. transition is [b g], a factor; [b g f], one for every
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


class _Keeping:
    def __init__(self, ranks: Ranks, kept: list[list[Tensor]], replays: bool):
        self.ranks, self.kept, self.replays = ranks, kept, replays

    def __enter__(self) -> None:
        ranks = self.ranks
        self.before = ranks.kept, ranks.replayed
        ranks.kept, ranks.replayed = (None, iter(self.kept)) if self.replays else (self.kept, None)

    def __exit__(self, *_: object) -> None:
        self.ranks.kept, self.ranks.replayed = self.before


def compose(transition: Tensor | None, x: Tensor) -> Tensor:
    """Return `transition` x, of x [b g f e]."""
    assert transition is not None, "a rank between the first and the last has a transition"
    if transition.dim() == x.dim():
        return transition @ x
    return transition.reshape(*transition.shape, *[1] * (x.dim() - transition.dim())) * x


def compose_transitions(late: Tensor | None, early: Tensor) -> Tensor:
    """Return the transition of two pieces, one behind the other."""
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
    """The exclusive scan; backward, the one from the other side, of gradients."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, sizes: Any, anchor: Tensor, added: Tensor, transition: Any) -> Tensor:
        (before,) = ranks.once(lambda: [_exclusive(ranks, added, transition, sizes, back=False)])
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
    for hop in range(1, hops + 1):  # first all that is sent: nobody waits for who waits
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
        found = ranks.once(lambda: _nearest(ranks, hops, places))
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

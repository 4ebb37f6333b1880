"""Handing a state from rank to rank, and its gradient back.

Rank r holds the r-th shard of every sequence. A layer's state after a shard is all that the next shard needs
of it, whatever the mechanism, so that the result is that of one process:

    y_r, state_r = extend(x_r, state_{r-1})            forward, from rank 0 up
    dx_r, dstate_{r-1} = backward(dy_r, dstate_r)      backward, from the last rank down

While rank r is at layer l, rank r - 1 is at layer l + 1: with L layers and R ranks a step takes at most
(L + R - 1) / L times what a shard takes alone. A rank sends one state a layer, and gets one gradient of it;
where a state is constant, they are of one size however long the shard.

Rank 0 begins with the state before any token, or with one that it is given; the state after the last rank's
shard is then shared with all of them.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lintra.attention import State, leaves, map_state
from lintra.ops.layout import Layout
from lintra.ops.ranks import Ranks, anchor

# A message names a dtype by its place here.
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATING, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class Relay:
    """One rank's place in a chain of processes."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.before = ranks.rank - 1 if ranks.rank > 0 else None
        self.behind = ranks.rank + 1 if ranks.rank + 1 < ranks.size else None

    def run(
        self,
        start: Callable[[int], State],
        layout: Layout,
        extend: Callable[[State, Layout, slice], tuple[Tensor, State]],
    ) -> tuple[Tensor, State]:
        """Return y [b t ...] of this rank's shard, and the state after it, that of its last sequences.

        start: returns the first state of n sequences, on rank 0 or within the shard. extend: returns y and
        the next state, given a state, a layout and the slice of the time that the layout is of."""
        receives = self.before is not None and (layout.begun or not layout.packed)
        if layout.packed and receives:
            first, others = layout.split_first()
            y, after = extend(self._receive(start(1)), first, slice(0, first.time))
            if others is not None:
                rest, after = extend(start(others.n), others, slice(first.time, layout.time))
                y = torch.cat((y, rest), 1)
        else:
            before = self._receive(start(layout.n)) if receives else start(layout.n)
            y, after = extend(before, layout, slice(0, layout.time))
        if self.behind is None or (layout.packed and not layout.unfinished):
            return y, after
        last = map_state(lambda x: x[-1:], after) if layout.packed else after
        return cast("Tensor", _Send.apply(self, anchor(y.device), y, *leaves(last))), after

    def share(self, y: Tensor, after: State) -> tuple[Tensor, State]:
        """Return y as it is, with the last rank's state `after` on all ranks, which must call this together.

        Backward, the gradients that ranks have of it are added up on the last one: each rank must have y or
        the state in its loss."""
        y, *found = cast("tuple[Tensor, ...]", _Share.apply(self, anchor(y.device), y, *leaves(after)))
        each = iter(found)
        return y, map_state(lambda x: next(each), after)

    def _receive(self, like: State) -> State:
        found = iter(cast("tuple[Tensor, ...]", _Receive.apply(self, anchor(), *leaves(like))))
        return map_state(lambda x: next(found), like)

    def send(self, tensors: list[Tensor], to: int) -> None:
        """Send tensors with their dtypes and shapes, without waiting until they are there."""
        for x in (_forms(tensors), *tensors):
            self.ranks.send(x, to)

    def receive(self, like: list[Tensor], source: int) -> list[Tensor]:
        """Receive tensors of these numbers of axes."""
        forms = self.ranks.receive(torch.empty_like(_forms(like)), source)
        return [self.ranks.receive(x, source) for x in _of_forms(forms, like)]

    def broadcast(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the last rank's tensors on all ranks, of these numbers of axes on each of them."""
        source = self.ranks.size - 1
        forms = self.ranks.broadcast(_forms(tensors), source)
        parts = tensors if self.behind is None else _of_forms(forms, tensors)
        return [self.ranks.broadcast(x, source) for x in parts]


def _forms(tensors: list[Tensor]) -> Tensor:
    """The dtype and the sizes of each tensor, one after the other."""
    forms = [number for x in tensors for number in (DTYPES.index(x.dtype), *x.shape)]
    return torch.tensor(forms, dtype=torch.int64, device=tensors[0].device)


def _of_forms(forms: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Tensors as `_forms` has described them, of the numbers of axes and devices of `like`."""
    numbers = iter(forms.tolist())
    dtypes_and_sizes = [(DTYPES[next(numbers)], [next(numbers) for _ in x.shape]) for x in like]
    return [
        torch.empty(sizes, dtype=dtype, device=x.device)
        for x, (dtype, sizes) in zip(like, dtypes_and_sizes, strict=True)
    ]


class _Receive(torch.autograd.Function):
    """The state of the rank before; backward, its gradient is sent there."""

    @staticmethod
    def forward(ctx, relay: Relay, anchor: Tensor, *like: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        assert relay.before is not None
        ctx.relay = relay
        found = relay.receive(list(like), relay.before)
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        ctx.found = [(x.shape, x.dtype, x.device) for x in found if x.is_floating_point()]
        ctx.differentiable = [x.is_floating_point() for x in found]
        return tuple(found)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        given = [x for x, floating in zip(gradients, ctx.differentiable, strict=True) if floating]
        filled = [
            torch.zeros(shape, dtype=dtype, device=device) if x is None else x
            for x, (shape, dtype, device) in zip(given, ctx.found, strict=True)
        ]
        if filled:
            ctx.relay.send(filled, ctx.relay.before)
        return (None, None, *(None for _ in gradients))


class _Send(torch.autograd.Function):
    """y as it is, with the state sent to the next rank; backward, the state's gradient comes from there."""

    @staticmethod
    def forward(ctx, relay: Relay, anchor: Tensor, y: Tensor, *state: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        assert relay.behind is not None
        ctx.relay = relay
        ctx.like = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in state]
        ctx.device = y.device
        relay.send(list(state), relay.behind)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        floating = [x for x in ctx.like if x.is_floating_point()]
        like = [torch.empty(0, device=ctx.device).new_empty(x.shape, dtype=x.dtype) for x in floating]
        found = iter(ctx.relay.receive(like, ctx.relay.behind) if like else [])
        return None, None, dy, *(next(found) if x.is_floating_point() else None for x in ctx.like)


class _Share(torch.autograd.Function):
    """y as it is, with the last rank's state on every rank; backward, its gradients go to the last one.

    y comes along so that all ranks take part in the backward, whichever of them uses the state."""

    @staticmethod
    def forward(ctx, relay: Relay, anchor: Tensor, y: Tensor, *state: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        found = [x.detach() for x in relay.broadcast(list(state))]
        ctx.relay, ctx.device = relay, y.device
        ctx.like = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in found]
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        ctx.set_materialize_grads(False)
        return y.view_as(y), *found

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, *dstate: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks, last = ctx.relay.ranks, ctx.relay.ranks.size - 1
        floating = [i for i, x in enumerate(ctx.like) if x.is_floating_point()]
        own = [dstate[i] for i in floating]
        some = any(x is not None for x in own)
        using = ranks.gather(torch.tensor([some], dtype=torch.int64, device=ctx.device))
        filled = [
            torch.zeros_like(ctx.like[i], device=ctx.device) if x is None else x
            for i, x in zip(floating, own, strict=True)
        ]
        sums: list[Tensor | None] = [None] * len(ctx.like)
        if ranks.rank != last:
            if some:
                ctx.relay.send(filled, last)
            return None, None, dy, *sums
        for rank in range(last):
            if using[rank]:
                there = ctx.relay.receive(filled, rank)
                filled = [x + y for x, y in zip(filled, there, strict=True)]
        if any(using):
            for i, x in zip(floating, filled, strict=True):
                sums[i] = x
        return None, None, dy, *sums

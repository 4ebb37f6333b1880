"""Handing a state from rank to rank, and its gradient back.

Rank r holds the r-th piece of every sequence. A layer's state after a piece is all that the next piece needs
of it, whatever the mechanism, so that the result is that of one process:

    y_r, state_r = extend(x_r, state_{r-1})            forward, from rank 0 up
    dx_r, dstate_{r-1} = backward(dy_r, dstate_r)      backward, from the last rank down

While rank r is at layer l, rank r - 1 is at layer l + 1: with L layers and R ranks a step takes at most
(L + R - 1) / L times what a piece takes alone. A rank sends one state a layer, and gets one gradient of it;
where a state is constant, they are of one size however long the piece.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from lintra.attention import State, leaves, map_state
from lintra.ops.layout import Layout
from lintra.ops.ranks import Ranks


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
    ) -> Tensor:
        """Return y [b t ...] of this rank's piece.

        start: gives the state before any token of n sequences. extend: gives y and the next state of a state,
        a layout and the tokens, a slice of the time, that it is of."""
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
            return y
        last = map_state(lambda x: x[-1:], after) if layout.packed else after
        return cast("Tensor", _Send.apply(self, y, *leaves(last)))

    def _receive(self, like: State) -> State:
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())  # so that there is a backward
        found = iter(cast("tuple[Tensor, ...]", _Receive.apply(self, anchor, *leaves(like))))
        return map_state(lambda x: next(found), like)

    def send(self, tensors: list[Tensor], to: int) -> None:
        """Send tensors with their shapes, without waiting until they are there."""
        shapes = torch.tensor([size for x in tensors for size in x.shape], dtype=torch.int64)
        for x in (shapes.to(tensors[0].device), *tensors):
            self.ranks.send(x, to)

    def receive(self, like: list[Tensor], source: int) -> list[Tensor]:
        """Receive tensors of these dtypes and numbers of axes."""
        shapes = torch.empty(sum(x.dim() for x in like), dtype=torch.int64, device=like[0].device)
        sizes = iter(self.ranks.receive(shapes, source).tolist())
        return [self.ranks.receive(x.new_empty([next(sizes) for _ in x.shape]), source) for x in like]


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
    def forward(ctx, relay: Relay, y: Tensor, *state: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
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
        return None, dy, *(next(found) if x.is_floating_point() else None for x in ctx.like)

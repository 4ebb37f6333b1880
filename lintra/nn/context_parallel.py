"""A network whose sequences lie in shards on several ranks: how each of its layers gets what precedes.

A layer either computes from its own shard what the other ranks need and exchanges that for what it needs
(`lintra.ops.sequence_shard`), or waits for the state of the rank before (`lintra.nn.relay`). The first costs
one more pass over keys and values where states compose, the second lets rank r begin r layers late.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lintra.attention import Attention, State
from lintra.nn.position import Bounded
from lintra.nn.relay import Relay
from lintra.ops.layout import Layout
from lintra.ops.ranks import Ranks
from lintra.ops.sequence_shard import SequenceShard

Method = Literal["relay", "scan"]


class ContextParallel:
    """The ranks that hold the shards, and the method of every layer of a model, copied along with the model.

    choose: returns the methods, by layer, given the model, rows and the places of the longest shard."""

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        choose: Callable[[nn.Module, int, int], dict[nn.Module, Method]],
    ):
        self.ranks, self.relay, self.model = ranks, Relay(ranks), model
        self._choose, self._sizes = choose, (0, 0)
        self._methods: dict[nn.Module, Method] = {}
        self._placed_by_network = False
        self.extending = False  # `extend` takes shards too, and hands states from rank to rank

    @contextmanager
    def shards_in_extend(self) -> Iterator[None]:
        """Have `extend` of the model and its layers take shards within this context."""
        self.extending = True
        try:
            yield
        finally:
            self.extending = False

    def extend(
        self, state: State, layout: Layout, own: Callable[[State, Layout], tuple[Tensor, State]]
    ) -> tuple[Tensor, State]:
        """Return y [b t ...] of a shard and the state after it: on rank 0 after `state`, elsewhere after the
        state of the rank before. own: computes both from a state and the layout after its `seen` tokens."""
        return self.relay.run(
            lambda n: state, layout, lambda before, layout, _: own(before, layout.after(before.seen))
        )

    def begin(self, *_: Any) -> None:
        """Have the ranks compare their shards before the next layer runs: the hook before a network."""
        self._placed_by_network = False

    def method(self, layer: nn.Module) -> Method:
        """Return how a layer gets what precedes its shard, for the sizes at hand."""
        return self._methods[layer]

    def place(self, layout: Layout) -> Layout:
        """Return the layout of a rank's shard of sequences. Collective: all ranks must call it together.

        Raises ValueError, on all ranks, unless they have shards of the same sequences, packed ones with the
        layout of `shard_packed`, and for more tokens than the model has positions."""
        shard = SequenceShard.of(self.ranks, layout)
        check_reach(self.model, shard.longest())
        self._placed_by_network = True
        sizes = layout.rows, max(span.time for span in shard.spans)
        if sizes != self._sizes:
            self._sizes, self._methods = sizes, self._choose(self.model, *sizes)
        if not layout.packed:
            return shard.first(layout, alone=True)
        placed = layout.after(layout.seen)
        placed.shard = shard
        return placed

    def place_once(self, layer: nn.Module, layout: Layout) -> Layout:
        """Return the rank's layout: the network's if it has exchanged one, else that of `place`.

        Layers that relay a state do not exchange again: all ranks would wait for each other."""
        if layout.shard is not None or (self._placed_by_network and self.method(layer) == "relay"):
            return layout
        return self.place(layout)

    def exchange(self, layout: Layout, forward: Callable[[Layout, slice], Tensor]) -> Tensor:
        """Return y [b t ...] of a shard: `forward` takes a layout with a shard, or without, and its tokens.

        Of a packed batch the last sequence runs first, because others wait for what it sends."""
        shard = layout.shard
        assert shard is not None
        if not layout.packed:
            return forward(layout, slice(0, layout.time))
        first, middle, last = shard.parts(layout)
        if last is None:
            return forward(first, slice(0, first.time))
        ends = first.time, layout.time - last.time
        y = [forward(last, slice(ends[1], layout.time))]
        if middle is not None:
            y.insert(0, forward(middle, slice(*ends)))
        return torch.cat([forward(first, slice(0, ends[0])), *y], 1)


def check_reach(model: nn.Module, tokens: int) -> None:
    """Raise ValueError where a sequence of so many tokens is too long for a part of the model."""
    for module in model.modules():
        longest = getattr(module.config, "max_length", None) if isinstance(module, Attention) else None
        if isinstance(module, Bounded):
            module.check(tokens)
        elif longest is not None and tokens > longest:
            raise ValueError(f"a sequence may have max_length={longest} tokens, got {tokens}")

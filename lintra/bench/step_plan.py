"""Plans by which several ranks share a training step.

Ranks stand in a grid: `data` of them have different sequences, and of each of these `context` have the
shards of the same ones. Parameters, gradients and moments are sharded over `shard` ranks, and gradients are
added up over the rest:

    DDP     shard = 1    gradients are reduced during the backward
    FSDP2   shard > 1    a block is gathered in the forward and again in the backward, beside the block before
                         it, and its gradients are scattered
    relay   context > 1  a layer's state goes from rank to rank (`lintra.nn.relay`): L layers on R ranks take
                         (L + R - 1) / L times as long
    scan    context > 1  shards are joined in log2 R steps; ranks between two others take one more pass, for
                         what their shards do to a state
    ring    context > 1  softmax: keys and values go round in R steps, beside attention to the ones before
                         (Liu et al. 2023, arXiv:2310.01889), all ranks with as much to do
                         (Brandon et al. 2023, arXiv:2311.09431)

Ranks of a relay are at different layers and would wait for each other to gather one: a relay shards over the
ranks of the data alone. With a single replica, gradients of context ranks are added up after the backward
(`lintra.distributed.reduce_gradients`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

from lintra.bench.machines import Group
from lintra.bench.step_work import Mechanism

Exchange = Literal["relay", "scan", "ring"]
LEAST = 64  # tokens of a shard


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Division of a training step among ranks."""

    data: int = 1  # ranks with different sequences
    context: int = 1  # ranks with shards of the same ones
    shard: int = 1  # ranks that share parameters, gradients and moments
    exchange: Exchange | None = None  # of the shards
    accumulate: int = 1  # forward and backward passes of a step, one after the other

    def __post_init__(self):
        if self.ranks % self.shard:
            raise ValueError(f"shard must divide the {self.ranks} ranks, got {self.shard}")
        if (self.context > 1) != (self.exchange is not None):
            raise ValueError(f"exchange goes with context > 1, got {self.exchange} and {self.context}")
        if self.exchange == "relay" and self.data % self.shard:
            raise ValueError(f"a relay shards over the {self.data} ranks of the data, got {self.shard}")

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.data * self.context

    @property
    def shards(self) -> Group:
        """The ranks among which a replica is shared."""
        return Group(self.shard, self.context if self.exchange == "relay" else 1)

    @property
    def replicas(self) -> Group:
        """The ranks that have the same shard."""
        return Group(self.ranks // self.shard, 1 if self.exchange == "relay" else self.shard)


def plans(strategy: str, ranks: int, length: int, sequences: int) -> Iterator[Plan]:
    """Yield the plans of a strategy, those in powers of 2: "DDP", "FSDP2", "relay", "scan", "ring", or
    "FSDP2 x relay" and so on, in which parameters are sharded and the context has several ranks.

    There is none unless the ranks of the data divide the sequences and those of the context divide the length
    into shards of LEAST tokens or more."""
    shards = strategy.startswith("FSDP2")
    name = strategy.removeprefix("FSDP2").removeprefix(" x ").removeprefix("DDP")
    exchange = cast("Exchange | None", name or None)
    for context in (1,) if exchange is None else _powers(ranks)[1:] if shards else (ranks,):
        data = ranks // context
        if exchange is not None and context < 2:
            continue
        if sequences % data or length % context or length // context < LEAST:
            continue
        most = data if exchange == "relay" else ranks
        for shard in _powers(most)[1:] if shards else (1,):
            for accumulate in _powers(sequences // data):
                yield Plan(data=data, context=context, shard=shard, exchange=exchange, accumulate=accumulate)


def _powers(ranks: int) -> list[int]:
    """Powers of 2 up to ranks, which divide it."""
    return [2**i for i in range(ranks.bit_length()) if ranks % 2**i == 0]


def strategies(mechanism: Mechanism) -> tuple[str, ...]:
    """Return the strategies for a mechanism."""
    exchanges = ("ring",) if mechanism == "softmax" else ("relay", "scan")
    return ("DDP", "FSDP2", *exchanges, *(f"FSDP2 x {each}" for each in exchanges))

"""Networks and batches that several processes train together, by one strategy or another."""

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ranks import group
from lintra import distributed
from lintra.attention import delta, linear
from lintra.bench.step_plan import Plan
from lintra.models import Decoder, decoder

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Load:
    """A network and its batch."""

    mechanism: Literal["linear", "delta"] = "linear"
    layers: int = 4
    heads: int = 8
    width: int = 512
    sequences: int = 4
    length: int = 512
    strategies: tuple[str, ...] = ("DDP", "FSDP2")

    def config(self) -> decoder.Config:
        """Return the network's configuration."""
        return decoder.Config(
            attention=linear.Config() if self.mechanism == "linear" else delta.Config(),
            vocabulary=VOCABULARY,
            layers=self.layers,
            heads=self.heads,
            width=self.width,
        )

    def part(self, parts: int) -> tuple[int, int]:
        """Return the sequences and tokens of one of so many equal parts of the batch."""
        if "context" in self.strategies:
            return self.sequences, self.length // parts
        return self.sequences // parts, self.length

    def plan(self, strategy: str, ranks: int) -> Plan:
        """Return how ranks share a step."""
        if strategy == "context":
            return Plan(context=ranks, exchange="relay")
        return Plan(data=ranks, shard=ranks if strategy == "FSDP2" else 1)


class Training:
    """A network and its optimizer, on this rank, for one strategy."""

    def __init__(self, load: Load, strategy: str, count: int):
        torch.manual_seed(0)
        self.load, self.strategy, self.count = load, strategy, count
        self.model: Decoder = load.config().build()
        self.called: nn.Module = self.model
        self.mesh: Any = None
        if strategy == "DDP":
            self.called = DistributedDataParallel(
                self.model, process_group=group(count), gradient_as_bucket_view=True
            )
        elif strategy != "one process":
            self.mesh = DeviceMesh.from_group(group(count), "cpu")
        if strategy == "FSDP2":
            for block in self.model.blocks:
                fully_shard(block, mesh=self.mesh)
            fully_shard(self.model, mesh=self.mesh)
        elif strategy == "context":
            distributed.context_parallel(self.model, self.mesh, method="relay")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def step(self) -> None:
        """Forward, backward and update of this rank's part of the batch."""
        whole = self.load.sequences, self.load.length
        self.gradients(*(whole if self.strategy == "context" else self.load.part(self.count)))
        self.optimizer.step()

    def gradients(self, sequences: int, length: int) -> None:
        """Forward and backward of sequences of so many tokens; by context, of this rank's shard of them."""
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, VOCABULARY, (sequences, length), generator=generator)
        before, total = self.model.shift(text), text.numel()
        if self.strategy == "context":
            before, text = (distributed.shard(x, self.mesh) for x in (before, text))
        self.optimizer.zero_grad(set_to_none=self.strategy != "DDP")
        with warnings.catch_warnings():  # no warning here affects what a sharded network computes
            warnings.filterwarnings("ignore", ".*returned a view tensor")
            params = self.called(before)
        (functional.cross_entropy(params.flatten(0, 1), text.flatten(), reduction="sum") / total).backward()
        if self.strategy == "context":
            distributed.reduce_gradients(self.model, self.mesh)

"""Machines of several ranks: rates, memory, links between ranks, and the seconds that messages between
them take.

A message takes its link's latency, and its bytes divided by the bandwidth (alpha and beta of Hockney 1994,
doi:10.1016/S0167-8191(06)80021-9). Collectives go round a ring: Thakur et al. 2005,
doi:10.1177/1094342005051521.
"""

import math
from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of messages between two ranks."""

    latency: float  # seconds
    bandwidth: float  # bytes a second that a rank sends, and as many that it receives


@dataclass(frozen=True)
class Links:
    """Links by the kind of message, where a library is not equally good at all of them."""

    all_reduce: Link
    all_gather: Link
    reduce_scatter: Link
    send: Link

    @classmethod
    def alike(cls, link: Link) -> "Links":
        """Return the same link for all."""
        return cls(link, link, link, link)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: so many, each `stride` ranks from the next."""

    size: int
    stride: int = 1


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Ranks in nodes. With `cores`, more ranks than cores share them, and the network uses their
    time; without, each has a device of its own, whose transfers go on while it computes."""

    operations: float  # a second, of one rank, as training steps reach them
    memory: float  # bytes of a rank
    memory_bandwidth: float  # bytes a second, read or written
    node: int  # ranks of a node
    inside: Links  # within a node
    between: Links  # between nodes, each rank for itself
    call: float = 0.0  # seconds of a collective or message before its first byte
    launch: float = 0.0  # seconds of a block's forward and backward beside its operations
    cores: int | None = None
    contention: float = 1.0  # slowdown of a rank beside others when all of them have cores

    def slowdown(self, active: int) -> float:
        """Return how many times as long as alone a rank computes, one of so many that do."""
        if self.cores is None or active < 2:
            return 1.0
        return max(1.0, active / self.cores) * self.contention

    def together(self, computation: float, transfer: float) -> float:
        """Return the seconds of a computation and of a transfer that does not wait for it."""
        return max(computation, transfer) if self.cores is None else computation + transfer

    def nodes(self, group: Group) -> int:
        """Return the nodes over which a group is spread, whose first rank is the first of a node."""
        return min(group.size, math.ceil(((group.size - 1) * group.stride + 1) / self.node))

    def collective_seconds(self, kind: Collective, bytes: float, group: Group, messages: float = 1) -> float:
        """Return the seconds of collectives on `bytes`, all of them together, as `messages` calls.

        bytes: of the whole tensor, which a rank has before (all_reduce, reduce_scatter) or after it
        (all_gather). Of R ranks each sends (R - 1) / R of it in R - 1 steps; twice that to reduce it on all.
        A step that leaves a node takes the latency between nodes, and the ranks of a node share the links
        that leave it. An all-reduce may go through trees: twice log2 of the nodes, and through a node."""
        if group.size < 2 or not bytes:
            return 0.0
        inside, between = getattr(self.inside, kind), getattr(self.between, kind)
        nodes, passes = self.nodes(group), 2 if kind == "all_reduce" else 1
        local = max(1, group.size // nodes)
        within = (group.size - nodes) * inside.latency
        latency = within + (nodes - 1) * between.latency
        if kind == "all_reduce":
            tree = math.ceil(math.log2(nodes)) * between.latency + (local - 1) * inside.latency
            latency = min(latency, tree)
        bandwidth = math.inf if local == 1 else inside.bandwidth
        if nodes > 1:
            bandwidth = min(bandwidth, local * between.bandwidth)
        sent = passes * self.sent(bytes, group)
        return messages * (self.call + passes * latency) + sent / bandwidth

    @staticmethod
    def sent(bytes: float, group: Group) -> float:
        """Return the bytes that a rank sends so that each ends up with all of the data: (R - 1) / R of it."""
        return bytes * (group.size - 1) / group.size

    def send_seconds(self, bytes: float, distance: int, messages: int = 1) -> float:
        """Return the seconds until a message from `distance` ranks before arrives."""
        link = (self.inside if distance < self.node else self.between).send
        return messages * (self.call + link.latency) + bytes / link.bandwidth


# NVIDIA's data sheet of the H100 SXM: bfloat16 without sparsity, HBM3, NVLink, which counts both directions.
H100_PEAK, H100_MEMORY, H100_MEMORY_BANDWIDTH, H100_NVLINK = 989.4e12, 80e9, 3.35e12, 450e9
INFINIBAND = 400e9 / 8  # NDR, one port a GPU, as in NVIDIA's DGX H100: bytes a second
# Of the peak, in a training step: about what the Llama 3 report has on 8,192 H100 (arXiv:2407.21783, table 4:
# 43 %, 430 TFLOP/s, with all communication) and torchtitan has on A100 with FSDP2 (52 to 58 %, its
# docs/performance.md).
H100_REACHED = 0.5
LINK_REACHED = 0.8  # of the bandwidth of memory and links; our assumption
FREE_MEMORY = 0.9  # of the memory, for a step; the rest is PyTorch's, NCCL's and fragments; our assumption
# What NCCL's own cost model has for rings with its protocol Simple (src/graph/tuning.cc of NCCL 2.18).
NCCL_CALL, NCCL_NVLINK, NCCL_NETWORK = 8.4e-6, 3.4e-6, 14e-6
# Kernels of a block, forward, again, and backward, each 5 microseconds to launch: our assumption.
KERNELS, LAUNCH = 80, 5e-6


def h100() -> Machine:
    """Nodes of 8 H100 with NVLink, a 400 Gb/s InfiniBand port a GPU."""
    return Machine(
        operations=H100_REACHED * H100_PEAK,
        memory=FREE_MEMORY * H100_MEMORY,
        memory_bandwidth=LINK_REACHED * H100_MEMORY_BANDWIDTH,
        node=8,
        inside=Links.alike(Link(NCCL_NVLINK, LINK_REACHED * H100_NVLINK)),
        between=Links.alike(Link(NCCL_NETWORK, LINK_REACHED * INFINIBAND)),
        call=NCCL_CALL,
        launch=KERNELS * LAUNCH,
    )

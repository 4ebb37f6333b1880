"""Seconds, bytes and memory of a training step by a plan, on a machine."""

import math
from dataclasses import dataclass, field
from typing import Any

from lintra.bench.machines import Machine
from lintra.bench.step_plan import Plan, plans
from lintra.bench.step_work import Bytes, Passes, Work

BUCKET = 25 * 2**20  # bytes of gradients that DDP reduces in one call


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step of `sequences` sequences of `length` tokens by a plan, on a machine."""

    work: Work
    machine: Machine
    plan: Plan
    length: int
    sequences: int
    recompute: bool = True  # a block's forward is computed again in the backward
    bytes: Bytes = field(default_factory=Bytes)

    def __post_init__(self):
        plan = self.plan
        if self.sequences % (plan.data * plan.accumulate) or self.length % plan.context:
            raise ValueError(
                "data * accumulate must divide the sequences and context their length, got "
                f"{plan}, {self.sequences} sequences and {self.length} tokens"
            )
        if (self.plan.exchange == "ring") != (self.work.mechanism == "softmax" and self.plan.context > 1):
            raise ValueError(f"softmax goes round a ring, recurrences do not; got {self.plan.exchange}")

    @property
    def own_sequences(self) -> int:
        """Sequences of which a rank has a shard in one pass."""
        return self.sequences // self.plan.data // self.plan.accumulate

    @property
    def tokens(self) -> int:
        """Tokens of a rank in one pass."""
        return self.own_sequences * self.length // self.plan.context

    # What is done.

    @property
    def block(self) -> Passes:
        """Operations of a block on a rank in one pass, without those that recompute or exchange."""
        return self.work.block_operations(self.tokens, self.length)

    @property
    def operations(self) -> float:
        """Operations of all ranks together, without those that an exchange adds."""
        forward = self.block.forward * (2 if self.recompute else 1)
        head = self.work.head_operations(self.tokens)
        blocks = self.work.layers * (forward + self.block.backward)
        return self.plan.ranks * self.plan.accumulate * (blocks + head.forward + head.backward)

    @property
    def ideal_seconds(self) -> float:
        """Seconds if all ranks did nothing but these operations."""
        return self.operations / self.machine.operations / self.plan.ranks

    @property
    def efficiency(self) -> float:
        """The part of the step's seconds that its operations would take alone."""
        return self.ideal_seconds / self.seconds

    # What is held.

    @property
    def memory(self) -> float:
        """Bytes of a rank: what the optimizer has, whole blocks, activations, and of a ring two shards of
        keys and values on their way, and their gradients."""
        work, plan = self.work, self.plan
        held = work.optimizer_bytes(plan.shard, self.bytes)
        held += work.gathered_bytes(self.bytes) if plan.shard > 1 else 0.0
        if plan.exchange == "ring":
            held += 4 * work.keys_bytes(self.tokens, self.bytes)
        return held + work.activation_bytes(self.tokens, self.bytes)

    @property
    def fits(self) -> bool:
        """Return whether a rank has memory enough."""
        return self.memory <= self.machine.memory

    # What is sent.

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step; of a relay, one that has ranks on both sides."""
        blocks = self.work.layers * self.work.block_parameters
        gathered = (2 * blocks + self.work.root_parameters) * self.bytes.gathered
        scattered = self.work.parameters * self.bytes.reduced
        sent = self.machine.sent(gathered + scattered, self.plan.shards) if self.plan.shard > 1 else 0.0
        sent = self.plan.accumulate * (sent + self.work.layers * sum(self._exchanged()))
        return sent + 2 * self.machine.sent(scattered / self.plan.shard, self.plan.replicas)

    def _exchanged(self) -> tuple[float, float]:
        """Return the bytes that a rank sends for its shard in a layer of a pass, forward and backward."""
        plan, work, n = self.plan, self.work, self.own_sequences
        state = work.state_bytes(n)
        if plan.exchange == "relay":
            return state.forward, state.backward
        if plan.exchange == "scan":
            steps = _steps(plan.context)
            transition = work.transition_bytes(n, self.bytes) if self._between else 0
            return steps * (state.forward + transition), steps * (state.backward + transition)
        if plan.exchange == "ring":
            shard = (plan.context - 1) * work.keys_bytes(self.tokens, self.bytes)
            return (2 if self.recompute else 1) * shard, 2 * shard
        return 0.0, 0.0

    # What it takes.

    @property
    def seconds(self) -> float:
        """Seconds of a step: passes, of which the last one adds up the gradients of replicas, and the
        optimizer's work on the rank's shard."""
        plan, machine = self.plan, self.machine
        moved = self.work.update_bytes(plan.shard, self.bytes)
        seconds = machine.slowdown(plan.ranks) * moved / machine.memory_bandwidth
        if plan.accumulate > 1:
            seconds += (plan.accumulate - 1) * self._pass(last=False)
        return seconds + self._pass(last=True)

    def _pass(self, *, last: bool) -> float:
        """Seconds of a forward and its backward."""
        machine, slow = self.machine, self.machine.slowdown(self.plan.ranks)
        head = self.work.head_operations(self.tokens)
        seconds = slow * (head.forward + head.backward) / machine.operations
        seconds += self._relayed(last) if self.plan.exchange == "relay" else self._blocks(last)
        return seconds + self._outside_of_blocks(last) + slow * self._copied() / machine.memory_bandwidth

    def _blocks(self, last: bool) -> float:
        """Seconds of all blocks, forward and backward, their parameters and gradients on the way beside
        them."""
        forward, backward = self._block_seconds()
        there, back = self._transfers(last)
        together = self.machine.together
        return self.work.layers * (together(forward, there) + together(backward, back))

    def _transfers(self, last: bool) -> tuple[float, float]:
        """Return the seconds of what is gathered and reduced of a block, forward and backward."""
        gather = self._gather(self.work.block_parameters)
        reduce = 0.0 if self._afterwards else self._reduce(self.work.block_parameters, last)
        return gather, gather + reduce

    def _relayed(self, last: bool) -> float:
        """Seconds of all blocks where ranks wait for the state of the rank before."""
        machine, state, seconds = self.machine, self.work.state_bytes(self.own_sequences), 0.0
        messages = 1 + len(self.work.state)  # the shapes first
        for each, moved, held in zip(
            self._alone(), self._transfers(last), (state.forward, state.backward), strict=True
        ):
            inside, between = (machine.send_seconds(held, each, messages) for each in (1, machine.node))
            hops = self.plan.context - 1
            leaving = hops // machine.node  # from one node to the next
            fill, hop = leaving * between + (hops - leaving) * inside, between if leaving else inside
            # What is gathered is on its way while a rank waits for the one before, and beside its layers.
            hidden = machine.together(each, moved) - each
            seconds += self._waves(each, fill, hop) + self.work.layers * hidden
        return seconds

    def _waves(self, layer: float, fill: float, hop: float) -> float:
        """Return the seconds of L layers on R ranks, each one layer behind the rank before.

        R layers, `fill` seconds for all hops from the first rank to the last, and L - 1 times a layer or,
        where that takes longer, the slowest hop. On few cores, as many layers at a time as there are ranks
        at work take their share of them."""
        ranks, layers = self.plan.context, self.work.layers
        waves = range(layers + ranks - 1)
        active = [min(wave + 1, ranks, layers, layers + ranks - 1 - wave) for wave in waves]
        computed = sum(layer * self.machine.slowdown(self.plan.data * each) for each in active)
        return computed + fill + (layers - 1) * max(0.0, hop - layer)

    def _alone(self) -> tuple[float, float]:
        """Return the seconds of a block on a rank alone on the machine, forward and backward,
        without an exchange: where launching kernels takes longer than running them, that."""
        forward, backward = self.block.forward, self.block.backward
        backward += forward if self.recompute else 0.0
        share = forward / (forward + backward)
        rate, launch = self.machine.operations, self.machine.launch
        return (
            self.machine.together(forward / rate, share * launch),
            self.machine.together(backward / rate, (1 - share) * launch),
        )

    def _block_seconds(self) -> tuple[float, float]:
        """Return the seconds of a block on a rank, forward and backward, with its exchange."""
        slow = self.machine.slowdown(self.plan.ranks)
        forward, backward = (slow * each for each in self._alone())
        if self.plan.exchange == "scan":
            once, back = self._scan()
            return forward + once, backward + back
        if self.plan.exchange == "ring":
            return self._ring(forward, backward)
        return forward, backward

    @property
    def _between(self) -> bool:
        """Return whether any rank has others on both sides: it alone needs what its shard does to a state."""
        return self.plan.context > 2

    def _scan(self) -> tuple[float, float]:
        """Return the seconds that a scan over ranks adds, forward and backward: a pass for what a shard does
        to a state, on ranks between two others, then log2 R times a message and joining two shards. Steps
        that leave a node come last. The pass is computed again with its block; what was exchanged is kept."""
        n, machine, slow = self.own_sequences, self.machine, self.machine.slowdown(self.plan.ranks)
        work, state = self.work, self.work.state_bytes(n)
        more = work.state_operations(self.tokens, self.length) if self._between else Passes(0.0, 0.0)
        transition = work.transition_bytes(n, self.bytes) if self._between else 0
        join = work.combine_operations(n) if self._between else 0.0
        again = more.forward if self.recompute else 0.0
        found = []
        for operations, held in ((more.forward, state.forward), (more.backward + again, state.backward)):
            seconds = slow * operations / machine.operations
            for step in range(_steps(self.plan.context)):
                seconds += machine.send_seconds(held + transition, 2**step)
                seconds += slow * join / machine.operations
            found.append(seconds)
        return found[0], found[1]

    def _ring(self, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds of a block whose keys and values go round: each of R steps attends to a shard
        while the next is on its way; backward their gradients go with them."""
        ranks, machine = self.plan.context, self.machine
        slow = machine.slowdown(self.plan.ranks) / machine.operations
        attended = self.work.attention_operations(self.tokens, self.length)
        shard = self.work.keys_bytes(self.tokens, self.bytes)
        found = []
        again = attended.forward if self.recompute else 0.0
        for whole, operations, sent in (
            (forward, attended.forward, shard),
            (backward, attended.backward + again, (3 if self.recompute else 2) * shard),
        ):
            attend = slow * operations
            hop = machine.send_seconds(sent, min(ranks - 1, machine.node))  # the slowest link of the ring
            seconds = whole - attend + attend / ranks
            found.append(seconds + (ranks - 1) * machine.together(attend / ranks, hop))
        return found[0], found[1]

    @property
    def _afterwards(self) -> bool:
        """Return whether gradients are added up after the backward, tensor by tensor."""
        return self.plan.exchange is not None and self.plan.data == self.plan.shard == 1

    def _gather(self, parameters: int) -> float:
        bytes = parameters * self.bytes.gathered
        return self.machine.collective_seconds("all_gather", bytes, self.plan.shards)

    def _reduce(self, parameters: int, last: bool) -> float:
        """Seconds until the gradients of parameters are added up: scattered, and in the end over replicas."""
        bytes = parameters * self.bytes.reduced
        shards, replicas = self.plan.shards, self.plan.replicas
        seconds = self.machine.collective_seconds("reduce_scatter", bytes, shards)
        if not last:
            return seconds
        # DDP fills buckets with the gradients of several blocks, or of a part of one.
        messages = 1 if self.plan.shard > 1 else bytes / BUCKET
        return seconds + self.machine.collective_seconds(
            "all_reduce", bytes / self.plan.shard, replicas, messages
        )

    def _outside_of_blocks(self, last: bool) -> float:
        """Seconds in which nothing computes: gathering what comes first, adding up the gradients that come
        last; or all of them after the backward."""
        work = self.work
        if self._afterwards:
            bytes = work.parameters * self.bytes.reduced if last else 0.0
            return self.machine.collective_seconds("all_reduce", bytes, self.plan.replicas, work.tensors)
        ends = self._gather(work.root_parameters) + self._reduce(work.root_parameters, last)
        if self.machine.cores is None:  # the others go on beside a computation
            ends += sum(self._transfers(last)) - self._gather(work.block_parameters)
        return ends

    def _copied(self) -> float:
        """Bytes read and written to bring what FSDP2 gathers and scatters together: a shard in, the whole
        out, and the gradients in."""
        if self.plan.shard == 1:
            return 0.0
        blocks = self.work.layers * self.work.block_parameters
        gathered = (2 * blocks + self.work.root_parameters) * self.bytes.gathered
        return 2 * (gathered * (1 + 1 / self.plan.shard) + self.work.parameters * self.bytes.reduced)


def _steps(ranks: int) -> int:
    """Steps of a scan over ranks."""
    return math.ceil(math.log2(ranks))


def best(
    strategy: str,
    work: Work,
    machine: Machine,
    ranks: int,
    length: int,
    sequences: int,
    bytes: Bytes,
) -> Step | None:
    """Return the fastest step of a strategy's plans that fit; None if none does."""
    shape: dict[str, Any] = {
        "work": work,
        "machine": machine,
        "length": length,
        "sequences": sequences,
        "bytes": bytes,
    }
    steps = [Step(plan=plan, **shape) for plan in plans(strategy, ranks, length, sequences)]
    return min((step for step in steps if step.fits), key=lambda step: step.seconds, default=None)

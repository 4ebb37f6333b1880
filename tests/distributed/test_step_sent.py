"""The bytes and calls of two processes in a step are those that the cost model predicts."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lintra.attention import delta, linear
from lintra.bench.machines import Group, Machine, h100
from lintra.bench.step_plan import Plan
from lintra.bench.step_time import Step
from lintra.bench.step_work import Work
from lintra.distributed import context_parallel, reduce_gradients, shard
from lintra.models import decoder

RANKS, SEQUENCES, TIME = 2, 2, 64
MECHANISMS = {"linear": linear.Config(), "delta": delta.Config()}


def config_of(kind):
    return decoder.Config(
        attention=MECHANISMS[kind], layers=3, heads=2, width=32, vocabulary=16, position="none"
    )


class Collectives(TorchDispatchMode):
    """Count the calls of torch.distributed, and the bytes of the whole tensors that are gathered and
    scattered."""

    def __init__(self):
        super().__init__()
        self.gathered, self.scattered = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather_base" in str(func):
            self.gathered.append(args[0].nbytes)
        elif "reduce_scatter_base" in str(func):
            self.scattered.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def sharded(kind):
    mesh = init_device_mesh("cpu", (RANKS,))
    model = config_of(kind).build()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with Collectives() as seen:
        (1 * model(torch.zeros(1, TIME, dtype=torch.int64))).sum().backward()
    return seen.gathered, seen.scattered


def replicated(kind):
    model = config_of(kind).build()
    called, reduced = DistributedDataParallel(model), []

    def hook(group, bucket):
        reduced.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    called.register_comm_hook(None, hook)
    called(torch.zeros(1, TIME, dtype=torch.int64)).sum().backward()
    return reduced


HEADER = 11 * 8  # bytes


def by_context(kind):
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    model = context_parallel(config_of(kind).build(), mesh, method="relay")
    reduced, all_reduce = [], dist.all_reduce

    def counted(tensor, **options):
        reduced.append(tensor.nbytes)
        return all_reduce(tensor, **options)

    model(shard(torch.zeros(SEQUENCES, TIME, dtype=torch.int64), mesh)).sum().backward()
    with patch.object(dist, "all_reduce", counted):
        reduce_gradients(model, mesh)
    return model.context_parallel.ranks.bytes_sent, reduced


def step_of(kind, plan):
    shape = {"length": TIME, "sequences": SEQUENCES, "recompute": False}
    return Step(work=Work(config_of(kind)), machine=h100(), plan=plan, **shape)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_fsdp2_gathers_blocks_twice_and_the_rest_once(two_ranks, kind):
    """PyTorch pads a first axis that does not divide evenly, here of the head and of the few heads of delta:
    less than 1 %."""
    step = step_of(kind, Plan(data=RANKS, shard=RANKS))
    expected = step.sent
    for gathered, scattered in two_ranks.call(sharded, kind):
        assert (len(gathered), len(scattered)) == (2 * 3 + 1, 3 + 1)
        sent = Machine.sent(sum(gathered) + sum(scattered), Group(RANKS))
        assert sent == pytest.approx(expected, rel=0.01)
        assert sent >= expected


@pytest.mark.parametrize("kind", MECHANISMS)
def test_ddp_reduces_every_gradient(two_ranks, kind):
    step = step_of(kind, Plan(data=RANKS))
    for reduced in two_ranks.call(replicated, kind):
        assert 2 * Machine.sent(sum(reduced), Group(RANKS)) == step.sent


@pytest.mark.parametrize("kind", MECHANISMS)
def test_a_relay_sends_a_state_and_its_gradient(two_ranks, kind):
    """With the dtype and shape of each tensor; and once, eight numbers for the layout of a piece."""
    step = step_of(kind, Plan(context=RANKS, exchange="relay"))
    work, layers = step.work, step.work.layers
    held = work.state_bytes(SEQUENCES)
    forms = sum(1 + x.dim() for x in work.state)  # a dtype and the sizes of each tensor, as numbers
    floating = sum(1 + x.dim() for x in work.state if x.is_floating_point())
    (first, reduced), (last, _) = two_ranks.call(by_context, kind)
    assert first == layers * (held.forward + 8 * forms) + HEADER
    assert last == layers * (held.backward + 8 * floating) + HEADER
    assert len(reduced) == work.tensors
    exchanged = layers * (held.forward + held.backward)
    assert step.sent == 2 * Machine.sent(sum(reduced), Group(RANKS)) + exchanged

"""Data and context parallel at once: FSDP2 and DDP over all ranks, sequences over rows of a mesh."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from lintra.attention import delta, gated, kda, linear, softmax
from lintra.distributed import context_parallel, shard
from tests.distributed.test_context import build, draw

MODELS = {
    "recurrences": {"attention": (linear.Config(), delta.Config())},
    "softmax": {"attention": (softmax.Config(), softmax.Config(window=5)), "position": "rotary"},
    "convolved": {"attention": (gated.Config(), kda.Config()), "conv": 3},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def summed(model, tokens, targets, whole):
    """The summed cross-entropy of some tokens, divided by the number of all."""
    return functional.cross_entropy(model(tokens).mT, targets, reduction="sum") / whole.numel()


def engine_on_rank(model, engine, shape, method, targets):
    """The loss over all ranks, and the final gradients on this one."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "context"))
    everyone = init_device_mesh("cpu", (mesh.size(),))
    context_parallel(model, mesh["context"], method=method)
    if engine == "fsdp":
        for part in (*model.blocks, model):
            fully_shard(part, mesh=everyone)
        run = model
    else:
        run = DistributedDataParallel(model)
    rows = targets.chunk(shape[0])[mesh["data"].get_local_rank()]
    tokens, here = shard(model.shift(rows), mesh["context"]), shard(rows, mesh["context"])
    loss = summed(run, tokens, here, targets)
    (loss * mesh.size()).backward()  # both engines take the mean over ranks
    total = loss.detach()
    torch.distributed.all_reduce(total)
    gradients = {name: x.grad for name, x in model.named_parameters() if x.requires_grad}
    return total, {name: x.full_tensor() if engine == "fsdp" else x for name, x in gradients.items()}


def check(ranks, engine, shape, method, options, dtype):
    model, targets = build(**options).to(dtype), draw(4)
    whole = copy.deepcopy(model)
    loss = summed(whole, whole.shift(targets), targets, targets)
    loss.backward()
    tolerance = {"rtol": 10 * TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for total, gradients in ranks.call(engine_on_rank, model, engine, shape, method, targets):
        assert_close(total, loss.detach(), **tolerance)
        for name, x in whole.named_parameters():
            if x.requires_grad:
                assert_close(gradients[name], x.grad, **tolerance)


engines = pytest.mark.parametrize("engine", ["fsdp", "ddp"])


@engines
def test_one_sequence_over_two_ranks(two_ranks, engine):
    check(two_ranks, engine, (1, 2), "auto", MODELS["recurrences"], torch.float64)


@pytest.mark.slow
@engines
@pytest.mark.parametrize("method", ["relay", "scan"])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_two_rows_of_two_ranks(four_ranks, engine, method, options):
    for dtype in TOLERANCE:
        check(four_ranks, engine, (2, 2), method, options, dtype)


@pytest.mark.slow
def test_blocks_that_are_computed_again(four_ranks):
    options = {**MODELS["convolved"], "checkpoint_blocks": True}
    check(four_ranks, "fsdp", (2, 2), "auto", options, torch.float64)


def test_what_waits_is_not_computed_again_by_weights_that_all_gather(two_ranks):
    model = build(**MODELS["recurrences"], checkpoint_blocks=True)
    with pytest.raises(ValueError, match="cannot recompute layers that wait for a state, such as 'linear'"):
        two_ranks.call(engine_on_rank, model, "fsdp", (1, 2), "relay", draw(4))

"""Models that several processes share: FSDP2. Its dependencies are imported only where a model is sharded."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor, nn

from lintra.nn.block import Block, CrossBlock
from lintra.nn.parameters import fsdp_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)


def shard(model: Module, mesh: "DeviceMesh") -> Module:
    """Have each process of a mesh keep a part of every weight, cut along its first axis; return the model.

    Changes `model` in place. A block's weights are gathered for its forward and again for its backward;
    weights in no block once a step, so tables that embed and predict, or others that parts share, may be used
    anywhere in the model's forward. Gradients are the mean over the processes. Zhao et al. 2023,
    arXiv:2304.11277, per parameter (`torch.distributed.fsdp.fully_shard`)."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
        if isinstance(module, CrossBlock):
            register_fsdp_forward_method(module, "encode_memory")
    fully_shard(model, mesh=mesh)
    if hasattr(model, "encode_memory"):
        register_fsdp_forward_method(model, "encode_memory")
    return model


def reshard(model: nn.Module) -> None:
    """Have each process drop its copies of the others' weights: a forward without a backward leaves copies of
    the weights that are in no block."""
    for module in fsdp_modules(model):
        module.reshard()


def is_shared(x: Tensor) -> bool:
    """Return whether processes share a tensor: whether it is a DTensor, whose module takes long to import."""
    return hasattr(x, "to_local")


def local(x: Tensor) -> Tensor:
    """Return what this process has of a tensor: its shard, or all of one that is not shared."""
    return cast("Any", x).to_local() if is_shared(x) else x


def full_tensor(x: Tensor) -> Tensor:
    """Return a tensor with the parts of all processes. All processes must call this."""
    return cast("Any", x).full_tensor() if is_shared(x) else x


def finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all numbers are finite that this process has of these tensors."""
    return all(bool(local(x).isfinite().all()) for x in tensors)

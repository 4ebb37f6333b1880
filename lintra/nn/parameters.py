"""Parameters and hooks of layers, which may have been replaced: with low-rank terms, of 8 bits, sharded.

Code that reads a layer's weight instead of calling the layer bypasses them.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lintra.ops.autocast import in_autocast

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module is more than the forward of its class: it has hooks, or a forward of
    its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks or module._backward_hooks or module._backward_pre_hooks or "forward" in vars(module))


def hooked(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the method `name` of a module that stands in for its forward behind a state: `extend`, which
    returns the next state too, or `cross_attend`. The state is its last positional argument.

    Where the module has forward hooks they run around it as around `forward`: they get the tensors of the
    call without the state, and the output without the next one, either of which they may replace. A `forward`
    that was replaced, backward hooks and global hooks are not run."""
    method = getattr(module, name)
    if not (module._forward_hooks or module._forward_pre_hooks):
        return method

    def run(*inputs: Any, **options: Any) -> Any:
        *given, state = inputs
        args: tuple[Any, ...] = tuple(given)
        for key, before in list(module._forward_pre_hooks.items()):
            if key in module._forward_pre_hooks_with_kwargs:
                args, options = before(module, args, options) or (args, options)
            elif (found := before(module, args)) is not None:
                args = found if isinstance(found, tuple) else (found,)
        result = method(*args, state, **options)
        y, *after = result if name == "extend" else (result,)
        for key, behind in list(module._forward_hooks.items()):
            more = (options,) if key in module._forward_hooks_with_kwargs else ()
            found = behind(module, args, *more, y)
            y = y if found is None else found
        return (y, *after) if after else y

    return run


def check_dtype(name: str, x: Tensor, module: nn.Module) -> None:
    """Raise TypeError unless x has the dtype of the weights of a linear map or an LSTM of PyTorch's own;
    autocast casts all but float64. A layer that replaces one of these may take any dtype."""
    if type(module) is nn.Linear and x.dtype == module.weight.dtype:
        return  # the usual cost of a step: one look at one weight
    if type(module) not in (nn.Linear, nn.LSTM) or x.dtype == reference_param(module).dtype:
        return
    dtypes = x.dtype, reference_param(module).dtype
    if torch.float64 not in dtypes and in_autocast(x):
        return
    raise TypeError(
        f"{name} must have the dtype of the weights, {dtypes[1]}, got {dtypes[0]}: call "
        f"{name}.to({dtypes[1]}), or .to({dtypes[0]}) of the network"
    )


def reference_param(module: nn.Module) -> Tensor:
    """A tensor of the device and dtype that the module computes in: its first parameter of a floating type;
    where it has none, as layers of 8 bits, an empty one of the default type on the CPU."""
    for x in module.parameters():
        if x.is_floating_point():
            return x
    return torch.empty(0, device="cpu")


def fsdp_modules(model: nn.Module) -> Iterator["FSDPModule"]:
    """Yield the modules of a model whose weights FSDP2 gathers, each on all ranks at once."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def is_fsdp(model: nn.Module) -> bool:
    """Return whether FSDP2 gathers weights of a model: its ranks must not wait for each other."""
    return next(fsdp_modules(model), None) is not None

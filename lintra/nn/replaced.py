"""What may stand in place of a layer: one with low-rank terms added, one of 8 bits, one with hooks.

Whoever reads the weight of a layer, and does not call it, passes over all of that.
"""

import torch
from torch import Tensor, nn


def hooked(module: nn.Module) -> bool:
    """Whether calling the module is more than the forward of its class: it has hooks, or one of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks or module._backward_hooks or module._backward_pre_hooks or "forward" in vars(module))


def placed(module: nn.Module) -> Tensor:
    """A tensor of the device and dtype that the module computes in: its first parameter of a floating type;
    where it has none, as layers of 8 bits, an empty one of the default type on the CPU."""
    for x in module.parameters():
        if x.is_floating_point():
            return x
    return torch.empty(0, device="cpu")

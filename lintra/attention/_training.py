"""Functions for loops that train a network with mechanisms in it."""

from collections.abc import Iterator

import torch
from torch import nn

from lintra.attention.base import Attention


def redraw(model: nn.Module, step: int, generator: torch.Generator) -> None:
    """Redraw random features and the like before a step of training (the first is step 0), layer by layer,
    wherever the `redraw_every` of a mechanism's configuration divides a `step` above 0.
    """
    for module in _mechanisms(model):
        every = getattr(module.config, "redraw_every", None)
        if every and step > 0 and step % every == 0:
            module.redraw(generator)


def no_weight_decay(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that weight decay should leave alone: rates of decay and steps of time."""
    named = [getattr(module, name) for module in _mechanisms(model) for name in module.no_weight_decay]
    return [x for x in named if x is not None]  # a configuration may leave some out


def _mechanisms(model: nn.Module) -> Iterator[Attention]:
    return (module for module in model.modules() if isinstance(module, Attention))

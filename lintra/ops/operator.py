"""Kernels as PyTorch operators: autograd, torch.compile, shapes without data.

Forward and backward are one operator each, so a compiled graph keeps them whole. Second derivatives, vmap and
the other transforms are not offered here: `impl="torch"` of an op has them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("lintra", "FRAGMENT")


def define(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: Callable[..., Any],
    context: Callable[..., None] | None,
    devices: Sequence[str],
) -> Callable[..., Any]:
    """Make the operator lintra::`name` and return it.

    `fake` computes shapes alone, `context` saves what `gradient` needs: as torch.library.register_autograd
    has them."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in devices:
        _LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"lintra::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(f"lintra::{name}", gradient, setup_context=context, lib=_LIBRARY)
    return getattr(torch.ops.lintra, name)


def once(op: str, impl: str) -> Callable[..., Any]:
    """Return a gradient of a backward operator that refuses: there are no second derivatives."""

    def no_double_backward(ctx, *_):
        raise NotImplementedError(
            f"{op} with impl={impl!r} can be differentiated once; use impl='torch' for second derivatives"
        )

    return no_double_backward


def tensors(like: Tensor, gradients: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Return gradients as an operator has to: an empty tensor for that of an argument that was not given."""
    return tuple(like.new_empty(0) if x is None else x for x in gradients)

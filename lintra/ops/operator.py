"""Kernels as PyTorch operators: autograd, torch.compile, shapes without data.

Forward and backward are one operator each, so a compiled graph keeps them whole. Second derivatives go
through `differentiable` where an op has it, and else raise. vmap and the other transforms are not supported
here: `impl="torch"` of an op has them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lintra import native

# Here and not at the first call, which torch.compile may be tracing. A wrong LINTRA_NATIVE is reported then.
with suppress(ValueError):
    native.available()

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


def refuse_double_backward(op: str, impl: str) -> Callable[..., Any]:
    """Return a gradient of a backward operator that raises: there are no second derivatives."""

    def no_double_backward(ctx, *_):
        raise NotImplementedError(
            f"{op} with impl={impl!r} can be differentiated once; use impl='torch' for second derivatives"
        )

    return no_double_backward


def differentiable(
    again: Callable[..., Iterable[Tensor]], inputs: Sequence[Tensor | None], given: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of `inputs` by way of `again`, which computes the outputs from them in a form that
    PyTorch differentiates any number of times: for a backward pass with create_graph=True.

    `given` are the gradients of the outputs, None for zero."""
    inputs = [None if x is None else x.view_as(x) for x in inputs]  # one may be computed from another
    used = [(y, dy) for y, dy in zip(again(*inputs), given, strict=True) if dy is not None]
    used = [(y, dy.to(y.dtype)) for y, dy in used if y.requires_grad]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if not used:
        return [None] * len(inputs)
    outputs, gradients = zip(*used, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


def empty_for_none(like: Tensor, gradients: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Return gradients as an operator has to: an empty tensor for that of an argument that was not given."""
    return tuple(like.new_empty(0) if x is None else x for x in gradients)

"""What is done with a state whatever its mechanism: choosing samples, adding tokens, applying a function."""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

State = Any  # a NamedTuple of tensors, batch axis first; each mechanism has its own


def select(keep: Bool[Tensor, "b"], new: State, old: State) -> State:
    """The new state where `keep`, the old one elsewhere, for every sample of the batch.

    Raises NotImplementedError for states that grow: then no token can be left out for some samples alone."""

    def chosen(a: Tensor, b: Tensor) -> Tensor:
        if a.shape != b.shape:
            raise NotImplementedError("a state that grows needs an `extend` of its own where there is a mask")
        return torch.where(keep.reshape(-1, *[1] * (a.dim() - 1)), a, b)

    return map_state(chosen, new, old)


def append(cache: State, new: State) -> State:
    """Tokens [b t ...] behind those of a cache, each part by itself: copies, whatever is written into `new`.

    An empty cache takes the dtype of its first tokens, which autocast decides."""

    def joined(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), 1) if x.shape[1] else y.clone(memory_format=torch.contiguous_format)

    return map_state(joined, cache, new)


def map_state(function: Any, state: State, *others: State) -> State:
    """A state of the same form with `function` applied to every tensor, as in `map`.

    `map_state(lambda x: x[index], state)` reorders the batch (beam search); `x.detach()`, `x.to(device)` and
    `x.clone()` go the same way.
    """
    if isinstance(state, Tensor):
        return function(state, *others)
    parts = [map_state(function, *each) for each in zip(state, *others, strict=True)]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def leaves(state: State) -> list[Tensor]:
    """The tensors of a state, in their order."""
    found: list[Tensor] = []
    map_state(lambda x: found.append(x) or x, state)
    return found


def same_form(fresh: Tensor, x: Tensor) -> Tensor:
    """x. Raises ValueError unless it has the shape of a fresh state, of which an axis that is empty may grow;
    TypeError unless it has its dtype, if there is anything in it."""
    if x.dim() != fresh.dim() or any(n not in (m, 0) for n, m in zip(fresh.shape, x.shape, strict=True)):
        raise ValueError(f"state must hold a tensor like {list(fresh.shape)}, got {list(x.shape)}")
    if x.numel() and x.dtype != fresh.dtype:
        raise TypeError(f"state must hold a tensor of {fresh.dtype}, as start gives it, got {x.dtype}")
    return x

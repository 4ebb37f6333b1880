"""States of recurrences: nested tuples of tensors."""

from typing import Any

from torch import Tensor

State = Any  # a NamedTuple of tensors, batch axis first; each mechanism has its own


def map_state(function: Any, state: State, *others: State) -> State:
    """Return a state of the same form with `function` applied to every tensor, as in `map`.

    `map_state(lambda x: x[index], state)` reorders the batch (beam search); `x.detach()`, `x.to(device)` and
    `x.clone()` work the same way.
    """
    if isinstance(state, Tensor):
        return function(state, *others)
    parts = [map_state(function, *each) for each in zip(state, *others, strict=True)]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def leaves(state: State) -> list[Tensor]:
    """Return the tensors of a state, in their order."""
    found: list[Tensor] = []
    map_state(lambda x: found.append(x) or x, state)
    return found

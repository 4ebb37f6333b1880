"""States under either of their names, and checks of them."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

State = Any  # a list of tensors, batch axis first; any sequence of as many goes in


def check_state(state: State = None, memory: State = None) -> State:
    """`state`, or what was passed under its deprecated name."""
    if memory is not None:
        warnings.warn("memory is the deprecated name of state: pass state", DeprecationWarning, stacklevel=3)
    return memory if state is None else state


def open_state(state: Sequence[Tensor], query: Tensor) -> Sequence[Tensor]:
    """The two tensors of a state. Raises ValueError unless there are two, of as many sequences as queries."""
    if len(state) != 2:
        raise ValueError(f"the state of one attention is two tensors, got {len(state)}")
    for x in state:
        if len(x) != len(query):
            raise ValueError(
                f"the batch changed: the state is for {len(x)} sequences, the query for {len(query)}"
            )
    return state


def layer_states(state: Sequence[State] | None, layers: int) -> list[State]:
    """The states of all layers, None before any token. A list is the one that was passed, to be filled.

    Raises ValueError unless there is one for each layer."""
    if state is None:
        return [None] * layers
    if len(state) != layers:
        raise ValueError(f"state must hold one for each of {layers} layers, got {len(state)}")
    return state if isinstance(state, list) else list(state)

"""Functions of a state of any mechanism: choosing samples, adding tokens, checking its form."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lintra.ops.state import State, map_state


def select(keep: Bool[Tensor, "b"], new: State, old: State) -> State:
    """The new state where `keep`, the old one elsewhere, for every sample of the batch.

    Raises NotImplementedError for states that grow: they cannot leave a token out for some samples alone."""

    def chosen(a: Tensor, b: Tensor) -> Tensor:
        if a.shape != b.shape:
            raise NotImplementedError("a state that grows needs its own `extend` to handle a mask")
        return torch.where(keep.reshape(-1, *[1] * (a.dim() - 1)), a, b)

    return map_state(chosen, new, old)


def read(q: Float[Tensor, "b t h d"], kv: Float[Tensor, "b n d e"]) -> Float[Tensor, "b t m e"]:
    """Return what queries read of states, m = max(h, n): several heads read one state, or one several."""
    heads = max(q.shape[2], kv.shape[1])
    q, kv = q.repeat_interleave(heads // q.shape[2], 2), kv.repeat_interleave(heads // kv.shape[1], 1)
    return torch.einsum("bthd,bhde->bthe", q, kv)


def append(cache: State, new: State) -> State:
    """Append tokens [b t ...] to a cache, each part separately, as copies: `new` may be overwritten later.

    An empty cache takes the dtype of its first tokens, which autocast decides."""

    def joined(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), 1) if x.shape[1] else y.clone(memory_format=torch.contiguous_format)

    return map_state(joined, cache, new)


def check_form(
    like: State,
    state: State,
    n: int,
    apart: tuple[str, ...],
    name: str = "state",
    *,
    grows: bool = True,
) -> None:
    """Raise ValueError or TypeError unless a state of n sequences has the form of `like`, a fresh one.

    `like` is of one sequence. Where the state grows, axes that are empty in it may have grown, those of
    neighbouring parts equally unless the second is one of `apart`. Errors call the state `name`."""
    if type(state) is not type(like):
        raise TypeError(f"{name} must be a {type(like).__name__}, got {type(state).__name__}")
    grown: int | None = None
    for field, fresh, x in _parts(like, state):
        if not isinstance(fresh, Tensor):
            check_form(fresh, x, n, apart, f"{name}.{field}", grows=grows)
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}.{field} must be a tensor, got {type(x).__name__}")
        wanted = [n, *fresh.shape[1:]]
        if not grows or 0 not in wanted[1:2]:
            grown = None
        elif x.dim() > 1:
            grown = x.shape[1] if grown is None or field in apart else grown
            wanted[1] = grown
        if list(x.shape) != wanted:
            raise ValueError(f"{name}.{field} must be {wanted}, as start gives it, got {list(x.shape)}")


def check_dtypes(like: State, state: State, q: Tensor, *, narrow: bool, name: str = "state") -> None:
    """Raise TypeError unless the parts of a state have the dtypes of `like` and the device of q.

    With `narrow`, a part called kv may be bfloat16; an empty part may have any dtype."""
    for field, fresh, x in _parts(like, state):
        if not isinstance(fresh, Tensor):
            check_dtypes(fresh, x, q, narrow=narrow, name=f"{name}.{field}")
            continue
        right = x.dtype == fresh.dtype or (narrow and field == "kv" and x.dtype == torch.bfloat16)
        if x.device != q.device or (x.numel() and not right):
            raise TypeError(
                f"{name}.{field} must be {fresh.dtype} on {q.device} for q of {q.dtype}, as start gives it, "
                f"got {x.dtype} on {x.device}"
            )


def _parts(like: State, state: State) -> Iterator[tuple[str, Any, Any]]:
    """Two states side by side, with the names of their parts."""
    if len(like) != len(state):
        raise ValueError(f"a state must have {len(like)} parts, got {len(state)}")
    return zip(getattr(like, "_fields", map(str, range(len(like)))), like, state, strict=True)

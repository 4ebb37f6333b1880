"""Arguments that are not supported here, that FLA removed, or that have an older name."""

import warnings
from collections.abc import Sequence

from torch import Tensor


def refuse(**unserved: object) -> None:
    """Raise NotImplementedError for arguments, by name, that are not supported here."""
    for name, x in unserved.items():
        if x is not None and x is not False:
            raise NotImplementedError(f"{name} is not supported by lintra's stand-in for fla, got {x!r:.60}")


def heads_behind_time(head_first: object) -> None:
    """Raise DeprecationWarning, as FLA does, for an argument that was removed there."""
    if head_first is not None:
        raise DeprecationWarning("head_first is gone from FLA: give inputs as [b t h ...]")


def as_many_heads(q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless v [b t h e] has the heads of q [b t h d], by which decays are numbered."""
    if q.dim() == v.dim() == 4 and q.shape[2] != v.shape[2]:
        raise ValueError(
            f"v must have the {q.shape[2]} heads of q, each with a decay of its own, got {v.shape[2]}"
        )


def v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """Return the layout that one of the two names gives, the second of which FLA keeps for older callers."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("give state_v_first or the older transpose_state_layout, not both")
    warnings.warn("transpose_state_layout is called state_v_first now", DeprecationWarning, stacklevel=3)
    return transpose_state_layout


def known(name: str, value: str | None, values: Sequence[str | None]) -> None:
    """Raise ValueError unless `value` is one of `values`."""
    if value not in values:
        raise ValueError(f"{name} must be one of {tuple(values)}, got {value!r}")

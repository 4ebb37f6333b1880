"""Ops that are arguments of `linear_attention` now; their old names work until lintra 0.3, with a warning."""

from torch import Tensor

from lintra import legacy
from lintra.ops import checks
from lintra.ops.linear_attention import LinearState, linear_attention


def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return y [b t h e] and the state [b g d e] of `linear_attention` with log_decay [b t g d]."""
    legacy.warn("gated_attention(...)", "linear_attention(..., normalize=False)")
    checks.shape("log_decay", log_decay, "b t g d", {})
    return _call(q, k, v, state, log_decay=log_decay, mask=mask, chunk=chunk)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return y [b t h e] and the state [b g d e] of `linear_attention` with beta [b t g]."""
    legacy.warn("delta_rule(...)", "linear_attention(..., beta=beta, normalize=False)")
    return _call(q, k, v, state, beta=beta, log_decay=log_decay, mask=mask, chunk=chunk)


def _call(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    if state is not None:
        checks.shape("state", state, "b g d e", {})
    before = None if state is None else LinearState.of(state)
    y, after = linear_attention(q, k, v, state=before, normalize=False, **options)
    return y, after.kv

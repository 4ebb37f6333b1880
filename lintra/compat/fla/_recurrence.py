"""Common steps of the functions: check under the callers' names, arrange, call `linear_attention`.

Letters: b batch, t time, n sequences (b, or those of cu_seqlens), h heads of queries and keys, o heads of
values, which may be more, d width of q and k, e width of v.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from lintra.compat.arguments import Dropped, state_before
from lintra.compat.fla.modules.norm.l2norm import l2norm
from lintra.ops import LinearState, checks, linear_attention
from lintra.ops.autocast import no_autocast

State: TypeAlias = Tensor | tuple[Tensor, Tensor] | None
EPS = 1e-10  # added to the denominator, which has the scale in it


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: State | Dropped = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    normalize: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Return o [b t o e] in v's dtype and the state after the last token or None, by FLA's conventions.

    q, k [b t h d], v [b t o e]; logarithms of decays g [b t o] or [b t o d]; beta [b t o] makes it the delta
    rule. `scale` is d^-0.5 unless given. States are [n o d e], with `state_v_first` [n o e d], float32
    (float64 for float64 inputs); an initial one may have any floating dtype. With `normalize` they are pairs,
    the second [n 1 o d] the sum of the keys. `reverse` goes from the last token to the first.
    Autocast changes nothing: inputs keep their dtypes.
    """
    dropped = isinstance(initial_state, Dropped)
    if dropped:
        initial_state = initial_state.state
    sizes = _sizes(q, k, v, g, beta, cu_seqlens)
    factor = sizes["d"] ** -0.5 if scale is None else scale
    with no_autocast(q):
        if use_qk_l2norm_in_kernel:
            q, k = l2norm(q), l2norm(k)
        recurs = beta is not None or (g is not None and g.dim() == 4)
        inputs = [x for x in (q, k, v, g, beta) if x is not None]
        state = _state_before(initial_state, inputs, sizes, state_v_first, normalize, recurs)
        if reverse:
            q, k, v = (x.flip(1) for x in (q, k, v))
            g, beta = (x if x is None else x.flip(1) for x in (g, beta))
            if cu_seqlens is not None:
                cu_seqlens, state = sizes["t"] - cu_seqlens.flip(0), _reordered(state)
        options: dict[str, Any] = {"state": state, "cu_seqlens": cu_seqlens, "normalize": normalize}
        # In FLA's denominator are the scaled scores: the scale cancels, except in the number that is added.
        options |= {"eps": EPS / factor} if normalize else {"scale": factor}
        inplace = dropped and state is not None and state.kv is initial_state
        y, after = linear_attention(q, k, v, log_decay=g, beta=beta, inplace=inplace, **options)
    if reverse:
        y = y.flip(1)
        after = after if cu_seqlens is None else _reordered(after)
    if not output_final_state:
        return y, None
    kv = after.kv.mT if state_v_first else after.kv
    return y, (kv, after.z[:, None]) if normalize else kv


def decay_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Tensor:
    """Return the logarithms of decays that a layer makes of g [... o] or [... o d], in the dtype of sums.

    -exp(A_log) softplus(g + dt_bias): Gu and Dao 2023, arXiv:2312.00752, section 3.5. With a lower bound
    l < 0 FLA's l sigmoid(exp(A_log) (g + dt_bias)), where A_log may be missing; without a bound that is a
    ValueError. A_log and dt_bias have the last axes of g or 1 in their places.
    """
    dtype = checks.sum_dtype(g.dtype)
    with no_autocast(g):
        g = g.to(dtype)
        g = g if dt_bias is None else g + dt_bias.to(dtype)
        if lower_bound is not None:
            return lower_bound * (g if A_log is None else A_log.to(dtype).exp() * g).sigmoid()
        if A_log is None:
            raise ValueError("A_log must be given where the gate is computed and there is no lower_bound")
        return -A_log.to(dtype).exp() * torch.nn.functional.softplus(g)


def gated_beta(beta: Tensor, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> Tensor:
    """Return beta, or where it is given as logits its sigmoid, twice that for negative eigenvalues."""
    if not use_beta_sigmoid_in_kernel:
        if allow_neg_eigval:
            raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
        return beta
    return beta.to(checks.sum_dtype(beta.dtype)).sigmoid() * (2.0 if allow_neg_eigval else 1.0)


def _sizes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, cu_seqlens: Tensor | None
) -> dict[str, int]:
    """Return the sizes of the axes by letter, or raise for tensors that do not fit together."""
    sizes: dict[str, int] = {}
    for name, x, letters in (("q", q, "b t h d"), ("k", k, "b t h d"), ("v", v, "b t o e")):
        checks.shape(name, x, letters, sizes)
    if g is not None:
        checks.shape("g", g, "b t o d" if g.dim() == 4 else "b t o", sizes)
    if beta is not None:
        if beta.dim() == 4:
            raise NotImplementedError(f"beta must be one number a head, got shape {list(beta.shape)}")
        checks.shape("beta", beta, "b t o", sizes)
    if not sizes["h"] or sizes["o"] % sizes["h"]:
        raise ValueError(
            f"the heads of v must be a multiple of those of q and k, got {sizes['o']} and {sizes['h']}"
        )
    sizes["n"] = sizes["b"] if cu_seqlens is None else len(cu_seqlens) - 1
    return sizes


def _state_before(
    given: State,
    inputs: list[Tensor],
    sizes: dict[str, int],
    transposed: bool,
    normalize: bool,
    recurs: bool,
) -> LinearState | None:
    """Return the given state in the dtype of sums, keys first, zeros in place of what is missing; or None.

    inputs: q and the others, whose gradients may need the state."""
    if given is None:
        return None
    if isinstance(given, tuple) and not normalize:
        raise TypeError("initial_state must be one tensor without normalize=True, got a tuple")
    kv, z = given if isinstance(given, tuple) else (given, None)
    dtype = checks.sum_dtype(inputs[0].dtype)
    checks.shape("initial_state", kv, "n o e d" if transposed else "n o d e", sizes)
    kv = state_before(kv.mT if transposed else kv, dtype, *inputs)
    if z is not None:
        checks.shape("initial_state[1]", z, "n 1 o d", sizes | {"1": 1})
        return LinearState(kv, state_before(z[:, 0], dtype, kv, *inputs))
    if recurs or not normalize:
        return LinearState.of(kv)
    return LinearState(kv, kv.new_zeros([sizes[x] for x in "nod"]))


def _reordered(state: Any) -> Any:
    """Return the states of sequences in the opposite order; None if there are none."""
    return None if state is None else LinearState(*(x.flip(0) for x in state))

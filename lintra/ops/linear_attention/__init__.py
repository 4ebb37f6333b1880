"""Linear attention over features: one function, its state and the choice of the implementation.

`reference` has the definition and the formulas, `chunked` plain PyTorch, `native` the C++ kernels for the
CPU, `triton` those for NVIDIA GPUs.
"""

import math
from functools import partial
from typing import Literal

from torch import Tensor

from lintra.native.linear_attention import forward as native_forward
from lintra.ops import checks, dispatch
from lintra.ops.autocast import follow_autocast, no_autocast
from lintra.ops.dispatch import can_skip_operator
from lintra.ops.features import FUSED, FeatureMapName, apply_feature_map
from lintra.ops.layout import CuSeqlens, Layout
from lintra.ops.linear_attention.chunked import (
    linear_attention_bidirectional,
    linear_attention_chunked,
    linear_attention_step,
)
from lintra.ops.linear_attention.context_parallel import attend_shard
from lintra.ops.linear_attention.native import linear_attention_native
from lintra.ops.linear_attention.recurrence import recur, same_heads
from lintra.ops.linear_attention.reference import (
    LinearAttentionInputs,
    LinearState,
    divide,
    linear_attention_reference,
    recurrence_reference,
)
from lintra.ops.linear_attention.triton import linear_attention_triton
from lintra.ops.padding import zero_padding

__all__ = [
    "Impl",
    "LinearState",
    "divide",
    "linear_attention",
    "linear_attention_reference",
    "recurrence_reference",
]

Impl = Literal["auto", "reference", "torch", "native", "triton"]
_OPERATORS = {"native": linear_attention_native, "triton": linear_attention_triton}


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    log_input: Tensor | None = None,
    beta: Tensor | None = None,
    state: LinearState | None = None,
    mask: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    layout: Layout | None = None,
    causal: bool = True,
    normalize: bool = True,
    eps: float = 1e-6,
    feature_map: FeatureMapName | None = None,
    scale: float | None = None,
    chunk: int = 64,
    impl: Impl = "auto",
    inplace: bool = False,
) -> tuple[Tensor, LinearState]:
    """Linear attention over features, from a state and to a state: the sum or, with beta, the delta rule.

    q [b t h f], k [b s g f], v [b s g e] -> y [b t h e] in v's dtype and the state after the last token.
    Query head j reads key-value head j // (h / g). k and v may have different numbers of heads, one a
    multiple of the other: g is then the larger, and y has max(h, g) heads. log_decay <= 0 is [b s g] or, with
    a decay for every feature, [b s g f], log_input [b s g]; both are natural logarithms. beta [b s g] (no
    unit, usually in [0, 1], for reflections up to 2) makes it the delta rule, which has no denominator:
    normalize=False. `scale` (no unit; None: 1) multiplies y.
    `state` is the state before (None: empty), and its dtypes are kept. `mask` [b s] is True for real tokens:
    padded ones count as zero features and do not decay the state, and when causal their y is 0.
    `cu_seqlens` [n+1] (`lintra.ops.layout`): n sequences are packed one after the other, b = 1, s = t, and
    the states are [n g ...]; each sequence has the output it has alone. "native" and "triton" read them in
    place, the others padded, in buckets of similar length. A `layout` of k replaces both for a caller that
    has validated everything: nothing is checked again.
    causal: token t reads tokens up to and including t (s = t). Otherwise every query reads all keys.
    normalize divides by the sum of the weights plus `eps` (no unit); where that is exactly 0, y is 0. With
    eps = 0 the sums must not be so small that their inverse overflows.
    `feature_map` ("elu+1", "relu", "exp") is applied to q and k inside; None means they are features already,
    which must not be negative where `normalize` divides by sums of their products.
    chunk: tokens to a block of the parallel form of `impl="torch"`; changes speed, not the result.
    impl: "reference" (quadratic; with beta or a decay for every feature token by token), "torch" (chunked,
    every device), "native" (C++, CPU), "triton" (NVIDIA GPUs, no float64; with beta or a decay for every
    feature q and k of at most 256) or "auto". A log_decay of -inf, which empties the state, needs beta or a
    decay for every feature.
    inplace: the caller no longer needs `state`. The C++ kernels then write the state after a single token
    over it, with beta or a decay for every feature and no denominator, and return it, if it is contiguous and
    has the dtype of sums; in all other cases the state is left as it is.
    Raises ValueError or TypeError for arguments that disagree; RuntimeError for an `impl` that is not
    available here.
    """
    if layout is None:
        q, k, v = follow_autocast(q, k, v)
        given = {"log_decay": log_decay, "log_input": log_input, "beta": beta}
        options = {"causal": causal, "normalize": normalize, "eps": eps, "feature_map": feature_map}
        layout = _validate(q, k, v, given, state, mask, cu_seqlens, scale, chunk, **options)
    recurs = beta is not None or (log_decay is not None and log_decay.dim() == 4)
    if state is not None and not (recurs or normalize or state.z.shape[2]):
        z = state.kv.new_zeros(state.kv.shape[:3], dtype=checks.sum_dtype(q.dtype))
        counted = LinearState(state.kv, z)
        given = {"log_decay": log_decay, "log_input": log_input, "feature_map": feature_map, "scale": scale}
        options = {"causal": causal, "normalize": False, "chunk": chunk, "impl": impl}
        y, after = linear_attention(q, k, v, state=counted, layout=layout, **given, **options)
        return y, LinearState.of(after.kv)
    if layout.shard is not None:
        given = {"log_decay": log_decay, "log_input": log_input, "beta": beta, "feature_map": feature_map}
        options = {"normalize": normalize, "eps": eps, "scale": scale, "chunk": chunk, "impl": impl}
        return attend_shard(linear_attention, q, k, v, state=state, layout=layout, **given, **options)
    mask = layout.mask
    if recurs:
        with no_autocast(q):
            options = {"normalize": normalize, "eps": eps, "feature_map": feature_map, "scale": scale}
            options |= {"log_input": log_input, "chunk": chunk, "impl": impl, "inplace": inplace}
            return recur(q, k, v, log_decay, beta, state, layout, **options)
    if scale is not None:  # before y is rounded
        wide = (x.to(checks.sum_dtype(x.dtype)) for x in (q, k, v))
        given = {"log_decay": log_decay, "log_input": log_input, "state": state, "layout": layout}
        options = {"causal": causal, "normalize": normalize, "eps": eps, "feature_map": feature_map}
        y, after = linear_attention(*wide, **given, **options, chunk=chunk, impl=impl)
        return (y * scale).to(v.dtype), after
    if k.shape[2] != v.shape[2]:
        q, k, v = same_heads(q, k, v)
    if state is None:
        g, f = k.shape[2:]
        state = LinearState.empty(layout.n, g, f, v.shape[3], device=k.device, dtype=k.dtype)
    given = [x for x in (q, k, v, log_decay, log_input, *state) if x is not None]
    options = {"causal": causal, "normalize": normalize, "eps": eps, "feature_map": feature_map}
    if impl in ("auto", "native") and can_skip_operator(*given):
        # Not through the operator: PyTorch's dispatcher takes longer than the arithmetic of one token.
        logs = {"log_decay": log_decay, "log_input": log_input, "kv": state.kv, "z": state.z}
        y, kv, z, *_ = native_forward(q, k, v, mask=mask, cu_seqlens=layout.cu_seqlens, **logs, **options)
        return y, LinearState(kv, z)
    chosen = dispatch.choose("linear_attention", impl, *given)
    kept = state.kv.dtype
    if chosen != "triton":  # whose step reads and writes kv as it is kept
        state = LinearState(state.kv.to(checks.sum_dtype(q.dtype)), state.z)
    if chosen in _OPERATORS:
        bounds = layout.cu_seqlens
        dtype = state.z.dtype
        log_decay = log_decay if log_decay is None else log_decay.to(dtype)
        log_input = log_input if log_input is None else log_input.to(dtype)
        # dq is a difference of two terms, one of them a product with y: 16 bits of y alone would be too few.
        save_lost = normalize and checks.recorded(*given)
        y, kv, z, *_ = _OPERATORS[chosen](
            q,
            k,
            v,
            log_decay,
            log_input,
            *state,
            mask,
            bounds,
            causal,
            normalize,
            eps,
            feature_map,
            save_lost,
        )
    elif layout.packed:
        tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "log_input": log_input}
        same = partial(linear_attention, **options, chunk=chunk, impl=chosen)
        y, (kv, z) = layout.pad_bucketed().each_with_state(same, state, **tensors)
    else:
        with no_autocast(q):
            arguments = _prepare(q, k, v, log_decay, log_input, state, mask, causal, feature_map)
            if chosen == "reference":
                numerator, denominator, (kv, z) = linear_attention_reference(*arguments, causal)
            elif not causal:
                numerator, denominator, (kv, z) = linear_attention_bidirectional(*arguments)
            elif q.shape[1] == 1:
                numerator, denominator, (kv, z) = linear_attention_step(*arguments)
            else:
                numerator, denominator, (kv, z) = linear_attention_chunked(*arguments, chunk)
            y = (divide(numerator, denominator + eps) if normalize else numerator).to(v.dtype)
    return y, LinearState(kv.to(kept), z)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    log_input: Tensor | None,
    state: LinearState,
    mask: Tensor | None,
    causal: bool,
    feature_map: FeatureMapName | None,
) -> LinearAttentionInputs:
    """Features in the sum dtype, padded places zero whatever they held, NaN included.

    Padding is selected away on both sides of the feature map: before it so that no NaN meets a gradient,
    after it because a feature map may send 0 to something else.
    """
    dtype = checks.sum_dtype(q.dtype)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    log_decay, log_input = (x if x is None else x.to(dtype) for x in (log_decay, log_input))
    if mask is None:
        q, k = apply_feature_map(feature_map, q), apply_feature_map(feature_map, k)
        return LinearAttentionInputs(q, k, v, log_decay, log_input, state)

    def select(x: Tensor) -> Tensor:
        return zero_padding(mask, x)[0]

    log_decay, log_input = (x if x is None else select(x) for x in (log_decay, log_input))
    k = select(apply_feature_map(feature_map, select(k)))
    q = select(apply_feature_map(feature_map, select(q))) if causal else apply_feature_map(feature_map, q)
    return LinearAttentionInputs(q, k, select(v), log_decay, log_input, state)


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: dict[str, Tensor | None],
    state: LinearState | None,
    mask: Tensor | None,
    cu_seqlens: CuSeqlens | None,
    scale: float | None,
    chunk: int,
    *,
    causal: bool,
    normalize: bool,
    eps: float,
    feature_map: str | None,
) -> Layout:
    """Return the layout of k, or raise ValueError or TypeError for arguments that disagree."""
    sizes: dict[str, int] = {}
    alike = causal or cu_seqlens is not None
    remedy = "causal=False reads another sequence" if cu_seqlens is None else ""
    checks.qkv(q, k, v, mask, sizes, same_length=alike, remedy=remedy, value_heads="o")
    layout = Layout.of("k" if cu_seqlens is None else "q", k, mask, cu_seqlens)
    keys, values = sizes["g"], sizes["o"]
    checks.heads(sizes["h"], keys)
    sizes["g"] = max(keys, values)
    few, many = min(sizes["h"], sizes["g"]), max(sizes["h"], sizes["g"])  # a compiler cannot sort symbols
    if not values or sizes["g"] % keys or sizes["g"] % values or many % few:
        raise ValueError(
            "of the heads of q, k and v the larger numbers must be multiples of the smaller, got "
            f"{sizes['h']}, {keys} and {values}"
        )
    if sizes["d"] < 1 or sizes["e"] < 1:
        raise ValueError(f"q, k and v must be at least 1 wide, got d={sizes['d']} and e={sizes['e']}")
    log_decay, beta = weights["log_decay"], weights["beta"]
    per_feature = isinstance(log_decay, Tensor) and log_decay.dim() == 4
    recurs = per_feature or beta is not None
    for name, x in weights.items():
        if x is not None:
            checks.shape(name, x, "b s g d" if name == "log_decay" and per_feature else "b s g", sizes)
            checks.floating(name, x)
            if x.device != q.device:
                raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if beta is not None:
        if normalize:
            raise ValueError(
                "normalize must be False with beta: what the delta rule writes may be negative, so that the "
                "sum of weights is no denominator"
            )
        if weights["log_input"] is not None:
            raise ValueError("log_input must be None with beta, which says how much of a value is written")
    if state is not None:
        bare = recurs or (isinstance(state, LinearState) and state.z.shape[-1:] == (0,))
        features = sizes["d"] if normalize or not bare else 0
        checks.parts(
            "state", state, LinearState, ("b g d e", "b g z"), sizes | {"b": layout.n, "z": features}
        )
        checks.state_dtype("state.kv", state.kv, q)
        checks.state_dtype("state.z", state.z, q, narrow=False)
    for name in ("log_decay", "beta"):
        if weights[name] is not None and not causal:
            raise ValueError(f"{name} needs causal=True: without an order of time there is no recurrence")
    if log_decay is not None:
        checks.decay(log_decay, layout.mask, finite=not recurs)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be at least 0 and finite, got {eps}")
    if feature_map is not None and feature_map not in FUSED:
        raise ValueError(f"feature_map must be one of {tuple(FUSED)} or None, got {feature_map!r}")
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    return layout

"""The causal sum behind every kernel attention: the definition, the same thing in chunks, one step.

    kv_t = exp(log_decay_t) kv_{t-1} + exp(log_input_t) phi(k_t) v_t^T
    z_t  = exp(log_decay_t) z_{t-1}  + exp(log_input_t) phi(k_t)
    y_t  = phi(q_t)^T kv_t / (phi(q_t) . z_t + eps)

Katharopoulos et al. 2020, arXiv:2006.16236, equations 8 to 20; the decay as in Sun et al. 2023,
arXiv:2307.08621, section 2.1. Letters: b batch, t query time, s key time, h heads, g key-value heads,
r = h / g query heads to a key-value head, f features, e width of v, n chunks, c tokens to a chunk.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lintra import native
from lintra.ops import checks, dispatch
from lintra.ops.autocast import follow_autocast, no_autocast
from lintra.ops.features import FUSED, FeatureMapName, apply_feature_map
from lintra.ops.layout import CuSeqlens, Layout
from lintra.ops.linear_attention_native import linear_attention_native, numbers_alone
from lintra.ops.linear_attention_triton import linear_attention_triton
from lintra.ops.padding import zero_padding

Impl = Literal["auto", "reference", "torch", "native", "triton"]
_OPERATORS = {"native": linear_attention_native, "triton": linear_attention_triton}


class LinearState(NamedTuple):
    """State of linear attention: kv [b g f e] and z [b g f], float32 (float64 for float64 inputs).

    kv may be bfloat16: it is read as float32, and the new one is rounded to bfloat16 once, when y is made.
    """

    kv: Tensor
    z: Tensor

    @classmethod
    def empty(
        cls, b: int, g: int, f: int, e: int, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> "LinearState":
        """No past, for inputs of `dtype` (None: the default)."""
        dtype = checks.sum_dtype(dtype or torch.get_default_dtype())
        kv = torch.zeros(b, g, f, e, device=device, dtype=dtype)
        return cls(kv, torch.zeros(b, g, f, device=device, dtype=dtype))


class LinearAttentionInputs(NamedTuple):
    """Arguments of linear attention after `_prepare`: features, values and states, all in the sum dtype."""

    q: Float[Tensor, "b t h f"]
    k: Float[Tensor, "b s g f"]
    v: Float[Tensor, "b s g e"]
    log_decay: Float[Tensor, "b s g"] | None
    log_input: Float[Tensor, "b s g"] | None
    state: LinearState


class LinearAttentionOutputs(NamedTuple):
    """y before the division, numerator over denominator, in the sum dtype; the latter is without eps."""

    numerator: Float[Tensor, "b t h e"]
    denominator: Float[Tensor, "b t h"]
    state: LinearState


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    log_input: Tensor | None = None,
    state: LinearState | None = None,
    mask: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    layout: Layout | None = None,
    causal: bool = True,
    normalize: bool = True,
    eps: float = 1e-6,
    feature_map: FeatureMapName | None = None,
    chunk: int = 64,
    impl: Impl = "auto",
) -> tuple[Tensor, LinearState]:
    """Linear attention over features, its denominator inside, from a state and to a state.

    q [b t h f], k [b s g f], v [b s g e] -> y [b t h e] in v's dtype and the state after the last token.
    Query head j reads key-value head j // (h / g). log_decay [b s g] <= 0 and log_input [b s g] are natural
    logarithms; `state` is what came before (None: nothing), and its dtypes stay. `mask` [b s] is True for
    real tokens: padded ones count as zero features and do not decay the state, and when causal their y is 0.
    `cu_seqlens` [n+1] (`lintra.ops.layout`): n sequences are packed one behind the other, b = 1, s = t, and
    the states are [n g ...]; each gives what it gives alone. "native" and "triton" take them where they lie,
    the others padded, in buckets of similar length. A `layout` of k says both for a caller that has validated
    everything: nothing is checked again.
    causal: token t reads tokens up to and including t (s = t). Otherwise every query reads all keys.
    normalize divides by the sum of the weights plus `eps` (no unit); where that is exactly 0, y is 0. With
    eps = 0 the sums must not be so small that their inverse overflows.
    `feature_map` ("elu+1" or "relu") is applied to q and k inside; None means they are features already.
    chunk: tokens to a block of the parallel form of `impl="torch"`; changes speed, not the result.
    impl: "reference" (quadratic), "torch" (chunked, every device), "native" (C++, CPU), "triton" (NVIDIA
    GPUs, no float64) or "auto".
    Raises ValueError or TypeError for arguments that disagree; RuntimeError for an `impl` not to be had.
    """
    if layout is None:
        q, k, v = follow_autocast(q, k, v)
        layout = _validate(
            q, k, v, log_decay, log_input, state, mask, cu_seqlens, causal, eps, feature_map, chunk
        )
    mask = layout.mask
    if state is None:
        g, f = k.shape[2:]
        state = LinearState.empty(layout.n, g, f, v.shape[3], device=k.device, dtype=k.dtype)
    given = [x for x in (q, k, v, log_decay, log_input, *state) if x is not None]
    if impl in ("auto", "native") and numbers_alone(given):
        # The operator's numbers without PyTorch's dispatcher, which takes longer than the sum of one token.
        options = {"causal": causal, "normalize": normalize, "eps": eps, "feature_map": feature_map}
        logs = {"log_decay": log_decay, "log_input": log_input, "kv": state.kv, "z": state.z}
        y, kv, z, _ = native.forward(q, k, v, mask=mask, cu_seqlens=layout.cu_seqlens, **logs, **options)
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
        y, kv, z, _ = _OPERATORS[chosen](
            q, k, v, log_decay, log_input, *state, mask, bounds, causal, normalize, eps, feature_map
        )
    elif layout.packed:
        tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "log_input": log_input}
        options = {"causal": causal, "normalize": normalize, "eps": eps, "feature_map": feature_map}
        y, (kv, z) = _padded(layout, tensors, state, **options, chunk=chunk, impl=chosen)
    else:
        with no_autocast(q):
            arguments = _prepare(q, k, v, log_decay, log_input, state, mask, causal, feature_map)
            if chosen == "reference":
                numerator, denominator, (kv, z) = linear_attention_reference(*arguments, causal)
            elif not causal:
                numerator, denominator, (kv, z) = _bidirectional(*arguments)
            elif q.shape[1] == 1:
                numerator, denominator, (kv, z) = _step(*arguments)
            else:
                numerator, denominator, (kv, z) = _chunked(*arguments, chunk)
            y = (divide(numerator, denominator + eps) if normalize else numerator).to(v.dtype)
    return y, LinearState(kv.to(kept), z)


def _padded(
    layout: Layout, packed: dict[str, Tensor | None], state: LinearState, **options: Any
) -> tuple[Tensor, LinearState]:
    """Packed sequences, tensors by name, as padded ones."""
    padded = layout.pad_bucketed()
    given = {name: padded.unpack(x) for name, x in packed.items() if x is not None}
    ys, states = [], []
    for i, (sequences, bucket) in enumerate(zip(padded.sequences, padded.layouts, strict=True)):
        tensors = {name: parts[i] for name, parts in given.items()}
        before = LinearState(*(x[sequences] for x in state))
        y, after = linear_attention(**tensors, state=before, layout=bucket, **options)
        ys.append(y)
        states.append(after)
    return padded.pack(ys), LinearState(*(padded.in_order(x) for x in zip(*states, strict=True)))


def linear_attention_reference(
    q: Float[Tensor, "b t h f"],
    k: Float[Tensor, "b s g f"],
    v: Float[Tensor, "b s g e"],
    log_decay: Float[Tensor, "b s g"] | None,
    log_input: Float[Tensor, "b s g"] | None,
    state: LinearState,
    causal: bool,
) -> LinearAttentionOutputs:
    """The definition, O(t s): the weight of every key for every query, then the future struck out."""
    t, s, g = q.shape[1], *k.shape[1:3]
    log_decay = k.new_zeros(k.shape[:3]) if log_decay is None else log_decay
    log_input = k.new_zeros(k.shape[:3]) if log_input is None else log_input
    if causal:
        ahead = torch.ones(t, s, dtype=torch.bool, device=q.device).triu()  # keys from each query's own on
        # [b t s g]. Sums of their own, not differences: decays keep their digits beside one far larger.
        faded = log_decay[:, :, None].expand(-1, -1, s, -1).masked_fill(ahead[..., None], 0.0).cumsum(1)
        weight = (faded + log_input[:, None]).masked_fill(ahead.triu(1)[..., None], -math.inf).exp()
        past = log_decay.cumsum(1).exp()  # [b t g]
    else:
        weight = log_input.exp()[:, None].expand(-1, t, -1, -1)
        past = q.new_ones(q.shape[0], t, g)
    q = q.unflatten(2, (g, -1))  # [b t g r f]
    scores = torch.einsum("btgrf,bsgf,btsg->btgrs", q, k, weight)
    numerator = torch.einsum("btgrs,bsge->btgre", scores, v)
    numerator = numerator + torch.einsum("btg,btgrf,bgfe->btgre", past, q, state.kv)
    denominator = scores.sum(-1) + torch.einsum("btg,btgrf,bgf->btgr", past, q, state.z)

    later = torch.cat((log_decay[:, 1:], torch.zeros_like(log_decay[:, :1])), 1).flip(1).cumsum(1).flip(1)
    k = k * (later + log_input).exp()[..., None]
    kept = log_decay.sum(1).exp()[..., None]  # [b g 1]
    final = LinearState(
        kept[..., None] * state.kv + torch.einsum("bsgf,bsge->bgfe", k, v), kept * state.z + k.sum(1)
    )
    return LinearAttentionOutputs(numerator.flatten(2, 3), denominator.flatten(2, 3), final)


def _chunked(
    q: Float[Tensor, "b t h f"],
    k: Float[Tensor, "b t g f"],
    v: Float[Tensor, "b t g e"],
    log_decay: Float[Tensor, "b t g"] | None,
    log_input: Float[Tensor, "b t g"] | None,
    state: LinearState,
    chunk: int,
) -> LinearAttentionOutputs:
    """The causal sum with quadratic blocks of `chunk` tokens and a state carried between them.

    What a chunk adds to the state is one matrix product for all chunks at once.
    """
    t, h, g = *q.shape[1:3], k.shape[2]
    r, c = h // g, max(1, min(chunk, t)) if isinstance(t, int) else chunk
    future = torch.ones(c, c, dtype=torch.bool, device=q.device).triu(1).repeat_interleave(r, 0)
    q = into_chunks(q.unflatten(2, (g, r)), c).flatten(3, 4)  # [b g n cr f]: time, then the heads of a group
    k, v = into_chunks(k, c), into_chunks(v, c)  # [b g n c f], [b g n c e]
    scores = q @ k.mT  # [b g n cr c]
    faded = None
    if log_decay is None and log_input is None:
        scores = scores.masked_fill(future, 0.0)
        added_k = k
    else:
        log_input = k.new_zeros(k.shape[:4]) if log_input is None else into_chunks(log_input, c)
        log_decay = None if log_decay is None else into_chunks(log_decay, c)
        weight = log_input[..., None, :].expand(*log_input.shape, c)
        weight = weight if log_decay is None else weight + _faded(log_decay)
        # Struck out before the exponential: after it, inf * 0 would be NaN in the gradient.
        scores = scores * weight.repeat_interleave(r, -2).masked_fill(future, -math.inf).exp()
        added_k = k * weight[..., -1, :, None].exp()  # what the last token sees is what the state keeps
        if log_decay is not None:
            elapsed = log_decay.cumsum(-1)  # [b g n c]
            q = q * elapsed.exp().repeat_interleave(r, -1)[..., None]
            faded = elapsed[..., -1]
    kv = _scan(added_k.mT @ v, state.kv, faded)  # [b g n+1 f e]
    z = _scan(added_k.sum(-2)[..., None], state.z[..., None], faded)[..., 0]  # [b g n+1 f]
    numerator = scores @ v + q @ kv[:, :, :-1]
    denominator = scores.sum(-1) + (q @ z[:, :, :-1, :, None])[..., 0]

    def join(x: Tensor) -> Tensor:
        """[b g n cr ...] -> [b t h ...]"""
        return x.unflatten(3, (c, r)).flatten(2, 3)[:, :, :t].movedim(1, 2).flatten(2, 3)

    final = LinearState(kv[:, :, -1].clone(), z[:, :, -1].clone())  # views would keep all of them
    return LinearAttentionOutputs(join(numerator), join(denominator), final)


def into_chunks(x: Float[Tensor, "b t g *rest"], c: int) -> Float[Tensor, "b g n c *rest"]:
    """Time in chunks of `c`, the last one filled with zeros (which add nothing to any sum)."""
    t = x.shape[1]
    n = (t + c - 1) // c
    if not isinstance(t, int):  # in an exported graph of any length, that n c = t + missing cannot be proved
        places = torch.arange(n * c, device=x.device)
        behind = (places >= t).reshape(-1, *[1] * (x.dim() - 2))
        x = x.index_select(1, places.clamp(max=t - 1)).masked_fill(behind, 0.0)
    elif missing := n * c - t:
        x = torch.cat((x, x.new_zeros(x.shape[0], missing, *x.shape[2:])), 1)
    return x.unflatten(1, (n, c)).movedim(3, 1)


def _scan(
    added: Float[Tensor, "b g n f e"],
    start: Float[Tensor, "b g f e"],
    log_decay: Float[Tensor, "b g n"] | None,
) -> Float[Tensor, "b g m f e"]:
    """The states before each of n chunks and after the last one, m = n + 1."""
    if log_decay is None:
        return torch.cat((start[:, :, None], added), 2).cumsum(2)
    return scan_chunks(added, start, log_decay[..., None])


def scan_chunks(
    added: Float[Tensor, "b g n f e"], start: Float[Tensor, "b g f e"], log_decay: Float[Tensor, "b g n #f"]
) -> Float[Tensor, "b g m f e"]:
    """Return the states before each chunk and after the last, where chunks fade by feature or all alike.

    Where n is a symbol, in an exported graph of any length, nothing can walk through the chunks: every state
    is then a sum over all of them, each as far as it has faded, O(n^2)."""
    if isinstance(added.shape[2], int):
        states = [start]
        # Not by index: the gradient of each would be an array for all chunks.
        for kept, new in zip(log_decay.exp()[..., None].unbind(2), added.unbind(2), strict=True):
            states.append(kept * states[-1] + new)
        return torch.stack(states, 2)
    added = torch.cat((start[:, :, None], added), 2)
    log_decay = torch.cat((torch.zeros_like(log_decay[:, :, :1]), log_decay), 2)
    return (fading(log_decay.mT) @ added.movedim(3, 2)).movedim(2, 3)


def fading(log_decay: Float[Tensor, "*b c"]) -> Float[Tensor, "*b c c"]:
    """Return what is left at each token of every earlier one; 0 of a later one."""
    c = log_decay.shape[-1]
    future = torch.ones(c, c, dtype=torch.bool, device=log_decay.device).triu(1)
    return _faded(log_decay).masked_fill(future, -math.inf).exp()


def _faded(log_decay: Float[Tensor, "*b c"]) -> Float[Tensor, "*b c c"]:
    """The logarithm of it for the earlier ones, 0 for the others.

    Every entry is a sum of its own and no difference of two: the decays keep their digits beside a token
    that decays by a lot."""
    c = log_decay.shape[-1]
    future = torch.ones(c, c, dtype=torch.bool, device=log_decay.device).triu()
    return log_decay[..., None].expand(*log_decay.shape, c).masked_fill(future, 0.0).cumsum(-2)


def _bidirectional(
    q: Float[Tensor, "b t h f"],
    k: Float[Tensor, "b s g f"],
    v: Float[Tensor, "b s g e"],
    log_decay: Float[Tensor, "b s g"] | None,
    log_input: Float[Tensor, "b s g"] | None,
    state: LinearState,
) -> LinearAttentionOutputs:
    """Every query reads the totals over all keys: two matrix products. (log_decay is None: validated.)"""
    if log_input is not None:
        k = k * log_input.exp()[..., None]
    kv = state.kv + k.permute(0, 2, 3, 1) @ v.movedim(1, 2)
    z = state.z + k.sum(1)
    return _read(q, LinearState(kv, z))


def _step(
    q: Float[Tensor, "b 1 h f"],
    k: Float[Tensor, "b 1 g f"],
    v: Float[Tensor, "b 1 g e"],
    log_decay: Float[Tensor, "b 1 g"] | None,
    log_input: Float[Tensor, "b 1 g"] | None,
    state: LinearState,
) -> LinearAttentionOutputs:
    """The recurrence as printed at the top, for one token."""
    kv, z = state
    if log_decay is not None:
        kept = log_decay[:, 0].exp()[..., None]
        kv, z = kept[..., None] * kv, kept * z
    return _bidirectional(q, k, v, None, log_input, LinearState(kv, z))


def _read(q: Float[Tensor, "b t h f"], state: LinearState) -> LinearAttentionOutputs:
    q = q.unflatten(2, (state.z.shape[1], -1)).permute(0, 2, 1, 3, 4)  # [b g t r f]
    rows = q.flatten(2, 3)
    numerator = (rows @ state.kv).unflatten(2, q.shape[2:4])
    denominator = (rows @ state.z[..., None]).unflatten(2, q.shape[2:4])[..., 0]
    return LinearAttentionOutputs(
        numerator.movedim(1, 2).flatten(2, 3), denominator.movedim(1, 2).flatten(2, 3), state
    )


def divide(numerator: Float[Tensor, "b t h e"], denominator: Float[Tensor, "b t h"]) -> Tensor:
    """The ratio; 0 where there is nothing to divide by, with no gradient there."""
    nothing = (denominator == 0)[..., None]
    return (numerator / denominator[..., None].masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


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
    """Features in the sum dtype, padded places zero whatever stood there, NaN included.

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
    log_decay: Tensor | None,
    log_input: Tensor | None,
    state: LinearState | None,
    mask: Tensor | None,
    cu_seqlens: CuSeqlens | None,
    causal: bool,
    eps: float,
    feature_map: str | None,
    chunk: int,
) -> Layout:
    """The layout of k, of everything that is given."""
    sizes: dict[str, int] = {}
    checks.qkv(q, k, v, mask, sizes, same_length=causal or cu_seqlens is not None)
    layout = Layout.of("k" if cu_seqlens is None else "q", k, mask, cu_seqlens)
    checks.heads(sizes["h"], sizes["g"])
    if sizes["d"] < 1 or sizes["e"] < 1:
        raise ValueError(f"q, k and v must be at least 1 wide, got d={sizes['d']} and e={sizes['e']}")
    for name, x in (("log_decay", log_decay), ("log_input", log_input)):
        if x is not None:
            checks.shape(name, x, "b s g", sizes)
            checks.floating(name, x)
            if x.device != q.device:
                raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if state is not None:
        of_all = sizes | {"b": layout.n}
        checks.parts("state", state, LinearState, ("b g d e", "b g d"), of_all)
        checks.state_dtype("state.kv", state.kv, q)
        checks.state_dtype("state.z", state.z, q, narrow=False)
    if log_decay is not None:
        if not causal:
            raise ValueError("log_decay needs causal=True: without an order of time nothing decays")
        check_decay(log_decay, mask, finite=True)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be at least 0 and finite, got {eps}")
    if feature_map is not None and feature_map not in FUSED:
        raise ValueError(f"feature_map must be one of {tuple(FUSED)} or None, got {feature_map!r}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    return layout


def check_decay(log_decay: Tensor, mask: Tensor | None, *, finite: bool) -> None:
    """Raises ValueError where a decay [b t ...] is above 1 or, if it must be `finite`, 0; where readable."""
    if not checks.readable(log_decay, mask):
        return
    with torch.no_grad():
        wrong = ~((log_decay <= 0) & log_decay.isfinite()) if finite else log_decay > 0
        if mask is not None:
            wrong = wrong & mask.reshape(*mask.shape, *[1] * (log_decay.dim() - 2))
        if bool(wrong.any()):
            raise ValueError(
                f"log_decay must be {'finite and ' if finite else ''}at most 0 (a decay of at most 1), got "
                f"{log_decay[wrong][0].item():g}"
            )

"""lintra's attention in models of transformers, by `attn_implementation`; `import lintra.hf` registers it.

"lintra" is what the model computes anyway, exact softmax attention, in lintra's kernels: sliding windows as
bands at O(t w), padded and packed batches without a t x t mask (with one where there is padding between the
tokens of a window); packed sequences stay apart in a call that makes a cache, too, where transformers' own
masks let them see each other. "lintra-<mechanism>", such as "lintra-linear" or "lintra-performer", puts that
mechanism, with the defaults of its `Config`, between the model's own projections: another function of the
same weights, to be trained on. `register_attention` gives a name to any other configuration. Mechanisms
with parameters or inputs of their own (gated, delta, linformer ...) are refused: the model has no weights
for them, `lintra.hf.LintraForCausalLM` does.

Models with rotary positions rotate q and k before they call attention. A feature map is then applied to
rotated vectors, above and below the fraction, which is `rotary="inputs"` of `lintra.attention.linear`: y is
an average of values, and no denominator is 0 where the map is positive. It is no longer a function of
distances alone, and not what `rotary="features"` gives. With a map that can be 0, such as relu, a
denominator can be 0 too, and y is then 0.

`scaling` reaches mechanisms whose scores have a scale. The model's attention dropout reaches those whose
weights can be dropped; the others refuse to be trained with it. No weights are returned.

With transformers' own caches, all keys are read again for each new token, which is exact and O(t) a token.
`lintra.hf.cache_for(model)` keeps states instead. transformers does not save `attn_implementation`: name it
again in from_pretrained.
"""

from dataclasses import fields, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from lintra import attention as mechanisms
from lintra.attention import Attention, AttentionConfig, in_layer, softmax
from lintra.compat.transformers.cache import CACHE, StateCache, StateLayer, claim
from lintra.compat.transformers.masking import Visible, have_holes, visible
from lintra.ops.layout import Layout
from lintra.ops.softmax_attention import fused_attention

PREFIX = "lintra"
_UNSERVED = (
    *("softcap", "s_aux", "sinks", "position_bias", "head_mask", "cache", "output_attentions"),
    *("indices", "block_indices"),  # of the keys that a sparse attention chose
)
_RESTARTS = "lintra_restarts"  # the attribute of positions that says where sequences begin among them
_OWN = {PREFIX: "softmax"} | {f"{PREFIX}-{x}": x for x in mechanisms.names()}  # names of mechanisms
_defaults: dict[str, AttentionConfig] = {}  # of those that have been used
REGISTERED: dict[str, AttentionConfig] = {}
# By module, not on it: a mechanism's buffers must not appear in the model's state dict.
_built: WeakKeyDictionary[nn.Module, dict[Any, Attention]] = WeakKeyDictionary()


def register_attention(name: str, config: AttentionConfig) -> None:
    """Let `attn_implementation=name` be the mechanism of a configuration, such as performer.Config(). Where
    its scale, window or dropout is the default, the model's own applies.

    Raises ValueError unless the name begins with "lintra-" and is not that of a mechanism; TypeError for
    anything but a configuration."""
    own = name.removeprefix(f"{PREFIX}-")
    if own == name or not own or name in _OWN:
        raise ValueError(f"name must be 'lintra-...' and not that of a mechanism, got {name!r}")
    if not isinstance(config, AttentionConfig):
        raise TypeError(f"config must be a mechanism's Config, got {type(config).__name__}")
    REGISTERED[name] = config
    _register(name)


def configured(name: str | None) -> AttentionConfig | None:
    """Return the configuration of an `attn_implementation`; None if it is not lintra's."""
    if name in REGISTERED:
        return REGISTERED[name]
    if name not in _OWN:
        return None
    if name not in _defaults:
        _defaults[name] = mechanisms.load(_OWN[name]).Config()
    return _defaults[name]


def cache_for(model: nn.Module) -> StateCache:
    """Return an empty cache for `model.generate(..., cache=cache_for(model))`, whose name is
    `past_key_values` before transformers 5.24.

    Raises ValueError unless the model was built with attention of lintra that has a recurrent form, and for
    models in which a state cannot stand for the keys and values: encoder-decoders, attention to chunks,
    layers that share keys and values, and latent attention (DeepSeek, Kimi Linear), whose cache holds the
    inputs of keys and values."""
    own: Any = getattr(model, "config", None)
    text = own.get_text_config(decoder=True) if hasattr(own, "get_text_config") else own
    name = getattr(text, "_attn_implementation", None)
    config = configured(name)
    if config is None:
        raise ValueError(
            f"cache_for needs a model with attn_implementation='lintra' or 'lintra-...', got {name!r}"
        )
    with torch.device("meta"):
        mechanism = config.build(heads=1, dim=2, causal=True)
    if not mechanism.can.recurrent:
        raise ValueError(f"attention {mechanism.name!r} has no recurrent form, and so no state")
    return StateCache(_layers(model.config))


def _layers(config: Any) -> list[Any] | None:
    """Return the layers of a hybrid model's cache, transformers' own where there is no attention; None where
    every layer attends. Raises ValueError as `cache_for` does."""
    text = config.get_text_config(decoder=True)
    reasons = {
        "is an encoder-decoder": config.is_encoder_decoder,
        "attends to chunks": getattr(text, "attention_chunk_size", None),
        "shares keys and values between layers": getattr(text, "num_kv_shared_layers", None),
    }
    latent = getattr(text, "kv_lora_rank", None) is not None
    reasons["has multi-head latent attention, which caches no keys and values"] = latent
    layers = DynamicCache(config=config).layers
    attends = [isinstance(layer, CacheLayerMixin) for layer in layers]
    plain = [type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers]
    reasons["has layers that attend and recur, or keep more than keys and values"] = attends != plain
    for reason, found in reasons.items():
        if found:
            raise ValueError(
                f"cache_for does not support {type(config).__name__}, which {reason}: leave "
                f"{CACHE} out, for a cache of transformers' own"
            )
    if all(attends):
        return None
    return [StateLayer() if own else layer for own, layer in zip(attends, layers, strict=True)]


def attend(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return y [b t h e] and no weights, of query [b h t d], key [b g s d] and value [b g s e].

    The function of transformers' AttentionInterface. Raises ValueError or NotImplementedError for what the
    mechanism has no form of."""
    layer = claim(key)
    for option in _UNSERVED:
        if kwargs.get(option) is not None and kwargs[option] is not False:
            raise NotImplementedError(f"attn_implementation={name!r} does not support {option}")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seen = attention_mask
    if seen is None or (isinstance(seen, Tensor) and seen.dim() == 2):
        real = None if seen is None else seen.bool()
        holes = real is not None and sliding_window is not None and have_holes(real)
        seen = Visible(causal, sliding_window, real, masked=real is not None, holes=holes)
    config = configured(name)
    assert config is not None
    if isinstance(seen, Tensor):
        if layer is not None:
            raise NotImplementedError(
                f"a StateCache does not support a mask of queries and keys, got {list(seen.shape)}: leave "
                f"{CACHE} out, for a cache of transformers' own"
            )
        plain = isinstance(config, softmax.Config) and not config.window
        seen = _boolean(seen) if plain else seen
        if not plain or seen.dtype != torch.bool:
            raise NotImplementedError(
                f"attn_implementation={name!r} takes no mask {list(seen.shape)} of {seen.dtype} that says "
                "which query sees which key, as of static caches: 'lintra' takes boolean ones, and those of "
                "0 and the least number"
            )
        seen = seen[..., : k.shape[1]]
        if cu_seq_lens_q is not None:
            seen = seen & _same_sequence(Layout.of("query", q, None, cu_seq_lens_q), k.shape[1])
        options = {"visible": seen, "scale": scaling, "dropout": dropout}
        return fused_attention(query, key, value, **options).transpose(1, 2), None
    given = {"window": seen.window, "scale": scaling, "dropout": dropout}
    mechanism = _mechanism(module, name, config, given, seen.causal, q, k, v)
    packed = _packing(seen, q, k, position_ids, cu_seq_lens_q)
    exact = isinstance(mechanism, softmax.SoftmaxAttention)
    window = mechanism.config.window if exact else None
    seen = seen._replace(window=window)
    if layer is not None and window is not None and seen.holes:
        raise NotImplementedError(
            f"the window of a StateCache does not count padding between tokens: leave {CACHE} out, "
            "for a cache of transformers' own"
        )
    if exact:
        if packed is None and layer is None and not seen.causal:
            return mechanism.attend_all(q, k, v, seen.mask), None
        cut = seen.holes and window is not None and window < k.shape[1]
        if packed is None and layer is None and (q.shape[1] != k.shape[1] or cut):
            return mechanism.attend(q, k, v, seen.pairs(q.shape[1], k.shape[1], q.device)), None
    elif not seen.causal and _crosses(module, q, k):
        raise NotImplementedError(f"attn_implementation={name!r} does not support cross-attention")
    return _run(mechanism, q, k, v, seen, packed, layer), None


def _boolean(mask: Tensor) -> Tensor:
    """Return a mask that is added to scores, of 0 and the least numbers alone, as a boolean one; any other as
    it is."""
    if not mask.is_floating_point() or torch.compiler.is_compiling():
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return ~hidden if bool((hidden | (mask == 0)).all()) else mask


def _run(
    mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Visible, packed: Layout | None, layer: Any
) -> Tensor:
    """Return y [b t h e] of whole sequences, or of tokens after a layer's state or after other keys."""
    if layer is not None:
        return layer.extend(mechanism, q, k, v, seen.layout(q) if packed is None else packed)
    if packed is not None:
        rows = [x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v)]
        return mechanism(*rows, layout=packed).unflatten(1, q.shape[:2])[0]
    before = k.shape[1] - q.shape[1]
    if before:  # Placeholders of earlier queries are not read: a causal y depends on its own query.
        q = torch.cat((q.new_zeros(q.shape[0], before, *q.shape[2:]), q), 1)
    layout = seen.layout(q)
    return layout.zero(mechanism(q, k, v, layout=layout))[:, before:]


def _packing(
    seen: Visible, q: Tensor, k: Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None
) -> Layout | None:
    """Return the layout of packed sequences: by cu_seqlens, by transformers' mask or, where there is no mask,
    by positions that begin again at 0."""
    if cu_seqlens is not None:
        return Layout.of("query", q, None, cu_seqlens)
    fresh = seen.causal and not seen.masked and seen.sequence is None and q.shape[1] == k.shape[1] > 1
    if fresh and position_ids is not None and position_ids.shape[1:] == q.shape[1:2]:
        # Where no cache is made, transformers' mask already says so, even for positions that jump.
        begun = restarts(position_ids)
        seen = seen if begun is None else seen._replace(sequence=begun.expand(q.shape[0], -1))
    return None if seen.sequence is None else seen.layout(q)


def restarts(position_ids: Tensor) -> Tensor | None:
    """Return the number of the sequence of each token, where positions [b t] begin again at 0; None if they
    do not. Looks once at a tensor that all layers get: looking waits for a GPU."""
    version = None if torch.compiler.is_compiling() or position_ids.is_inference() else position_ids._version
    known = getattr(position_ids, _RESTARTS, None)
    if known is not None and known[0] == version:
        return known[1]
    begun = (position_ids == 0).cumsum(1)
    found = begun if bool((begun[:, -1] > begun[:, 0]).any()) else None
    if version is not None:
        setattr(position_ids, _RESTARTS, (version, found))
    return found


def _same_sequence(layout: Layout, keys: int) -> Tensor:
    """Return which of the t tokens of a packed row are of one sequence, [1, 1, t, t]."""
    assert layout.cu_seqlens is not None
    if layout.time != keys:
        raise NotImplementedError("packed sequences after cached keys take no mask of queries and keys")
    tokens = torch.arange(keys, device=layout.cu_seqlens.device)
    number = torch.searchsorted(layout.cu_seqlens, tokens, right=True)
    return (number[:, None] == number)[None, None]


def _crosses(module: nn.Module, q: Tensor, k: Tensor) -> bool:
    """Return whether a bidirectional module may read another sequence, whose mask then is the one it is
    given."""
    config = getattr(module, "config", None)
    crossing = any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention"))
    return crossing or q.shape[1] != k.shape[1]


def _config(name: str, config: Any, given: dict[str, Any]) -> AttentionConfig:
    """Return the configuration with the model's window, scale and dropout, where the mechanism has such a
    field and it has its default."""
    defaults = {field.name: field.default for field in fields(config)}
    if given["dropout"] and "dropout" not in defaults:
        raise ValueError(
            f"attn_implementation={name!r} drops no weights: set the model's attention dropout to 0"
        )
    if given["window"] is not None and not isinstance(config, softmax.Config):
        raise ValueError(
            f"attn_implementation={name!r} has no sliding window of {given['window']} tokens: set "
            "config.sliding_window=None, or use 'lintra'"
        )
    used = {x: y for x, y in given.items() if x in defaults and y not in (None, 0.0)}
    return replace(config, **{x: y for x, y in used.items() if getattr(config, x) == defaults[x]})


def _mechanism(
    module: nn.Module,
    name: str,
    config: AttentionConfig,
    given: dict[str, Any],
    causal: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Attention:
    """Return the mechanism of a layer, built once for each kind of call."""
    shape = {"heads": q.shape[2], "kv_heads": k.shape[2], "dim": q.shape[3], "value_dim": v.shape[3]}
    kinds = _built.setdefault(module, {})
    key = (config, *given.values(), causal, *shape.values(), q.device, q.dtype)
    if key not in kinds:
        config = _config(name, config, given)
        with torch.inference_mode(False):  # its buffers serve training too
            built = in_layer(config, getattr(module, "layer_idx", None) or 0).build(causal=causal, **shape)
            built = built.to(q.device, torch.float64 if q.dtype == torch.float64 else torch.float32)
        if needed := [x for x, _ in built.named_parameters()] + list(built.extra_inputs()):
            raise ValueError(
                f"attn_implementation={name!r} needs weights that this model does not have "
                f"({', '.join(needed)}): train lintra.hf.LintraForCausalLM, which has them"
            )
        if built.value_heads != v.shape[2]:
            raise ValueError(
                f"attn_implementation={name!r} has value_heads={built.value_heads} where the model projects "
                f"to {v.shape[2]}: leave value_heads at None"
            )
        if built.shared_key:
            raise ValueError(f"attn_implementation={name!r} has one projection for queries and keys, not two")
        kinds[key] = built
    built = kinds[key]
    return built if built.training == module.training else built.train(module.training)


def _register(name: str) -> None:
    AttentionInterface.register(name, partial(attend, name))
    AttentionMaskInterface.register(name, visible)


for _name in _OWN:
    _register(_name)

"""The configuration of a network as Hugging Face keeps it."""

import dataclasses
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedConfig

from lintra.attention import AttentionConfig
from lintra.checkpoint import from_json, to_json
from lintra.compat.transformers.cache import CACHE
from lintra.models import decoder, encoder

_RENAMED: dict[str, str] = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
# max_length would be taken for an option of generate
_NAMES: dict[str, str] = {
    **_RENAMED,
    "max_length": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
# Names in other configurations of transformers -> the field with that meaning here.
_ELSEWHERE: dict[str, str] = {
    "intermediate_size": "mlp_ratio, its ratio to hidden_size",
    "hidden_act": "activation",
    "n_inner": "mlp_ratio, its ratio to hidden_size",
    "ffn_dim": "mlp_ratio, its ratio to hidden_size",
    "activation_function": "activation",
    "hidden_activation": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_dropout": "dropout",
    "attention_probs_dropout_prob": "dropout",
    "attn_dropout": "dropout",
    "attn_pdrop": "dropout",
    "resid_pdrop": "dropout",
    "embd_pdrop": "dropout",
    "dropout_rate": "dropout",
    "classifier_dropout": "dropout",
    "layer_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps",
    "rms_norm_eps": "norm_eps",
    "use_qk_norm": "qk_norm",
    "conv_size": "conv",
    "use_short_conv": "conv",
    "layer_types": "attention, a list of mechanisms",
    "rope_theta": "rope_base",
    "rope_parameters": "rope_base",
    "rope_scaling": "rope_base",
    "sliding_window": "attention={'name': 'softmax', 'window': ...}",
    "type_vocab_size": "token_types",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "hidden_dim": "hidden_size",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_ctx": "max_position_embeddings",
}
_DEFAULTS: dict[Any, Any] = {
    _NAMES.get(name, name): x
    for config in (encoder.Config(vocabulary=256, pool="mean"), decoder.Config(vocabulary=256, start=False))
    for name, x in to_json(config).items()
    if name not in ("name", "inputs", "outputs", "tie_embeddings")
}


class LintraConfig(PreTrainedConfig):
    """A decoder or encoder of any mechanism: the fields of `decoder.Config` and `encoder.Config` in
    lintra.models, sizes under Hugging Face's names or lintra's.

    `attention` is a mechanism's name, {"name": "performer", "features": 64} with options, its `Config`, or a
    list of these, one for each layer or for the first ones, after which they repeat.
    vocab_size counts the symbols that are predicted; with start=True (here False by default) a decoder reads
    one more, numbered vocab_size, before the first. tie_word_embeddings is `tie_embeddings` of a decoder.
    `pool` is how LintraForSequenceClassification makes one vector of a sequence. Raises TypeError or
    ValueError for unknown mechanisms and options, values of a wrong type and fields that do not go together.
    """

    model_type = "lintra"
    keys_to_ignore_at_inference = [CACHE]  # noqa: RUF012 (Trainer adds a list)
    attribute_map = _RENAMED

    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **given: Any):
        given = {_NAMES.get(name, name): x for name, x in given.items()}
        for name in given.keys() - _DEFAULTS.keys():
            if name in _ELSEWHERE:
                raise TypeError(f"LintraConfig has no field {name!r}: give {_ELSEWHERE[name]}")
            if near := get_close_matches(name, _DEFAULTS, 1, cutoff=0.85):
                raise TypeError(f"LintraConfig has no field {name!r} (perhaps {near[0]})")
        from_file = self.transformers_version is not None  # a saved configuration names it
        own = _mechanisms(given.get("attention", _DEFAULTS["attention"]), saved=from_file)
        for each in own if isinstance(own, list) else [own]:
            for name in (each.keys() & given.keys()) - _DEFAULTS.keys():
                option = f"{{'name': {each['name']!r}, {name!r}: {given[name]!r}}}"
                raise TypeError(f"LintraConfig has no field {name!r}: give attention={option}")
        given = _DEFAULTS | given | {"attention": own}
        super().__post_init__(**given)
        self.network(decoder)
        self.network(encoder, outputs=1)  # which head_activation needs

    def network(self, module: Any, **given: Any) -> Any:
        """Return the configuration of the network that a module of lintra.models defines, `given` first.

        Raises ValueError where its fields do not go together."""
        content = {"name": module.__name__.rpartition(".")[2], "inputs": None, "outputs": None, **given}
        known = {field.name for field in dataclasses.fields(module.Config)}
        content |= {name: getattr(self, _NAMES.get(name, name)) for name in known - content.keys()}
        content = {name: x for name, x in content.items() if name in known | {"name"}}
        content["attention"] = _mechanisms(content["attention"])  # which may have been set since
        return from_json(module.Config, content, "config")

    @classmethod
    def of(cls, config: decoder.Config | encoder.Config) -> "LintraConfig":
        """Return the configuration of a network of lintra.models."""
        content = {name: x for name, x in to_json(config).items() if x is not None}
        outputs = content.get("outputs") if "pool" in content else None
        given = {name: x for name, x in content.items() if _NAMES.get(name, name) in _DEFAULTS}
        given["tie_word_embeddings"] = content.get("tie_embeddings", False)
        return cls(**given, **({} if outputs is None else {"num_labels": outputs}))


def _mechanisms(attention: Any, *, saved: bool = False) -> Any:
    """Return what `attention` may be, as JSON with all options."""
    if isinstance(attention, list | tuple):
        return [_mechanisms(each, saved=saved) for each in attention]
    content = {"name": attention} if isinstance(attention, str) else to_json(attention)
    return to_json(from_json(AttentionConfig, content, "attention", saved=saved))

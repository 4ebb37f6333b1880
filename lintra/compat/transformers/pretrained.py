"""Encoders of transformers as lintra's own: Longformer, BigBird and Nystromformer with their weights.

The blocks are those of BERT: token, position and type embeddings added, a norm, then attention and
feed-forward, each followed by its residual and a norm. Equal outputs in evaluation where transformers
computes what the paper says: docs/pretrained-encoders.md lists where it does not. Poolers are left out.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from lintra.attention import AttentionConfig, bigbird, longformer, nystromformer, softmax
from lintra.models import encoder
from lintra.models.encoder import Encoder

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_KINDS = ("longformer", "big_bird", "nystromformer")


@torch.no_grad()
def encoder_from_pretrained(model: PreTrainedModel | str | Path) -> Encoder:
    """Return an encoder with the configuration, weights and dtype of a model of transformers.

    `model` is a Longformer, BigBird or Nystromformer, bare or for masked language modelling, sequence or
    token classification, or question answering (not BigBird's, whose head is a layer of its own); or where
    `from_pretrained` finds one. Tokens are called with `mask` where theirs have `attention_mask`, types with
    `token_types`, and global tokens with `global_mask` for `global_attention_mask`.
    Raises ValueError for another model, for what lintra's encoder has no form of, and for a folder that lacks
    weights of its model, those of a pooler excepted.
    """
    if not isinstance(model, PreTrainedModel):
        named = AutoConfig.from_pretrained(model)
        name = (named.architectures or ["AutoModel"])[0]
        _check_kind(named, name)
        kind = getattr(transformers, name, None)
        if not hasattr(kind, "from_pretrained"):
            raise ValueError(f"architectures must name a model of transformers, got {name}")
        model = load_whole(kind, model)
    assert isinstance(model, PreTrainedModel)
    _check_kind(model.config, type(model).__name__)
    base: Any = getattr(model, model.base_model_prefix, model)
    # Longformer and Nystromformer begin after the positions that padding once had.
    padding = base.config.pad_token_id or 0
    first = {"longformer": padding + 1, "nystromformer": 2}.get(base.config.model_type, 0)
    positions = base.embeddings.position_embeddings.weight[first:]
    options, head = _head(model)
    ours = _config(base.config, len(positions), options).build().to(model.dtype)
    tensors = ours.state_dict() | _embedding(base, positions) | head
    for i, layer in enumerate(base.encoder.layer):
        tensors |= {f"blocks.{i}.{name}": x for name, x in _block(layer).items()}
    ours.load_state_dict(tensors)
    return ours.to(model.device).eval()


def load_whole(kind: Any, place: str | Path) -> Any:
    """Return `kind.from_pretrained(place)`, with no weight left as transformers initialised it.

    Raises ValueError, naming the tensors, where weights are missing; a pooler's may be.
    """
    model, found = kind.from_pretrained(place, output_loading_info=True)
    if missing := sorted(x for x in found["missing_keys"] if "pooler" not in x.split(".")):
        raise ValueError(
            f"{place} must hold all weights of {kind.__name__}, but lacks {', '.join(missing)}; a head alone "
            "that is not there can be left out: load the base model"
        )
    return model


def _check_kind(config: Any, name: str) -> None:
    """Raise ValueError unless the model `name` of a configuration is an encoder that lintra has."""
    decoder = getattr(config, "is_decoder", False)
    if config.model_type not in _KINDS or decoder:
        raise ValueError(
            f"model must be an encoder, one of {', '.join(_KINDS)}, got {name} of {config.model_type!r} with "
            f"is_decoder={decoder}"
        )


def _config(config: Any, positions: int, options: dict[str, Any]) -> encoder.Config:
    return encoder.Config(
        vocabulary=config.vocab_size,
        attention=_attention(config, positions),
        causal=False,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        width=config.hidden_size,
        mlp_ratio=config.intermediate_size / config.hidden_size,
        activation=_activation(config),
        norm="post",
        norm_eps=config.layer_norm_eps,
        position="learned",
        max_length=positions,
        token_types=config.type_vocab_size,
        embedding_norm=True,
        dropout=float(config.hidden_dropout_prob),
        **options,
    )


def _attention(config: Any, positions: int) -> AttentionConfig:
    dropout = float(config.attention_probs_dropout_prob)
    if config.model_type == "longformer":
        windows = set(torch.tensor(config.attention_window).flatten().tolist())
        if len(windows) > 1:
            raise ValueError(f"attention_window must be that of every layer, got {config.attention_window}")
        return longformer.Config(window=windows.pop() // 2, global_projections=True, dropout=dropout)
    if config.model_type == "big_bird":
        if config.attention_type == "original_full":
            return softmax.Config(dropout=dropout)
        blocks = {"block": config.block_size, "random_blocks": config.num_random_blocks}
        return bigbird.Config(**blocks, dropout=dropout)
    # As many landmarks as tokens in a segment's length is its notation for attention without landmarks.
    exact = config.num_landmarks == config.segment_means_seq_len
    return nystromformer.Config(
        landmarks=positions if exact else config.num_landmarks,
        inverse_start="sample",
        conv=config.conv_kernel_size,
        dropout=dropout,
    )


def _activation(config: Any) -> Any:
    if config.hidden_act not in _ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of {', '.join(_ACTIVATIONS)}, got {config.hidden_act!r}")
    return _ACTIVATIONS[config.hidden_act]


def _embedding(base: Any, positions: Tensor) -> dict[str, Tensor]:
    words = base.embeddings.word_embeddings.weight
    if getattr(base.config, "rescale_embeddings", False):
        words = words * base.config.hidden_size**0.5
    named = {"embedding.table.weight": words, "position.table.weight": positions}
    named["token_types.weight"] = base.embeddings.token_type_embeddings.weight
    return named | _both("embedding_norm", base.embeddings.LayerNorm)


def _block(layer: Any) -> dict[str, Tensor]:
    attention, output = layer.attention.self, layer.attention.output
    qkv = attention.query, attention.key, attention.value
    tensors = {"attn.qkv_proj.weight": torch.cat([x.weight for x in qkv])}
    tensors["attn.qkv_proj.bias"] = torch.cat(
        [torch.zeros_like(x.weight[:, 0]) if x.bias is None else x.bias for x in qkv]
    )
    for ours, theirs in {"global_q": "query", "global_k": "key", "global_v": "value"}.items():
        if hasattr(attention, f"{theirs}_global"):
            tensors |= _both(f"attn.extra_proj.{ours}", getattr(attention, f"{theirs}_global"))
    if hasattr(attention, "conv"):
        tensors["attn.attention.conv"] = attention.conv.weight[:, 0, :, 0]
    tensors |= _both("attn.out_proj", output.dense) | _both("attn_norm", output.LayerNorm)
    tensors |= _both("mlp.up", layer.intermediate.dense) | _both("mlp.down", layer.output.dense)
    return tensors | _both("mlp_norm", layer.output.LayerNorm)


def _head(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of a configuration and the tensors of the head."""
    name, config = type(model).__name__, model.config
    if name.endswith("Model"):
        return {}, {}
    if name.endswith("ForMaskedLM"):
        if config.model_type == "longformer":
            head, hidden, norm, kind = model.lm_head, model.lm_head.dense, model.lm_head.layer_norm, "gelu"
        else:
            head = model.cls.predictions
            hidden, norm, kind = head.transform.dense, head.transform.LayerNorm, _activation(config)
        tensors = _both("head.0", hidden) | _both("head.2", norm) | _both("head.3", head.decoder)
        return {"outputs": config.vocab_size, "head_activation": kind, "head_norm": True}, tensors
    if name.endswith("ForSequenceClassification"):
        kind = "tanh" if config.model_type == "longformer" else _activation(config)
        tensors = _both("head.0", model.classifier.dense) | _both("head.3", model.classifier.out_proj)
        return {"outputs": config.num_labels, "head_activation": kind, "pool": "first"}, tensors
    last = getattr(model, "qa_outputs", None) or getattr(model, "classifier", None)
    if not isinstance(last, nn.Linear) or name.endswith("ForMultipleChoice"):
        raise ValueError(f"lintra's encoder has no head like that of {name}: take its base model")
    return {"outputs": last.out_features}, _both("head", last)


def _both(name: str, layer: Any) -> dict[str, Tensor]:
    return {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}

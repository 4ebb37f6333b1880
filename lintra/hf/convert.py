"""Conversion of networks of lintra.models to Hugging Face classes and back, with equal outputs."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lintra import checkpoint
from lintra.compat.transformers.pretrained import load_whole
from lintra.hf.base import LintraPreTrainedModel
from lintra.hf.causal import LintraForCausalLM
from lintra.hf.config import LintraConfig
from lintra.hf.encoders import LintraForMaskedLM, LintraForSequenceClassification, LintraModel
from lintra.models import Decoder, Encoder

_CLASSES = (LintraForCausalLM, LintraForMaskedLM, LintraForSequenceClassification, LintraModel)


def to_hf(model: Decoder | Encoder | str | Path) -> Any:
    """Return a decoder or encoder, or that in a folder of `lintra.checkpoint`, as the Hugging Face class of
    its task, in evaluation mode; the two share no memory.

    An encoder with a pool becomes a LintraForSequenceClassification, one that predicts symbols a
    LintraForMaskedLM, one without a head a LintraModel. Raises TypeError or ValueError for other networks.
    """
    network: Any = checkpoint.load(model) if isinstance(model, str | Path) else model
    kind = _class_of(network)
    with torch.device("meta"):
        made = kind(LintraConfig.of(network.config))
    made.load_state_dict(_renamed(network, {"head.": f"{kind.head_name}.", "": "model."}), assign=True)
    return made.requires_grad_(True).eval()


def from_hf(model: LintraPreTrainedModel | str | Path) -> Any:
    """Return the network of lintra.models in a model of this package, or in a folder of `save_pretrained`, in
    evaluation mode; the two share no memory.

    Raises TypeError for a model of another package, such as one with adapters that are not merged, and
    ValueError for a folder without an architecture of this one, or that lacks weights of it.
    """
    found: Any = _load(model) if isinstance(model, str | Path) else model
    if not isinstance(found, _CLASSES):
        raise TypeError(f"model must be of a class of lintra.hf, got {type(found).__name__}")
    tensors = _renamed(found, {f"{found.head_name}.": "head.", "model.": ""})
    return checkpoint.with_weights(found.network_config(), tensors, Path(str(found.name_or_path))).eval()


def _class_of(model: Any) -> Any:
    if type(model) is Decoder:
        return LintraForCausalLM
    if type(model) is not Encoder:
        raise TypeError(f"model must be a Decoder or an Encoder of lintra.models, got {type(model).__name__}")
    config = model.config
    if config.vocabulary is None:
        raise ValueError(f"the classes read symbols, the encoder features, inputs={config.inputs}")
    if config.pool is not None and config.outputs is not None:
        return LintraForSequenceClassification
    if config.pool is None and config.outputs in (None, config.vocabulary):
        return LintraModel if config.outputs is None else LintraForMaskedLM
    raise ValueError(
        f"no class has outputs={config.outputs} of {config.vocabulary} symbols, pool={config.pool}"
    )


def _load(folder: str | Path) -> Any:
    names = {kind.__name__: kind for kind in _CLASSES}
    found = (LintraConfig.from_pretrained(folder).architectures or ["none"])[0]
    if found not in names:
        raise ValueError(f"{folder} must hold one of {', '.join(names)}, got {found}")
    return load_whole(names[found], folder)


def _renamed(model: nn.Module, prefixes: dict[str, str]) -> dict[str, Tensor]:
    """Return copies of a model's tensors, with the first matching prefix of each name replaced."""
    renamed = {}
    for name, x in model.state_dict().items():
        prefix = next(each for each in prefixes if name.startswith(each))
        renamed[prefixes[prefix] + name.removeprefix(prefix)] = x.clone()
    return renamed

"""Description of exported graphs for the program that runs them, as a JSON beside them."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

import lintra
from lintra.checkpoint import to_json
from lintra.export._onnx_graph import Axes, Graph
from lintra.models import CTC, Decoder, Encoder
from lintra.nn.distributions import Logits
from lintra.nn.position import Bounded

FORMAT = 1  # of the names and of what stands in the metadata
_TYPES = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool"}


def describe(
    model: Decoder | Encoder | CTC, graph: Graph, files: Mapping[str, str], opset: int, domain: str
) -> dict[str, Any]:
    """Return the description of graphs with the inputs and outputs of `graph`, in `files` by form."""
    about: dict[str, Any] = {"format": FORMAT, "lintra": lintra.__version__}
    about |= {"model": type(model).__module__.rpartition(".")[2]}
    about |= {"files": dict(files), "opset": opset, "domain": domain, "inputs": []}
    for name, x in graph.inputs.items():
        about["inputs"].append(_tensor(name, x, graph.axes[name]))
        if name in graph.starts:
            about["inputs"][-1] |= {"start": graph.starts[name], "next": name.replace("state", "next", 1)}
    about["outputs"] = [_tensor(name, x, graph.outputs[name]) for name, x in graph.example().items()]
    if isinstance(model, Decoder):
        about |= _of_decoder(model)
    else:
        about |= _of_ctc(model) if isinstance(model, CTC) else _of_encoder(model)
    about["feed"] += _lengths(model, graph, files)
    return about | {"config": to_json(model.config)}


def _tensor(name: str, x: Tensor, axes: Axes) -> dict[str, Any]:
    shape = [axes.get(i, size) for i, size in enumerate(x.shape)]
    return {"name": name, "type": _TYPES[x.dtype], "shape": shape}


def _lengths(model: Decoder | Encoder | CTC, graph: Graph, files: Mapping[str, str]) -> list[str]:
    """Say how many tokens each of several forms takes, and how many all together, where mechanisms or
    positions end."""
    network = cast("Encoder", model.encoder) if isinstance(model, CTC) else model
    limits = [] if graph.longest is None else [graph.longest]
    if isinstance(network.position, Bounded):
        limits.append(network.position.reach * (model.config.subsample if isinstance(model, CTC) else 1))
    lines = ["time: 1 in the step form, any number in the parallel form"] if len(files) > 1 else []
    if limits:
        seen = ", with those that a state has seen" if isinstance(model, Decoder) else ""
        unit = "frames" if isinstance(model, CTC) else "tokens"
        lines.append(f"time: {min(limits)} {unit} at most{seen}")
    return lines


def _of_decoder(model: Decoder) -> dict[str, Any]:
    config, symbols = model.config, model.config.vocabulary
    tokens = f"tokens: symbols 0 .. {symbols - 1}"
    if model.start_token is not None:
        tokens += f", and {model.start_token} before the first one, which predicts it"
    params = "params: of the distribution `output` over the symbol that follows each token"
    if isinstance(config.output, Logits):
        params = "params: the logits of the symbol that follows each token"
    feed = [tokens, params]
    feed.append("state: every input with a start is full of it before any token, axis past being 1")
    feed.append("state: at the next call each input is the output that its next names")
    return {
        "vocabulary": symbols,
        "start_symbol": model.start_token,
        "output": to_json(config.output),
        "feed": feed,
    }


def _of_encoder(model: Encoder) -> dict[str, Any]:
    config = model.config
    inputs = f"tokens: symbols 0 .. {config.vocabulary - 1}" if config.vocabulary is not None else ""
    inputs = inputs or f"features: {config.inputs} numbers a time step"
    of = "a sequence" if config.pool else "a token, 0 where it is padded"
    feed = [inputs, "mask: true for real tokens, false for padding, whose values change nothing"]
    if config.token_types is not None:
        feed.append(f"token_types: 0 .. {config.token_types - 1}, the type of each token")
    feed.append(f"predictions: one for {of}")
    return {"vocabulary": config.vocabulary, "feed": feed}


def _of_ctc(model: CTC) -> dict[str, Any]:
    config = model.config
    return {
        "symbols": list(config.symbols.names),
        "unit": config.symbols.unit,
        "blank": 0,
        "features": to_json(config.features),
        "subsample": config.subsample,
        "seconds_per_step": config.seconds,
        "feed": [
            f"features: {config.features.bins} numbers a frame, as `features` says, before any normalization",
            "mask: true for real frames, which count as the first ones of their row; false for padding",
            "log_probs: natural logarithms; number 0 is the blank, number i + 1 is symbols[i]",
            "real: true for steps of real frames; log_probs of the others are 0",
            "text: the most likely symbol of each step, repetitions as one, blanks left out",
        ],
    }

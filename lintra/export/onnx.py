"""A model as an ONNX graph, for onnxruntime and other programs: docs/export.md.

A decoder is written as its recurrence in one of two forms, with the same names:

    step       tokens [batch 1], state     -> params [batch 1 p], the state after it
    parallel   tokens [batch time], state  -> params [batch time p], the state after the last of them

and an encoder or a recogniser as "whole": tokens or features and a mask [batch time] -> predictions, or
log_probs and which of them are real. Axes with a name may have any length. The graphs are of ONNX's own
operators, in float32: of opset 20, with products of matrices for a recurrence, or of opset 27, where it is
one operator. domain="com.microsoft" has onnxruntime's operator of that name instead, with either opset.
"""

import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

import lintra
from lintra.attention import Attention
from lintra.checkpoint import to_json
from lintra.export import _onnx_models
from lintra.export._onnx_description import FORMAT, describe
from lintra.export._onnx_graph import Graph
from lintra.export._onnx_models import Form
from lintra.export._onnx_operators import Domain, Opset, Target
from lintra.io.files import write_atomically
from lintra.models import CTC, BiLSTM, Decoder, Encoder, Seq2Seq
from lintra.nn.attention_layer import AttentionLayer

__all__ = ["FORMAT", "Domain", "Form", "Opset", "forms", "to_bytes", "why_not", "write", "write_description"]

MOST = 2**31 - 2**20  # bytes of weights: protobuf writes no more into one file
_CHUNKED = ("linear", "retention", "gated", "ssd", "performer", "rfa", "cosformer")
_TRIANGULAR = ("delta", "kda")
_RECURRENCES = _CHUNKED + _TRIANGULAR
_WINDOW = "its cache is a window that is sorted again at each token, whose length a graph cannot know"
_TRIANGLE = (
    "it solves a triangle of tokens in each chunk, for which opset 20 has no operator: opset 27 has one for "
    "the whole recurrence, and so has the domain com.microsoft"
)


def forms(model: Any) -> tuple[Form, ...]:
    """The forms a kind of model has, whether or not its mechanism can be written in them."""
    return ("whole",) if isinstance(model, (Encoder, CTC)) else ("step", "parallel")


def why_not(model: Any, form: Form, *, opset: Opset = 20, domain: Domain = "ai.onnx") -> str | None:
    """Return why a model cannot be written in that form; None if it can. ValueError for an unknown target."""
    target = Target(opset, domain)
    if isinstance(model, Seq2Seq) or not isinstance(model, (Decoder, Encoder, CTC)):
        return f"decoders, encoders and recognisers are written, got {type(model).__name__}"
    if form not in forms(model):
        return f"a model {type(model).__name__} is written as {' or '.join(forms(model))}, got {form!r}"
    blocks = model.encoder if isinstance(model, CTC) else model
    if isinstance(blocks, BiLSTM):
        return "its encoder is a BiLSTM, which packs sequences by lengths that a graph cannot know"
    if form != "step" and not target.has_operators:
        chunk, longest = _onnx_models.longest_chunk(blocks), _onnx_models.longest_sequence(blocks)
        causal = any(x.causal for x in blocks.modules() if isinstance(x, Attention))
        if causal and longest is not None and longest < chunk + 4:
            return f"chunks of {chunk} tokens need a max_length of {chunk + 4} or more, got {longest}"
    for module in model.modules():
        if isinstance(module, AttentionLayer) and (reason := _foreign(module.attention, form, target)):
            return reason
        if module._forward_hooks or module._forward_pre_hooks:
            return f"a graph would keep what the hooks of {type(module).__name__} did once"
    tensors = model.state_dict()
    for name, x in tensors.items():
        if x.is_floating_point() and x.dtype != torch.float32:
            return f"the weights must be float32, {name} is {x.dtype}: call model.float()"
    if (size := sum(x.nbytes for x in tensors.values())) > MOST:
        return f"one file holds {MOST:,} bytes of weights at most, these are {size:,}"
    return None


def write(model: Any, file: str | Path, form: Form, *, opset: Opset = 20, domain: Domain = "ai.onnx") -> None:
    """The model into one file, which appears whole or not at all. Raises as `to_bytes` does, and
    checkpoint.Error where the file cannot be written."""
    content = to_bytes(model, form, opset=opset, domain=domain)
    write_atomically(Path(file), lambda place: place.write_bytes(content))


def to_bytes(model: Any, form: Form, *, opset: Opset = 20, domain: Domain = "ai.onnx") -> bytes:
    """The content of a file. The weights are those of now.

    Raises ValueError with the reason for a model that cannot be written, ModuleNotFoundError where the
    packages of the extra [onnx] are missing.
    """
    graph, target = _graph(model, form, opset, domain), Target(opset, domain)
    _packages()
    if target.has_operators:
        _use_operators(graph.module)
    about = {"lintra": lintra.__version__, "format": str(FORMAT), "form": form}
    about |= {"model": type(model).__module__.rpartition(".")[2], "config": json.dumps(to_json(model.config))}
    if form != "whole":
        about["start"] = json.dumps(graph.starts)
    return graph.to_bytes(target, about)


def write_description(
    model: Any,
    file: str | Path,
    files: Mapping[Form, str | Path],
    *,
    opset: Opset = 20,
    domain: Domain = "ai.onnx",
) -> None:
    """Write a JSON file for programs that run the exported `files`: the names, types and shapes of inputs and
    outputs, the states before any token, symbols, and what to feed. Raises as `write` does."""
    graph = _graph(model, list(files)[-1], opset, domain)
    about = describe(model, graph, {form: Path(place).name for form, place in files.items()}, opset, domain)
    content = json.dumps(about, indent=2) + "\n"
    write_atomically(Path(file), lambda place: place.write_text(content))


def _graph(model: Any, form: Form, opset: Opset, domain: Domain) -> Graph:
    """Raise ValueError with the reason for a model that cannot be written."""
    if form not in (known := get_args(Form)):
        raise ValueError(f"form must be one of {', '.join(known)}, got {form!r}")
    if reason := why_not(model, form, opset=opset, domain=domain):
        raise ValueError(f"this model cannot be exported to ONNX as {form!r}: {reason}")
    chunked = not Target(opset, domain).has_operators
    model = _portable(model)
    if form == "whole":
        return _onnx_models.whole_sequence_graph(model, chunked=chunked)
    return _onnx_models.recurrence_graph(model, form, chunked=chunked)


def _foreign(attention: Any, form: Form, target: Target) -> str | None:
    """Return why a mechanism cannot be written; None if it can."""
    name = attention.name
    if attention.can.state == "window":
        return f"attention {name!r}: {_WINDOW}"
    if name in _TRIANGULAR and form != "step" and not target.has_operators:
        return f"attention {name!r}: {_TRIANGLE}"
    if name not in (known := (*_RECURRENCES, "softmax")):
        return f"attention {name!r}: graphs are known to be right for {', '.join(sorted(known))}"
    return None


def _portable(model: Any) -> Any:
    """A copy for evaluation on the CPU, without lintra's own operators."""
    model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "impl"):
            module.config = dataclasses.replace(config, impl="torch")
        if isinstance(module, AttentionLayer):
            module.conv_impl = "torch"
    return model


def _use_operators(model: Any) -> None:
    """Have recurrences traced as lintra's operators, which a target replaces by ONNX's."""
    for module in model.modules():
        if getattr(module, "name", None) in _RECURRENCES:
            module.config = dataclasses.replace(module.config, impl="native")
        if isinstance(module, AttentionLayer):
            module.conv_impl = "native"


def _packages() -> None:
    """Raise ModuleNotFoundError where one that the exporter needs is missing."""
    try:
        import onnx  # noqa: F401 (only whether it is there)
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        message = f"ONNX needs {error.name}, which is not installed: pip install 'lintra[onnx]'"
        raise ModuleNotFoundError(message, name=error.name) from error

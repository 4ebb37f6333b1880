"""A model as an ONNX graph, for onnxruntime and whatever else reads one: docs/export.md.

A decoder is written as its recurrence in one of two forms, with the same names:

    step       tokens [batch 1], state     -> params [batch 1 p], the state after it
    parallel   tokens [batch time], state  -> params [batch time p], the state after the last of them

and an encoder as "whole": tokens or features and a mask [batch time] -> predictions. Axes with a name may
have any length. The graphs are of ONNX's own operators, in float32.
"""

import copy
import dataclasses
import json
import logging
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import lintra
from lintra.attention import State, map_state
from lintra.checkpoint import to_json, write_atomically
from lintra.models import Decoder, Encoder, Seq2Seq
from lintra.nn.attention_layer import AttentionLayer

Form = Literal["step", "parallel", "whole"]

FORMAT = 1  # of the names and of what stands in the metadata
OPSET = 20
MOST = 2**31 - 2**20  # bytes of weights: protobuf writes no more into one file
_CHUNKED = ("linear", "retention", "gated", "ssd", "performer", "rfa", "cosformer")
_MECHANISMS = {
    "step": (*_CHUNKED, "delta", "kda", "softmax"),
    "parallel": (*_CHUNKED, "softmax"),
    "whole": ("linear", "performer", "cosformer", "rfa", "softmax"),
}
_WHY = {
    **dict.fromkeys(
        ("delta", "kda"), "it solves a triangle of tokens in each chunk, for which ONNX has no operator"
    ),
    "window": "its cache is a window that is sorted again at each token, whose length a graph cannot know",
}


def forms(model: Any) -> tuple[Form, ...]:
    """The forms a kind of model has, whether or not its mechanism can be written in them."""
    return ("whole",) if isinstance(model, Encoder) else ("step", "parallel")


def why_not(model: Any, form: Form) -> str | None:
    """Return why a model cannot be written in that form; None if it can."""
    if isinstance(model, Seq2Seq) or not isinstance(model, (Decoder, Encoder)):
        return f"decoders and encoders are written, got {type(model).__name__}"
    if form not in forms(model):
        return f"a model {type(model).__name__} is written as {' or '.join(forms(model))}, got {form!r}"
    if form == "parallel" and (reach := _reach(model)) is not None and reach < _longest_chunk(model) + 4:
        return f"a chunk of {_longest_chunk(model)} tokens must be shorter than max_length={reach}"
    if form == "whole" and model.config.pool == "first":
        return "pool='first' brings the first real token to the front by a stable sort, which ONNX has not"
    for module in model.modules():
        if isinstance(module, AttentionLayer) and (reason := _foreign(module.attention, form)):
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


def write(model: Any, file: str | Path, form: Form) -> None:
    """The model into one file, which appears whole or not at all. Raises as `to_bytes` does, and
    checkpoint.Error where the file cannot be written."""
    content = to_bytes(model, form)
    write_atomically(Path(file), lambda place: place.write_bytes(content))


def to_bytes(model: Any, form: Form) -> bytes:
    """The content of a file. The weights are those of now.

    Raises ValueError with the reason for a model that cannot be written, ModuleNotFoundError where the
    packages of the extra [onnx] are missing.
    """
    if form not in _MECHANISMS:
        raise ValueError(f"form must be one of {', '.join(_MECHANISMS)}, got {form!r}")
    if reason := why_not(model, form):
        raise ValueError(f"this model cannot be exported to ONNX as {form!r}: {reason}")
    _packages()
    model = _portable(model)
    graph = _whole(model) if form == "whole" else _recurrence(model, form)
    about = {"lintra": lintra.__version__, "format": str(FORMAT), "form": form}
    about |= {"model": type(model).__module__.rpartition(".")[2], "config": json.dumps(to_json(model.config))}
    return graph.to_bytes(about | graph.about)


def _foreign(attention: Any, form: Form) -> str | None:
    """Return what cannot be written of a mechanism."""
    name = attention.name
    if attention.can.state == "window":
        return f"attention {name!r}: {_WHY['window']}"
    if name not in _MECHANISMS[form]:
        known = ", ".join(sorted(_MECHANISMS[form]))
        why = _WHY.get(name, f"the form {form!r} is known to be right for {known}")
        return f"attention {name!r}: {why}"
    return None


def _portable(model: Any) -> Any:
    """A copy for evaluation on the CPU, without operators of our own."""
    model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "impl"):
            module.config = dataclasses.replace(config, impl="torch")
        if isinstance(module, AttentionLayer):
            module.conv_impl = "torch"
    return model


class _Graph:
    """A module of tensors one by one, its inputs by name, of which an example is given, and its outputs.

    axes: for each input and output, the names of those of its axes that may have any length."""

    def __init__(self, module: nn.Module, inputs: dict[str, Tensor], axes: dict[str, dict[int, str]]):
        self.module, self.inputs, self.axes = module, inputs, axes
        self.outputs: list[str] = []
        self.time: tuple[int, int | None] = 2, None  # the least and the most that is assumed
        self.about: dict[str, str] = {}

    def to_bytes(self, about: dict[str, str]) -> bytes:
        from onnx_ir.passes import common

        dims = {name: torch.export.Dim(name) for axes in self.axes.values() for name in axes.values()}
        dims |= {"time": torch.export.Dim("time", min=self.time[0], max=self.time[1])}
        shapes = tuple({i: dims[axis] for i, axis in self.axes[name].items()} for name in self.inputs)
        with torch.no_grad(), _quiet():
            args = tuple(self.inputs.values())
            # What a graph of any length assumes of it stays unproved: the tests try lengths of every kind.
            traced = torch.export.export(
                self.module.eval(),
                args,
                dynamic_shapes=(shapes,),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            program = torch.onnx.export(
                traced,
                input_names=list(self.inputs),
                output_names=self.outputs,
                dynamic_shapes=(shapes,),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            common.ClearMetadataAndDocStringPass()(program.model)  # files and lines of where it was written
            program.model.metadata_props.update(about)
            return program.model_proto.SerializeToString()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter tells its own developers."""
    logger = logging.getLogger("torch.onnx._internal.exporter")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class _Extend(nn.Module):
    """`model.extend` with the tensors of a state one by one."""

    def __init__(self, model: Decoder, like: State, names: list[str]):
        super().__init__()
        self.model, self.like, self.names = model, like, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        tokens, *state = inputs
        given = dict(zip(self.names, state, strict=True))
        values = iter(self._value(name, x, tokens, given) for name, x in _named(self.like))
        params, after = self.model.extend(tokens, map_state(lambda _: next(values), self.like))
        return params, *(x for name, x in _named(after) if name in given)

    def _value(self, name: str, like: Tensor, tokens: Tensor, given: dict[str, Tensor]) -> Tensor:
        if re.fullmatch(_SEEN, name):
            return given["state.seen"]
        return given[name] if name in given else like.new_zeros(tokens.shape[0], *like.shape[1:])


_SEEN = r"state\.layers\.\d+\.seen"  # each layer counts what the model counts


def _recurrence(model: Decoder, form: Form) -> _Graph:
    """The graph of `model.extend`."""
    batch, past = 3, 4  # of the example; an axis of one or none would be taken for a constant
    time = 1 if form == "step" else _longest_chunk(model) + 3
    # A token that is not there leaves a state as it was; a cache gets one place for it, in which nothing is.
    nothing = torch.zeros(batch, 1, dtype=torch.int64)
    _, start = model.extend(nothing, mask=nothing.bool())
    _, like = model.extend(nothing.expand(-1, past))
    names, inputs, axes, fills = [], {"tokens": nothing.expand(-1, time).contiguous()}, {}, {}
    axes["tokens"] = {0: "batch"} | ({} if form == "step" else {1: "time"})
    for (name, x), (_, first) in zip(_named(like), _named(start), strict=True):
        if re.fullmatch(_SEEN, name) or not first.numel():
            continue
        names.append(name)
        inputs[name] = x.contiguous()
        axes[name] = {i: "past" for i in range(1, x.dim()) if x.shape[i] != first.shape[i]} | {0: "batch"}
        fills[name] = _fill(first)
    graph = _Graph(_Extend(model, like, names), inputs, axes)
    graph.outputs = ["params", *(name.replace("state", "next", 1) for name in names)]
    # More than one chunk is assumed; what is shorter is then one that is filled up.
    graph.time = _longest_chunk(model) + 1, _reach(model)
    graph.about = {"start": json.dumps(fills)}
    return graph


def _named(state: State, name: str = "state") -> list[tuple[str, Tensor]]:
    """The tensors of a state in their order, named by the fields that lead to each."""
    if isinstance(state, Tensor):
        return [(name, state)]
    fields = getattr(state, "_fields", range(len(state)))
    pairs = zip(fields, state, strict=True)
    return [leaf for field, part in pairs for leaf in _named(part, f"{name}.{field}")]


def _fill(x: Tensor) -> float | str:
    """The number that a state's tensor is full of before any token; infinity as JavaScript reads it too."""
    value = x.flatten()[0].item()
    if not bool((x == value).all()):
        raise AssertionError(f"a state that begins with more than one number: {x}")
    return value if math.isfinite(value) else str(value).replace("inf", "Infinity")


def _longest_chunk(model: Any) -> int:
    return max(getattr(block.attn.attention.config, "chunk", 1) for block in model.blocks)


def _reach(model: Any) -> int | None:
    """The tokens that the mechanisms are built for; None: any number."""
    found = [getattr(block.attn.attention.config, "max_length", None) for block in model.blocks]
    return min((x for x in found if x is not None), default=None)


class _Whole(nn.Module):
    """An encoder, its mask the second argument."""

    def __init__(self, model: Encoder):
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        x, mask = inputs
        return (self.model(x, mask=mask),)


def _whole(model: Encoder) -> _Graph:
    time = _longest_chunk(model) + 3
    mask = torch.ones(3, time, dtype=torch.bool)
    inputs = model.config.inputs
    name = "tokens" if inputs is None else "features"
    x = torch.zeros(3, time, dtype=torch.int64) if inputs is None else torch.zeros(3, time, inputs)
    axes = {0: "batch", 1: "time"}
    graph = _Graph(_Whole(model), {name: x, "mask": mask}, {name: axes, "mask": axes})
    graph.outputs, graph.time = ["predictions"], (_longest_chunk(model) + 1, None)
    return graph


def _packages() -> None:
    """Raises ModuleNotFoundError where one that the exporter needs is missing."""
    try:
        import onnx  # noqa: F401 (only whether it is there)
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        message = f"ONNX needs {error.name}, which is not installed: pip install 'lintra[onnx]'"
        raise ModuleNotFoundError(message, name=error.name) from error

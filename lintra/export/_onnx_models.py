"""Traced parts of each kind of model: modules that take and return tensors by name."""

import math
import re
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lintra.attention import State, map_state
from lintra.export._onnx_graph import Axes, Graph
from lintra.models import CTC, Decoder, Encoder

Form = Literal["step", "parallel", "whole"]

_BATCH, _PAST = 3, 4  # of the example; an axis of one or none would be taken for a constant
_SEEN = r"state\.layers\.\d+\.seen"  # each layer counts what the model counts


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


def recurrence_graph(model: Decoder, form: Form, *, chunked: bool) -> Graph:
    """Build the graph of `model.extend`, its parallel form in chunks or with an operator for any length."""
    chunk = longest_chunk(model) if chunked else 1
    time = 1 if form == "step" else chunk + 3
    # A padded token leaves a state as it was; a cache gets one empty place for it.
    nothing = torch.zeros(_BATCH, 1, dtype=torch.int64)
    _, start = model.extend(nothing, mask=nothing.bool())
    _, like = model.extend(nothing.expand(-1, _PAST))
    axes = {"tokens": {0: "batch"} | ({} if form == "step" else {1: "time"})}
    inputs, outputs = {"tokens": nothing.expand(-1, time).contiguous()}, {"params": axes["tokens"]}
    starts = {}
    for (name, x), (_, first) in zip(_named(like), _named(start), strict=True):
        if re.fullmatch(_SEEN, name) or not first.numel():
            continue
        inputs[name] = x.contiguous()
        grown = [i for i in range(1, x.dim()) if x.shape[i] != first.shape[i]]
        axes[name] = dict.fromkeys(grown, "past") | {0: "batch"}
        outputs[name.replace("state", "next", 1)] = dict.fromkeys(grown, "past_after") | {0: "batch"}
        starts[name] = _fill(first)
    return Graph(
        module=_Extend(model, like, list(starts)),
        inputs=inputs,
        axes=axes,
        outputs=outputs,
        # More than one chunk is assumed; a shorter input is one chunk, filled up.
        shortest=chunk + 1,
        longest=longest_sequence(model),
        starts=starts,
    )


def _named(state: State, name: str = "state") -> list[tuple[str, Tensor]]:
    """The tensors of a state in their order, named by the fields that lead to each."""
    if isinstance(state, Tensor):
        return [(name, state)]
    fields = getattr(state, "_fields", range(len(state)))
    pairs = zip(fields, state, strict=True)
    return [leaf for field, part in pairs for leaf in _named(part, f"{name}.{field}")]


def _fill(x: Tensor) -> float | str:
    """The number that fills a state's tensor before any token; infinity as JavaScript reads it too."""
    value = x.flatten()[0].item()
    if not bool((x == value).all()):
        raise AssertionError(f"a state that begins with more than one number: {x}")
    return value if math.isfinite(value) else str(value).replace("inf", "Infinity")


def longest_chunk(model: Any) -> int:
    """Return the tokens in a chunk of a decoder or encoder, of the mechanism with the largest; 1 where no
    mechanism is causal, and so has none."""
    found = [block.attn.attention for block in model.blocks]
    return max(getattr(x.config, "chunk", 1) if x.causal else 1 for x in found)


def longest_sequence(model: Any) -> int | None:
    """Return the tokens that the mechanisms are built for; None: any number."""
    found = [getattr(block.attn.attention.config, "max_length", None) for block in model.blocks]
    return min((x for x in found if x is not None), default=None)


class _Predict(nn.Module):
    """An encoder, its mask the second argument, types of tokens the third where it has any."""

    def __init__(self, model: Encoder):
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        x, mask, *types = inputs
        return (self.model(x, mask=mask, **({"token_types": types[0]} if types else {})),)


class _Recognise(nn.Module):
    """A recogniser, its mask the second argument."""

    def __init__(self, model: CTC):
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Frames are filled up to whole steps, by padding: in a graph of any length none can be odd."""
        x, mask = inputs
        time, rate = x.shape[1], self.model.config.subsample
        places = torch.arange((time + rate - 1) // rate * rate, device=x.device)
        there = places.clamp(max=time - 1)
        return self.model(x.index_select(1, there), mask=mask.index_select(1, there) & (places < time))


def whole_sequence_graph(model: Encoder | CTC, *, chunked: bool) -> Graph:
    """Build the graph of `forward` of an encoder or a recogniser."""
    outputs: dict[str, Axes] = {}
    if isinstance(model, CTC):
        config, encoder = model.config, cast("Encoder", model.encoder)
        width, rate = config.features.bins, config.subsample
        for name in ("log_probs", "real"):
            outputs[name] = {0: "batch", 1: "steps"}
    else:
        encoder, width, rate = model, model.config.inputs, 1
        outputs["predictions"] = {0: "batch"} | ({1: "time"} if model.config.pool is None else {})
    chunk = rate * longest_chunk(encoder) if chunked else rate
    name, time = "tokens" if width is None else "features", chunk + 3 * rate
    x = torch.zeros(_BATCH, time, dtype=torch.int64) if width is None else torch.zeros(_BATCH, time, width)
    inputs = {name: x, "mask": torch.ones(_BATCH, time, dtype=torch.bool)}
    if encoder.config.token_types is not None and encoder is model:
        inputs["token_types"] = torch.zeros(_BATCH, time, dtype=torch.int64)
    return Graph(
        module=_Recognise(model) if isinstance(model, CTC) else _Predict(model),
        inputs=inputs,
        axes={key: {0: "batch", 1: "time"} for key in inputs},
        outputs=outputs,
        shortest=chunk + 1,
        longest=None if (most := longest_sequence(encoder)) is None else rate * most,
    )

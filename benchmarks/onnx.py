"""`python -m benchmarks onnx`: prompts read by onnxruntime, with every way to write a recurrence.

The reference is the graph of opset 20, made of matrix products: its parallel form or, if a mechanism has none
there, its step token by token. It is compared with the parallel forms with com.microsoft's operators and with
those of opset 27, which onnxruntime runs as a loop over tokens, and with what bounds them all: the products
with the model's weights and nothing else. Each model has two layers, as initialised.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from lintra.attention import AttentionConfig, delta, gated, kda, linear, retention, ssd
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.export import onnx
from lintra.models import Decoder, decoder

MEASURES = ("lintra/export",)
MECHANISMS: dict[str, AttentionConfig] = {
    "linear": linear.Config(),
    "retention": retention.Config(),
    "gated": gated.Config(),
    "ssd": ssd.Config(),
    "delta": delta.Config(),
    "kda": kda.Config(),
}
PLAIN, CONTRIB, STANDARD = "opset 20", "com.microsoft", "opset 27"
TARGETS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    CONTRIB: {"domain": "com.microsoft"},
    STANDARD: {"opset": 27},
}
ALONE = "weights alone"
FASTER = 3  # times as fast a prompt should be read as by the graph of opset 20, whatever the bound allows


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    mechanisms: tuple[str, ...] = tuple(MECHANISMS)
    layers: int = 2
    width: int = 256
    heads: int = 4
    lengths: tuple[int, ...] = (512, 2048)
    rounds: int = 5
    at_least: float = 0.05  # seconds per turn


QUICK = Sizes(mechanisms=("delta",), layers=1, width=16, heads=2, lengths=(8, 16), rounds=2, at_least=0)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings."""
    contestants: dict[str, Callable[[], object]] = {}
    # onnxruntime 1.31 refuses opset 27, which was not released when it was built, unless told not to.
    with mock.patch.dict(os.environ, ALLOW_RELEASED_ONNX_OPSET_ONLY="0"):
        for name in sizes.mechanisms:
            model = _model(name, sizes)
            readers = {way: _reader(model, target) for way, target in TARGETS.items()}
            weights = products(readers[PLAIN].content)
            for length in sizes.lengths:
                what = f"{name}, {length} tokens"
                contestants |= {f"{what}: {way}": _prefill(reader, length) for way, reader in readers.items()}
                contestants[f"{what}: {ALONE}"] = _multiply(weights, length)
    timings = interleaved(contestants, rounds=sizes.rounds, at_least=sizes.at_least, progress=progress)
    return [row for name in sizes.mechanisms for row in _rows(name, timings, sizes)], timings


def session(content: bytes) -> Any:
    """Return a session of onnxruntime for a graph, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def start(runner: Any) -> dict[str, np.ndarray]:
    """Return the state of one sequence before any token, from the graph's own inputs."""
    fills = json.loads(runner.get_modelmeta().custom_metadata_map["start"])
    kinds, state = {"tensor(int64)": np.int64, "tensor(float)": np.float32}, {}
    for x in runner.get_inputs()[1:]:
        shape = [n if isinstance(n, int) else 1 for n in x.shape]
        state[x.name] = np.full(shape, float(fills[x.name]), kinds[x.type])
    return state


def products(content: bytes) -> list[tuple[int, int]]:
    """Return the shape [in out] of each weight matrix in a graph that activations are multiplied with."""
    from onnx import helper, load_from_string

    graph = load_from_string(content).graph
    weights = {x.name: tuple(x.dims) for x in graph.initializer}
    found = []
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm") and len(shape := weights.get(node.input[1], ())) == 2:
            attributes = {x.name: helper.get_attribute_value(x) for x in node.attribute}
            found.append(shape[::-1] if attributes.get("transB") else shape)
    return found


def weights_alone(shapes: Sequence[tuple[int, int]]) -> bytes:
    """Return a graph that multiplies activations x0, x1, ... [1 time in], one for each width, with weights of
    these shapes. It gives the first token of each product; all are computed, and their memory is reused."""
    from onnx import helper, numpy_helper

    generator, widths = np.random.default_rng(0), sorted({width for width, _ in shapes})
    bounds = {"first": [0], "second": [1], "time": [1]}
    constants = [numpy_helper.from_array(np.array(x), name) for name, x in bounds.items()]
    nodes = []
    for i, (width, out) in enumerate(shapes):
        weight = generator.standard_normal((width, out), np.float32) * width**-0.5
        constants.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [f"x{widths.index(width)}", f"w{i}"], [f"y{i}"]))
        nodes.append(helper.make_node("Slice", [f"y{i}", *bounds], [f"token{i}"]))
    inputs = [_floats(f"x{i}", (1, "time", width)) for i, width in enumerate(widths)]
    outputs = [_floats(f"token{i}", (1, 1, out)) for i, (_, out) in enumerate(shapes)]
    graph = helper.make_graph(nodes, "weights", inputs, outputs, constants)
    opset = helper.make_opsetid("", 20)
    return helper.make_model(graph, opset_imports=[opset], ir_version=9).SerializeToString()


def _floats(name: str, shape: tuple[int | str, ...]) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _multiply(shapes: Sequence[tuple[int, int]], length: int) -> Callable[[], object]:
    runner, generator = session(weights_alone(shapes)), np.random.default_rng(1)
    given = {
        x.name: generator.standard_normal((1, length, x.shape[2]), np.float32) for x in runner.get_inputs()
    }
    return lambda: runner.run(None, given)


def _model(name: str, sizes: Sizes) -> Decoder:
    torch.manual_seed(0)
    return decoder.Config(
        vocabulary=256,
        attention=MECHANISMS[name],
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
    ).build()


class _Reader(NamedTuple):
    """A graph, its session, and whether it reads one token at a time."""

    content: bytes
    session: Any
    single: bool


def _reader(model: Decoder, target: dict[str, Any]) -> _Reader:
    single = onnx.why_not(model, "parallel", **target) is not None
    content = onnx.to_bytes(model, "step" if single else "parallel", **target)
    return _Reader(content, session(content), single)


def _prefill(reader: _Reader, length: int) -> Callable[[], object]:
    fresh, tokens = start(reader.session), np.arange(length)[None] * 7 % 256
    pieces = np.split(tokens, length, 1) if reader.single else [tokens]

    def read() -> None:
        state = fresh
        for piece in pieces:
            _, *after = reader.session.run(None, {"tokens": piece, **state})
            state = dict(zip(state, after, strict=True))

    return read


def _rows(name: str, timings: dict[str, Timing], sizes: Sizes) -> list[Row]:
    rows = []
    for length in sizes.lengths:
        what = f"{name}, {length} tokens"
        seconds = {way: timings[f"{what}: {way}"].median for way in (*TARGETS, ALONE)}
        rows.append(Row(f"{what}: {PLAIN}", length / seconds[PLAIN], "tokens/s"))
        for way in (CONTRIB, STANDARD, ALONE):
            target = FASTER if way == CONTRIB else None
            rows.append(Row(f"{what}: {way} / {PLAIN}", seconds[PLAIN] / seconds[way], "x", at_least=target))
    return rows

"""`python -m benchmarks onnx`: prompts read by onnxruntime, with every way to write a recurrence.

The graph of opset 20, of products of matrices, is the measure: its parallel form or, where a mechanism has
none there, its step token by token. Beside it stand the parallel forms with com.microsoft's operators and
with those of opset 27, which onnxruntime runs as a loop over tokens. Two layers of each, as initialised.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
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
FASTER = 3  # that a prompt should be read than by the graph of opset 20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amount of work that is timed."""

    mechanisms: tuple[str, ...] = tuple(MECHANISMS)
    layers: int = 2
    width: int = 256
    heads: int = 4
    lengths: tuple[int, ...] = (512, 2048)
    rounds: int = 5
    at_least: float = 0.05  # seconds of a turn


QUICK = Sizes(mechanisms=("delta",), layers=1, width=16, heads=2, lengths=(8, 16), rounds=2, at_least=0)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Times everything -> the table's rows and the single timings."""
    contestants: dict[str, Callable[[], object]] = {}
    # onnxruntime 1.31 refuses opset 27, as not released when it was built, unless it is told not to.
    with mock.patch.dict(os.environ, ALLOW_RELEASED_ONNX_OPSET_ONLY="0"):
        for name in sizes.mechanisms:
            model = _model(name, sizes)
            for way, target in TARGETS.items():
                reader = _reader(model, target)
                for length in sizes.lengths:
                    contestants[f"{name}, {length} tokens: {way}"] = _prefill(reader, length)
    timings = interleaved(contestants, rounds=sizes.rounds, at_least=sizes.at_least, progress=progress)
    return [row for name in sizes.mechanisms for row in _rows(name, timings, sizes)], timings


def session(content: bytes) -> Any:
    """Return a graph in onnxruntime on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def start(runner: Any) -> dict[str, np.ndarray]:
    """Return the state of one sequence before any token, by what the file says of itself."""
    fills = json.loads(runner.get_modelmeta().custom_metadata_map["start"])
    kinds, state = {"tensor(int64)": np.int64, "tensor(float)": np.float32}, {}
    for x in runner.get_inputs()[1:]:
        shape = [n if isinstance(n, int) else 1 for n in x.shape]
        state[x.name] = np.full(shape, float(fills[x.name]), kinds[x.type])
    return state


def _model(name: str, sizes: Sizes) -> Decoder:
    torch.manual_seed(0)
    return decoder.Config(
        vocabulary=256,
        attention=MECHANISMS[name],
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
    ).build()


def _reader(model: Decoder, target: dict[str, Any]) -> tuple[Any, bool]:
    """A session, and whether it reads one token at a time."""
    single = onnx.why_not(model, "parallel", **target) is not None
    return session(onnx.to_bytes(model, "step" if single else "parallel", **target)), single


def _prefill(reader: tuple[Any, bool], length: int) -> Callable[[], object]:
    runner, single = reader
    fresh, tokens = start(runner), np.arange(length)[None] * 7 % 256
    pieces = np.split(tokens, length, 1) if single else [tokens]

    def read() -> None:
        state = fresh
        for piece in pieces:
            _, *after = runner.run(None, {"tokens": piece, **state})
            state = dict(zip(state, after, strict=True))

    return read


def _rows(name: str, timings: dict[str, Timing], sizes: Sizes) -> list[Row]:
    rows = []
    for length in sizes.lengths:
        what = f"{name}, {length} tokens"
        seconds = {way: timings[f"{what}: {way}"].median for way in TARGETS}
        rows.append(Row(f"{what}: {PLAIN}", length / seconds[PLAIN], "tokens/s"))
        for way in (CONTRIB, STANDARD):
            target = FASTER if way == CONTRIB else None
            rows.append(Row(f"{what}: {way} / {PLAIN}", seconds[PLAIN] / seconds[way], "x", at_least=target))
    return rows

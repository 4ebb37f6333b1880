"""The program that benchmarks/overhead.py runs in a checkout, this one or an older one of lintra.

It imports only what lintra 0.1 has too. It answers `counts` with the calls and frames of a forward, and
`step N` with None after it has decoded N tokens, one by one.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import lintra
from lintra.models import decoder

OURS = str(Path(lintra.__file__).parent)
# The functions that call the library: until 0.2 in the module of its loader.
KERNEL = {(str(Path(OURS) / "native" / file), "forward") for file in ("linear_attention.py", "__init__.py")}
TOKENS = 64


def model(layers: int, width: int) -> Any:
    """Return the paper's model, with 8 heads and linear attention, with random weights."""
    return decoder.Config(vocabulary=256, layers=layers, heads=8, width=width).build().eval()


def frames(width: int) -> tuple[int, int]:
    """Return how many Python frames a call of the model has open where the native library is called, the
    model's own and the caller of the library among them, and how many of them are lintra's."""
    found: list[list[CodeType]] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and (code.co_filename, code.co_name) in KERNEL and not found:
            found.append([each.f_code for each in _stack(frame)])

    _forward(model(1, width), watch)
    if not found:
        raise RuntimeError("the native library was not called; `lintra info` says why it cannot serve here")
    opened = found[0][: found[0].index(_forward.__code__)]
    return len(opened), sum(code.co_filename.startswith(OURS) for code in opened)


def calls(layers: int, width: int, *, grad: bool) -> int:
    """Return how many calls of lintra's Python functions a forward makes."""
    count = 0

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    with torch.set_grad_enabled(grad):
        _forward(model(layers, width), watch)
    return count


def _forward(network: Any, watch: Callable[[FrameType, str, object], None]) -> None:
    """Run a forward that is watched, after one that is not."""
    tokens = torch.zeros(2, TOKENS, dtype=torch.int64)
    network(tokens)
    sys.setprofile(watch)
    try:
        network(tokens)
    finally:
        sys.setprofile(None)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def server(layers: int, width: int) -> Callable[[str], dict[str, float] | None]:
    """Return the function that answers a line: `counts`, or `step N`."""
    network = model(layers, width)
    token = torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        _, state = network.extend(torch.zeros(1, 8, dtype=torch.int64))

    def answer(line: str) -> dict[str, float] | None:
        if line == "counts":
            opened, ours = frames(width)
            found: dict[str, float] = {"frames": opened, "frames of ours": ours}
            for name, grad in (("no gradients", False), ("gradients", True)):
                more = calls(8, width, grad=grad) - calls(4, width, grad=grad)
                found[f"calls a layer, {name}"] = more / 4
            return found
        with torch.inference_mode():
            for _ in range(int(line.removeprefix("step "))):
                network.extend(token, state)
        return None

    return answer

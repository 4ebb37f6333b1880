"""`python -m benchmarks generation`: the paper's MNIST model writing images on the CPU, token by token.

A step takes tokens and states to the parameters of the next tokens. It is eager (`model.extend`) or
fused (`lintra.generation.native_decode`) with weights in three precisions. Softmax with cached keys
and values, whose time grows linearly with the position, is timed in the middle of parts of an image and
averaged. Drawing from the parameters is timed by itself; images a second include it. A step of one sequence
is compared with reading the weights at the rate of a copy, although memory may be read faster than it is
copied, and a step of many with the rate of a matrix product. With --model, a run on images, the loss on its
test images is measured with each precision of the weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lintra import checkpoint, train
from lintra.attention import linear, softmax
from lintra.bench import next_token, options
from lintra.bench.next_token import state_at
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.bench.training_step import MATMUL_OPERATIONS, matmul
from lintra.bench.training_step import Sizes as Shape
from lintra.bench.training_step import model as image_model
from lintra.generation.native_decode import NativeDecoder
from lintra.generation.options import Sampler
from lintra.models import Decoder
from lintra.native.quantize import DTYPES, Weights
from lintra.tasks import PixelTask, predicted, read

MEASURES = (
    "lintra/native",
    "lintra/generation/native_decode.py",
    "lintra/generation/sampling.py",
    "lintra/nn/distributions.py",
)
PRECISIONS: tuple[Weights, ...] = ("float32", "bfloat16", "int8")
EAGER, CACHED, DRAWING, ALONE = "eager", next_token.CACHED, "drawing", "float32, one thread"


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of this benchmark."""

    model: str | None = None  # the folder of a run on images, to measure what rounded weights cost


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    model: str | None = None
    images: int = 64  # test images that are scored
    layers: int = 8
    width: int = 256
    tokens: int = 784  # of an image
    parts: int = 2  # parts of an image, in the middle of which softmax is timed
    many: int = 64  # sequences at a time
    batches: tuple[int, ...] = (16, 256)  # other numbers of sequences
    copied: int = 2**26  # numbers, more than a cache holds
    rounds: int = 15
    at_least: float = 0.05  # seconds per turn

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the positions at which softmax is timed."""
        return tuple(self.tokens * (2 * i + 1) // (2 * self.parts) for i in range(self.parts))


QUICK = Sizes(
    images=2, layers=1, width=32, tokens=8, many=4, batches=(2,), copied=2**12, rounds=2, at_least=0
)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings."""
    images = images_of(sizes.model, sizes.images) if sizes.model else None  # refused before anything is timed
    shape = Shape(layers=sizes.layers, width=sizes.width)
    torch.manual_seed(0)
    ours = image_model(linear.Config(), shape).build().eval()
    exact = image_model(softmax.Config(), shape).build().eval()
    with torch.no_grad():
        contestants = {"matmul": matmul(), "copy": _copy(sizes)}
        for batch in (1, sizes.many):
            contestants |= _steps(ours, batch)
            for position in sizes.positions:
                contestants[f"{batch}: {CACHED} at {position}"] = _eager(exact, batch, position)
        for batch in sizes.batches:
            contestants[f"{batch}: float32"] = _fused(ours, batch, "float32")
            contestants[f"{batch}: {DRAWING}"] = _drawing(ours, batch)
        timings = interleaved(contestants, rounds=sizes.rounds, at_least=sizes.at_least, progress=progress)
        rows = _rows({name: timing.median for name, timing in timings.items()}, ours, sizes)
        rows += _losses(*images) if images else []
    return rows, timings


def _steps(model: Decoder, batch: int) -> dict[str, Callable[[], object]]:
    """The ways to take a step with linear attention, and the drawing after it."""
    alone = _fused(model, batch, "float32")

    def one_thread() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        alone()
        torch.set_num_threads(threads)

    ways = {weights: _fused(model, batch, weights) for weights in PRECISIONS}
    ways |= {EAGER: _eager(model, batch, 1), ALONE: one_thread, DRAWING: _drawing(model, batch)}
    return {f"{batch}: {name}": way for name, way in ways.items()}


def _eager(model: Decoder, batch: int, position: int) -> Callable[[], object]:
    state, tokens = state_at(model, batch, position), torch.zeros(batch, 1, dtype=torch.int64)
    return lambda: model.extend(tokens, state)


def _fused(model: Decoder, batch: int, weights: Weights) -> Callable[[], object]:
    step, tokens = (
        NativeDecoder(model, state_at(model, batch, 1), weights),
        torch.zeros(batch, 1, dtype=torch.int64),
    )
    return lambda: step(tokens, step.state)


def _drawing(model: Decoder, batch: int) -> Callable[[], object]:
    params, uniform = torch.zeros(batch, model.output.size), torch.zeros(batch, dtype=torch.float64)
    return lambda: Sampler().draw(model.output, params, uniform)


def _copy(sizes: Sizes) -> Callable[[], object]:
    numbers = torch.zeros(sizes.copied)
    copied = torch.empty_like(numbers)
    return lambda: copied.copy_(numbers)


def _read(model: Decoder) -> int:
    """Return how many weights a step reads."""
    return sum(x.numel() for part in (*model.blocks, model.norm, model.head) for x in part.parameters())


def _rows(seconds: dict[str, float], model: Decoder, sizes: Sizes) -> list[Row]:
    rate, many = MATMUL_OPERATIONS / seconds["matmul"], sizes.many
    memory, weights = 8 * sizes.copied / seconds["copy"], _read(model)
    rows = [Row("matmul", rate / 1e9, "GFLOP/s"), Row("copy", memory / 1e9, "GB/s")]
    for batch in (1, many):
        each = [seconds[f"{batch}: {CACHED} at {position}"] for position in sizes.positions]
        seconds[f"{batch}: {CACHED}"] = sum(each) / len(each)
    target = {"float32": 1.3}
    for name in (EAGER, *PRECISIONS, ALONE, CACHED, DRAWING):
        rows.append(Row(f"a step of 1, {name}", 1e3 * seconds[f"1: {name}"], "ms", at_most=target.get(name)))
    for name in PRECISIONS:
        size = DTYPES[name][0].itemsize
        rows.append(
            Row(f"reading the weights at the rate of a copy, {name}", 1e3 * weights * size / memory, "ms")
        )
    for name in PRECISIONS[1:]:
        share = seconds[f"1: {name}"] / seconds["1: float32"]
        rows.append(Row(f"a step of 1, {name} / float32", 100 * share, "%", at_most=60))
    for name in (EAGER, *PRECISIONS, ALONE, CACHED, DRAWING):
        rows.append(Row(f"a step of {many}, {name}", 1e3 * seconds[f"{many}: {name}"], "ms"))
    share = 2 * weights * many / seconds[f"{many}: float32"] / rate
    rows.append(Row(f"a step of {many}, float32: of the matmul's rate", 100 * share, "%"))
    images = {name: _images(seconds, many, name, sizes) for name in (EAGER, *PRECISIONS, CACHED)}
    target = {"float32": 9}
    rows += [Row(f"{many} at once, {n}", x, "images/s", at_least=target.get(n)) for n, x in images.items()]
    rows.append(
        Row(f"{many} at once, float32 / {CACHED}", images["float32"] / images[CACHED], "x", at_least=5)
    )
    for batch in sizes.batches:
        rows.append(Row(f"{batch} at once, float32", _images(seconds, batch, "float32", sizes), "images/s"))
    return rows


def _images(seconds: dict[str, float], batch: int, name: str, sizes: Sizes) -> float:
    """Images a second, including drawing."""
    return batch / sizes.tokens / (seconds[f"{batch}: {name}"] + seconds[f"{batch}: {DRAWING}"])


def images_of(folder: str, count: int) -> tuple[Decoder, Tensor]:
    """The model of a run on images, and so many of its test images, all if there are fewer. Raises ValueError
    for a run on anything else."""
    model, task = checkpoint.load(folder), train.Run.around(folder).task.build()
    if not isinstance(task, PixelTask):
        raise ValueError(f"model must be a run on images, {folder} is of the task {task.name}")
    return model, task.test.__getitems__(range(min(count, len(task.test))))["tokens"]


def _losses(model: Decoder, tokens: Tensor) -> list[Row]:
    """Bits per value of test images, in the steps that would write them."""
    state = model.start(len(tokens))
    bits = {"eager": _bits(model.extend, model, state, tokens)}
    for name in PRECISIONS:
        bits[name] = _bits(NativeDecoder(model, state, name), model, state, tokens)
    rows = [Row(f"loss on {len(tokens)} images, {name}", each, "bits/dim") for name, each in bits.items()]
    lost = {name: bits[name] - bits["float32"] for name in PRECISIONS[1:]}
    return rows + [Row(f"lost by {name} weights", 1e3 * each, "mbit/dim") for name, each in lost.items()]


def _bits(extend: Callable[..., tuple[Tensor, Any]], model: Decoder, state: Any, tokens: Tensor) -> float:
    """The mean over all values that the model predicts, in float64."""
    given, total = read(model, tokens), 0.0
    for now, target in zip(given.unbind(1), predicted(tokens, given).unbind(1), strict=True):
        params, state = extend(now[:, None], state)
        total -= model.output.log_prob(params[:, 0].double(), target).sum().item()
    return total / given.numel() / math.log(2)

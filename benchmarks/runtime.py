"""`python -m benchmarks runtime`: tokens a second of the C runtime, natively and in a browser, on one thread.

There are two models: the paper's for MNIST, as initialised, and mnist-small. A step takes one token to
the parameters of the next. The runtime is compared with onnxruntime on the same model. In Chromium, the
program with relaxed SIMD runs in a worker, as on the page of `lintra web`, whose loading and drawing are
timed by themselves. With --model, a run on images, the cost of float16 and int8 weights on its test images
is measured.
"""

import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.browser import launched, stepper, why_not
from benchmarks.generation import images_of
from benchmarks.onnx import session, start
from lintra import checkpoint, runtime, train, web
from lintra.attention import linear
from lintra.bench import options
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.bench.training_step import Sizes as Shape
from lintra.bench.training_step import model as image_model
from lintra.export import onnx
from lintra.export import runtime as export
from lintra.models import Decoder
from lintra.runtime import Model, Sequence
from lintra.tasks import predicted, read

MEASURES = ("lintra/runtime", "lintra/export/runtime.py", "lintra/web")
PAPER, SMALL = "paper", "mnist-small"
NATIVE, ONNX, BROWSER = "native", "onnxruntime", "Chromium"
TARGETS = {  # tokens a second of the paper's model
    f"{NATIVE}, float32": 1000,
    f"{NATIVE}, int8": 1800,
    f"{BROWSER}, float32": 600,
    f"{BROWSER}, int8": 900,
}
PROGRAMS = Path(runtime.__file__).parent
RELAXED = PROGRAMS / "lintra_runtime_relaxed.wasm"

# When the first values of an image appear, in milliseconds since the page was requested.
_FIRST = """addEventListener("DOMContentLoaded", () => {
  const seen = () => (globalThis.first ??= performance.now());
  new MutationObserver(seen).observe(document.getElementById("speed"), { childList: true });
});"""


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of this benchmark."""

    model: str | None = None  # the folder of a run on images, or mnist-small: what rounded weights cost there
    images: int = 256  # test images that are scored with the model

    def __post_init__(self):
        super().__post_init__()
        if self.images < 2:
            raise ValueError(f"images must be at least 2, for a standard error, got {self.images}")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    model: str | None = None
    images: int = 256
    layers: int = 8
    width: int = 256
    tokens: int = 256  # of a call
    loads: int = 5  # times that the page is loaded
    rounds: int = 11
    at_least: float = 0.1  # seconds per turn


QUICK = Sizes(layers=1, width=32, tokens=8, loads=1, rounds=2, at_least=0)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings."""
    torch.manual_seed(0)
    small = checkpoint.load(SMALL)
    models = {
        PAPER: image_model(linear.Config(), Shape(layers=sizes.layers, width=sizes.width)).build().eval(),
        SMALL: small,
    }
    # Before anything is timed, so that what is wrong with the run shows here.
    scored = _scored(sizes.model, sizes.images) if sizes.model else None
    tokens = [i * 7 % 256 for i in range(sizes.tokens)]
    for reason in left_out():
        print(reason)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = _export(models, folder)
        contestants = {name: _native(file, tokens) for name, file in files.items()}
        contestants = {_named(name, NATIVE): each for name, each in contestants.items()}
        if _onnx_why_not() is None:
            contestants |= {f"{name}: {ONNX}, float32": _onnx(each, tokens) for name, each in models.items()}
        browser = None
        if why_not() is None:
            browser = stack.enter_context(launched())
            contestants |= _in_browser(browser, files, tokens)
        timings = interleaved(contestants, rounds=sizes.rounds, at_least=sizes.at_least, progress=progress)
        rows = [_rate(name, timing, sizes) for name, timing in timings.items()]
        page = web.page(small, train.Run.around(SMALL).task.build(), SMALL)
        if browser:
            loads = _loads(browser, page, folder, sizes.loads)
            timings |= loads
            rows += _of_the_page(loads)
    rows += _programs(page)
    return rows + (_losses(*scored) if scored else []), timings


def details(sizes: Sizes) -> dict[str, object]:
    """Return what the file says besides the figures."""
    return {"left_out": left_out()}


def left_out() -> list[str]:
    """Return what cannot be timed here, as sentences."""
    reasons = {ONNX: _onnx_why_not(), BROWSER: why_not()}
    return [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason]


def _export(models: dict[str, Decoder], folder: Path) -> dict[str, Path]:
    """A file for each model and precision."""
    files = {}
    for name, model in models.items():
        for weights in export.WEIGHTS:
            files[f"{name}: {weights}"] = file = folder / f"{name}-{weights}.lrt"
            export.write(model, file, weights)
    return files


def _named(file: str, engine: str) -> str:
    model, weights = file.split(": ")
    return f"{model}: {engine}, {weights}"


def _native(file: Path, tokens: list[int]) -> Callable[[], object]:
    model = Model.open(file)

    def steps() -> None:
        sequence = Sequence(model)
        for token in tokens:
            sequence.step(token)

    return steps


def _onnx_why_not() -> str | None:
    try:
        import onnxruntime  # noqa: F401 (whether it is installed)
        import onnxscript  # noqa: F401 (which writes the graph)
    except ImportError:
        return "there is no onnxruntime, or nothing to write its graphs with: pip install 'lintra[onnx]'"
    return None


def _onnx(model: Decoder, tokens: list[int]) -> Callable[[], object]:
    """The graph of a step."""
    runner = session(onnx.to_bytes(model, "step"))
    fresh = start(runner)

    def steps() -> None:
        state = fresh
        for token in tokens:
            _, *after = runner.run(None, {"tokens": np.array([[token]]), **state})
            state = dict(zip(state, after, strict=True))

    return steps


def _in_browser(browser: Any, files: dict[str, Path], tokens: list[int]) -> dict[str, Callable[[], object]]:
    step = stepper(browser, RELAXED, files)
    return {_named(name, BROWSER): lambda name=name: step(name, tokens) for name in files}


def _rate(name: str, timing: Timing, sizes: Sizes) -> Row:
    model, way = name.split(": ")
    target = TARGETS.get(way) if model == PAPER else None
    return Row(name, sizes.tokens / timing.median, "tokens/s", at_least=target)


def _loads(browser: Any, page: str, folder: Path, times: int) -> dict[str, Timing]:
    """Load the page from a file so many times: the time to its first pixel, then that of one image."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    first, image = [], []
    for _ in range(max(2, times)):  # quartiles need two
        tab = browser.new_page()
        tab.add_init_script(_FIRST)
        tab.goto(file.as_uri())
        first.append(_wait(tab, "globalThis.first") / 1e3)
        image.append(_finished(tab, then=lambda tab=tab: tab.select_option("#count", "1")))
        tab.close()
    return {"page: first pixel": Timing(tuple(first), 1), "page: an image": Timing(tuple(image), 1)}


def _finished(tab: Any, then: Callable[[], object]) -> float:
    """Wait for the current drawing; return the seconds that what `then` starts takes, as the page says."""
    done = "document.getElementById('status').textContent.match(/Finished in (.*?) s/)?.[1]"
    _wait(tab, done)
    then()
    return float(_wait(tab, done))


def _wait(tab: Any, what: str) -> Any:
    """Return the value of an expression as soon as it has one. Raises an error once the page reports one."""
    wrong = "const status = document.querySelector('#status.wrong'); if (status) stop(status.textContent);"
    look = f"const look = () => {{ {wrong} const x = {what}; x ? go(x) : setTimeout(look, 10); }}; look();"
    return tab.evaluate(f"new Promise((go, stop) => {{ {look} }})")


def _of_the_page(loads: dict[str, Timing]) -> list[Row]:
    first, image = (timing.median for timing in loads.values())
    return [
        Row("the page: its first pixel after it was asked for", first, "s", at_most=1),
        Row(f"the page: an image of {SMALL}", image, "s", at_most=0.5),
    ]


def _programs(page: str) -> list[Row]:
    rows = [Row("the page: its file", len(page.encode()) / 1e6, "MB", at_most=3)]
    sizes = {file.name: file.stat().st_size / 1024 for file in sorted(PROGRAMS.glob("*.wasm"))}
    return rows + [Row(name, size, "KB", at_most=64) for name, size in sizes.items()]


def _scored(folder: str, count: int) -> tuple[str, Decoder, dict[str, Model], Tensor]:
    """The name and the model of a run on images, what the runtime makes of it, and test images. Raises
    ValueError.
    """
    model, tokens = images_of(folder, count)
    files = {weights: Model(export.to_bytes(model, weights)) for weights in export.WEIGHTS}
    return Path(folder).name, model, files, tokens


def _losses(name: str, model: Decoder, files: dict[str, Model], tokens: Tensor) -> list[Row]:
    """Bits per value of images, computed by the runtime, and what rounding the weights adds to them."""
    bits = {weights: _bits(model, file, tokens) for weights, file in files.items()}
    what = f"{name}: loss on {len(tokens)} images"
    rows = [Row(f"{what}, {name}", x.mean().item(), "bits/dim") for name, x in bits.items()]
    for name in export.WEIGHTS[1:]:
        rows += lost(name, bits[name] - bits["float32"])
    return rows


def lost(weights: str, more: Tensor) -> list[Row]:
    """Return what rounding costs, from the differences of single images, in bits per value."""
    error = more.std() / math.sqrt(len(more))
    target = 3 if weights == "int8" else None
    return [
        Row(f"lost by {weights} weights", 1e3 * more.mean().item(), "mbit/dim", at_most=target),
        Row(f"lost by {weights} weights: its standard error", 1e3 * error.item(), "mbit/dim"),
    ]


def _bits(model: Decoder, file: Model, tokens: Tensor) -> Tensor:
    """For each image [b]: the mean over the values that the model predicts, in float64."""
    given, found = read(model, tokens), []
    for image, target in zip(given.tolist(), predicted(tokens, given), strict=True):
        sequence, params = Sequence(file), []
        for token in image:
            sequence.step(token)
            params.append(sequence.params())
        found.append(-model.output.log_prob(torch.stack(params).double(), target).mean())
    return torch.stack(found) / math.log(2)

"""`python -m benchmarks gpu`: the linear sum on a GPU against what its memory can do, and what surrounds it.

Passes are captured in CUDA graphs, so that kernels are timed and not Python. Bytes are counted once each: in
the forward q, k, v and y; in forward + backward also dy, dq, dk and dv; for a decoded token the state, read
and written, in float32 and with its kv in bfloat16. The bandwidth is that of a large copy in the same run.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lintra import ops
from lintra.attention import linear, softmax
from lintra.bench import training_step
from lintra.bench.calls import Inputs, draw, each_pass, fused
from lintra.bench.calls import linear as linear_sum
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.generation.cuda_graph import GraphedDecoder, record
from lintra.generation.sampling import cast_state

MEASURES = (
    "lintra/ops/linear_attention/triton.py",
    "lintra/ops/linear_attention/triton_kernels.py",
    "lintra/ops/linear_attention/triton_gradients.py",
    "lintra/generation/cuda_graph.py",
)
DEVICE = "cuda"  # the results are named after it
NARROW = ", bfloat16 state"
Pass = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    batch: int = 4
    tokens: int = 16384
    heads: int = 8
    dim: int = 64
    copied: int = 2**30  # bytes of the copy that measures the bandwidth of the memory
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 16384)  # of sequences; batch x tokens in all
    steps: tuple[int, ...] = (1, 64, 512, 4096)  # numbers of sequences to which one token is added
    model: training_step.Sizes = field(default_factory=training_step.Sizes)
    decoded: tuple[int, ...] = (1, 16, 256, 1024)  # numbers of sequences that the model generates at a time
    rounds: int = 15


QUICK = Sizes(
    batch=1,
    tokens=512,
    heads=2,
    copied=2**20,
    lengths=(128, 256),
    steps=(2,),
    model=training_step.QUICK,
    decoded=(2,),
    rounds=2,
)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings. Raises OSError without a GPU."""
    check()
    x = torch.empty(sizes.copied, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(x)
    contestants: dict[str, Pass] = {"copy": record(lambda: target.copy_(x))}
    makers = {
        **_passes("linear", linear_sum, sizes, sizes.tokens),
        **_passes("linear with decay", _decayed, sizes, sizes.tokens),
        **_passes("chunked PyTorch", partial(linear_sum, impl="torch"), sizes, sizes.tokens),
        **_peers(sizes),
        **_steps(sizes),
        **_lengths(sizes),
        **_model(sizes),
    }
    others, left_out = made(makers, torch.cuda.get_device_properties(0).total_memory)
    contestants |= others
    timings = interleaved(contestants, rounds=sizes.rounds, progress=progress, finish=torch.cuda.synchronize)
    return _rows(timings, sizes) + left_out, timings


def made(makers: dict[str, Callable[[], Pass]], memory: int) -> tuple[dict[str, Pass], list[Row]]:
    """Return those that fit into so many bytes of memory, and a row for each that does not."""
    found: dict[str, Pass] = {}
    left_out = []
    for name, maker in makers.items():
        try:
            found[name] = maker()
        except torch.OutOfMemoryError:
            left_out.append(Row(f"{name}: left out, out of memory, had", memory / 1e9, "GB"))
            torch.cuda.empty_cache()
    return found, left_out


def check(name: str = "gpu") -> None:
    """Raise OSError if the benchmark of that name cannot measure anything here."""
    if not torch.cuda.is_available():
        raise OSError(
            f"no GPU: python -m benchmarks {name} needs one that PyTorch can use (torch.cuda.is_available())"
        )


def details(sizes: Sizes) -> dict[str, object]:
    """Return what the report has besides the figures: the GPU, its software, and where a pass spends its
    time."""
    return {"gpu": describe(), "profile": profile(sizes).splitlines()}


def describe() -> dict[str, object]:
    """Return the GPU and its software."""
    properties = torch.cuda.get_device_properties(0)
    packages = ("triton", "flash-linear-attention", "fla-core")
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "cuda": torch.version.cuda,
        **_driver(),
        **{name: _version(name) for name in packages},
    }


def profile(sizes: Sizes) -> str:
    """Forward + backward by kernel, as torch.profiler prints it."""
    _, both = each_pass(linear_sum, _draw(sizes, sizes.batch, sizes.tokens))
    both()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        both()
        torch.cuda.synchronize()
    return found.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=60)


def _driver() -> dict[str, str]:
    """The driver and the current clocks, if nvidia-smi gives them."""
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = ("driver_version", "clocks.sm", "clocks.mem", "power.draw")
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    values = [part.strip() for part in done.stdout.splitlines()[0].split(",")] if done.stdout else []
    return dict(zip(fields, values, strict=False))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _decayed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    decay = torch.full(k.shape[:3], -0.01, device=k.device)
    return ops.linear_attention(q, k, v, log_decay=decay, normalize=False)[0]


def _draw(sizes: Sizes, batch: int, tokens: int) -> Inputs:
    return draw(batch, tokens, sizes.heads, sizes.dim, "cuda", torch.bfloat16)


def _passes(
    name: str, attend: Callable[..., Tensor], sizes: Sizes, tokens: int, *, forward: bool = True
) -> dict[str, Callable[[], Pass]]:
    """Forward, and forward + backward, of batch x tokens tokens in bfloat16."""
    batch = max(1, sizes.batch * sizes.tokens // tokens)

    def make(which: int) -> Pass:
        return record(each_pass(attend, _draw(sizes, batch, tokens))[which])

    made = {f"{name} forward": partial(make, 0)} if forward else {}
    return made | {f"{name} forward + backward": partial(make, 1)}


def _peers(sizes: Sizes) -> dict[str, Callable[[], Pass]]:
    """flash-linear-attention, with its own normalisation, if it can be imported."""
    try:
        chunked = import_module("fla.ops.linear_attn").chunk_linear_attn
    except (ImportError, AttributeError):
        return {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return chunked(q, k, v, scale=1.0, normalize=True)[0]

    return _passes("flash-linear-attention", attend, sizes, sizes.tokens)


def _lengths(sizes: Sizes) -> dict[str, Callable[[], Pass]]:
    """Compare with softmax: the same number of tokens, cut into sequences of different lengths."""
    made: dict[str, Callable[[], Pass]] = {}
    for tokens in sizes.lengths:
        made |= _passes(f"linear at {tokens}", linear_sum, sizes, tokens, forward=False)
        made |= _passes(f"softmax at {tokens}", fused, sizes, tokens, forward=False)
    return made


def _steps(sizes: Sizes) -> dict[str, Callable[[], Pass]]:
    """One token of the sum alone."""

    def step(batch: int, dtype: torch.dtype) -> Pass:
        q, k, v = (x.detach() for x in _draw(sizes, batch, 1))
        _, (kv, z) = ops.linear_attention(q, k, v, feature_map="elu+1")
        state = ops.LinearState(kv.to(dtype), z)
        return record(lambda: ops.linear_attention(q, k, v, state=state, feature_map="elu+1"))

    return {
        f"step of {batch}{kept}": partial(step, batch, dtype)
        for batch in sizes.steps
        for kept, dtype in (("", torch.float32), (NARROW, torch.bfloat16))
    }


def _model(sizes: Sizes) -> dict[str, Callable[[], Pass]]:
    """Training steps of the image model in bfloat16 autocast, and tokens generated with it."""
    made: dict[str, Callable[[], Pass]] = {
        f"training, {name}": partial(_training, mechanism, sizes.model)
        for name, mechanism in (
            ("linear", linear.Config()),
            ("chunked PyTorch", linear.Config(impl="torch")),
            ("softmax", softmax.Config()),
        )
    }
    for batch in sizes.decoded:
        for how, captured in (("", False), (", CUDA graph", True)):
            made[f"decoding {batch}{how}"] = partial(_decoding, sizes.model, batch, captured=captured)
        made[f"decoding {batch}, CUDA graph{NARROW}"] = partial(
            _decoding, sizes.model, batch, captured=True, dtype=torch.bfloat16
        )
    return made


def _training(mechanism: Any, sizes: training_step.Sizes) -> Pass:
    """One update, not captured, as users run it."""
    torch.manual_seed(0)
    network = training_step.model(mechanism, sizes).build().cuda()
    optimizer = torch.optim.Adam(network.parameters(), 1e-4, fused=True)
    return training_step.updates(network, optimizer, sizes, bf16=True)


def _decoding(
    sizes: training_step.Sizes, batch: int, *, captured: bool, dtype: torch.dtype | None = None
) -> Pass:
    """The model's output for one more token of each sequence, step by step or captured; kv in `dtype`."""
    network = training_step.model(linear.Config(), sizes).build().cuda().eval()
    token = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        _, state = network.extend(token)
        state = cast_state(network, state, dtype)
        if not captured:
            return torch.no_grad()(lambda: network.extend(token, state))
        step = GraphedDecoder(network, token, state)
    return lambda: step(token, step.state)


def _rows(timings: dict[str, Timing], sizes: Sizes) -> list[Row]:
    seconds = {name: timing.median for name, timing in timings.items()}
    bandwidth = 2 * sizes.copied / seconds["copy"]
    tensor = sizes.batch * sizes.tokens * sizes.heads * sizes.dim * 2  # bytes, in bfloat16
    rows = [Row("copy", bandwidth / 1e9, "GB/s")]
    for name, taken in seconds.items():
        if name.endswith("forward") or (name.endswith("backward") and " at " not in name):
            rows.append(Row(name, 1e3 * taken, "ms"))
    asked = (("forward", 4, 1.25), ("forward + backward", 8, 1.4))
    for what, tensors, most in asked:
        if (name := f"linear {what}") in seconds:
            ratio = seconds[name] * bandwidth / (tensors * tensor)
            rows.append(Row(f"{what}: time / that of its bytes", ratio, "x", at_most=most))
        peer = f"flash-linear-attention {what}"
        if peer in seconds and name in seconds:
            least = 1 if what == "forward + backward" else None
            ratio = seconds[peer] / seconds[name]
            rows.append(Row(f"{what}: flash-linear-attention / linear", ratio, "x", least))
    ratios = {
        n: seconds[f"softmax at {n} forward + backward"] / seconds[f"linear at {n} forward + backward"]
        for n in sizes.lengths
        if {f"softmax at {n} forward + backward", f"linear at {n} forward + backward"} <= seconds.keys()
    }
    rows += [Row(f"both, {n} tokens: SDPA softmax / linear", ratio, "x") for n, ratio in ratios.items()]
    if ratios:
        behind = [n for n, ratio in ratios.items() if ratio < 1]
        ahead = [n for n in ratios if n > max(behind, default=0)]  # and all longer ones are ahead, too
        first = min(ahead) if ahead else 2 * max(ratios)
        rows.append(Row("shortest that is ahead of softmax", first, "tokens", at_most=1024))
    for name, taken in seconds.items():
        if name.startswith("step of"):
            state = _sequences(name) * sizes.heads * _state(name, sizes.dim)
            rows.append(Row(name, 1e6 * taken, "us"))
            rows.append(Row(f"{name}: of the state's bound", 100 * 2 * state / bandwidth / taken, "%"))
    return rows + _model_rows(seconds, sizes, bandwidth)


def _sequences(name: str) -> int:
    """Return the number of sequences of a step or decoding: the first number in its name."""
    return int(next(word for word in name.replace(",", " ").split() if word.isdecimal()))


def _state(name: str, dim: int) -> int:
    """Bytes of the state of a head."""
    return dim * ((2 if name.endswith(NARROW) else 4) * dim + 4)


def _model_rows(seconds: dict[str, float], sizes: Sizes, bandwidth: float) -> list[Row]:
    model = sizes.model
    width = model.width // 8  # of a head: the image model has 8
    rows, best = [], 0.0  # of the state's bound
    for name, taken in seconds.items():
        if name.startswith("training"):
            rows.append(Row(name, model.batch * model.tokens / taken, "tokens/s"))
        elif name.startswith("decoding"):
            rate = _sequences(name) / taken
            rows.append(Row(name, rate, "tokens/s"))
            if not name.endswith(NARROW):
                best = max(best, 100 * rate * 2 * model.layers * 8 * _state(name, width) / bandwidth)
    if best:
        rows.append(Row("decoding, best: of the state's bound", best, "%", at_least=50))
    return rows

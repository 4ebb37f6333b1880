"""`python -m benchmarks gpu_recurrence`: the delta rule and decays of every feature on a GPU, beside FLA.

Compared are lintra's kernels, flash-linear-attention's own Triton kernels and chunked PyTorch, on the same
numbers in bfloat16, with decays and beta in float32. For flash-linear-attention, run
`pip install --no-deps fla-core einops`; without it, or where it fails, the reason is printed. Passes are
captured in CUDA graphs, so that kernels are timed and not Python.

Most of the time goes into compiling. lintra's kernels are compiled and timed first, then PyTorch is timed,
flash-linear-attention is last, and the file is written after every rule of each. All contestants of a rule
are timed again with each that is added, so that ratios are of one interleaved run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu
from benchmarks.recurrence import RULES, attend, draw
from lintra import ops
from lintra.bench.calls import each_pass
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.generation.cuda_graph import record

MEASURES = (
    "lintra/ops/linear_attention/recurrence.py",
    "lintra/ops/linear_attention/triton_recurrence.py",
    "lintra/ops/linear_attention/triton_recurrence_kernels.py",
    "lintra/ops/linear_attention/triton_recurrence_gradients.py",
)
DEVICE = "cuda"  # the results are named after it, too
PEERS = {  # in flash-linear-attention: module and function
    "gated": ("gla", "chunk_gla"),
    "delta": ("delta_rule", "chunk_delta_rule"),
    "gated delta": ("gated_delta_rule", "chunk_gated_delta_rule"),
    "KDA": ("kda", "chunk_kda"),
}
PASSES = ("forward", "forward + backward")
STAGES = ("lintra", "PyTorch", "FLA")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    lengths: tuple[int, ...] = (2048, 16384)
    heads: int = 16
    dim: int = 128
    steps: tuple[int, ...] = (1, 64)  # numbers of sequences to which one token is added
    rounds: int = 15

    @property
    def turns(self) -> int:
        return len(STAGES) * len(RULES) * self.rounds


QUICK = Sizes(lengths=(128,), heads=2, dim=32, steps=(2,), rounds=2)


def stages(
    sizes: Sizes, progress: Callable[[int], None]
) -> Iterator[tuple[list[Row], dict[str, Timing], dict[str, object]]]:
    """Time everything, printing each figure when it is first known. Raises OSError without a GPU.

    Yields after each rule of each stage, of all that is known then: the table's rows, the single timings and
    the report's details, among them how far FLA's y is from lintra's, or why FLA cannot be measured."""
    gpu.check("gpu_recurrence")
    described, memory = gpu.describe(), torch.cuda.get_device_properties(0).total_memory
    contestants: dict[str, dict[str, gpu.Pass]] = {rule: {} for rule in RULES}
    timings: dict[str, Timing] = {}
    left_out: list[Row] = []
    apart: dict[str, object] = {}
    turns = [(stage, rule) for stage in STAGES for rule in RULES]
    for done, (stage, rule) in enumerate(turns, 1):
        if stage == "FLA":
            made, lacking, apart[rule] = _of_fla(rule, sizes, memory)
        else:
            made, lacking = gpu.made(_makers(stage, rule, sizes), memory)
        left_out += lacking
        contestants[rule] |= made
        if made:
            found = interleaved(
                contestants[rule],
                rounds=sizes.rounds,
                progress=lambda now, before=(done - 1) * sizes.rounds: progress(before + now),
                finish=torch.cuda.synchronize,
            )
            for name in made:
                print(f"{name}: {1e3 * found[name].median:.4g} ms", flush=True)
            timings |= found
        medians = {name: each.median for name, each in timings.items()}
        details = {
            "gpu": described,
            "FLA / lintra - 1, of the largest y": dict(apart),
            "complete": done == len(turns),
        }
        yield rows(medians, sizes) + left_out, dict(timings), details


def _makers(stage: str, rule: str, sizes: Sizes) -> dict[str, Callable[[], gpu.Pass]]:
    """Return lintra's kernels, or chunked PyTorch, by the names of their passes."""
    makers: dict[str, Callable[[], gpu.Pass]] = {}
    for tokens in sizes.lengths:
        if stage == "lintra":
            makers |= _passes(f"{rule} at {tokens}", attend(rule), rule, tokens, sizes)
        else:
            makers |= _passes(f"{rule} at {tokens}, PyTorch", attend(rule, impl="torch"), rule, tokens, sizes)
    if stage == "lintra":
        makers |= {f"{rule}, step of {n}": partial(_step, rule, n, sizes) for n in sizes.steps}
    return makers


def fla(rule: str) -> tuple[Callable[..., Tensor] | None, str | None]:
    """Return FLA's kernels for a rule, as a function of what `draw` returns, or None and the reason."""
    module, name = PEERS[rule]
    try:
        function: Any = getattr(import_module(f"fla.ops.{module}"), name)
    except (ImportError, AttributeError) as error:
        return None, str(error)
    delta, decay = RULES[rule]

    def attended(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        options: dict[str, Any] = {"g": others[0]} if decay else {}
        options |= {"beta": others[-1]} if delta else {}
        return function(q, k, v, **options, scale=q.shape[-1] ** -0.5)[0]

    return attended, None


def _of_fla(rule: str, sizes: Sizes, memory: int) -> tuple[dict[str, gpu.Pass], list[Row], object]:
    """Return FLA's passes, those that did not fit, and how far its y is from lintra's.

    Without FLA, or where it fails, return nothing and the reason: its kernels may not compile with other
    versions of Triton, or on other GPUs, than they are made for."""
    peer, why_not = fla(rule)
    if peer is not None:
        try:
            makers = [
                _passes(f"{rule} at {tokens}, FLA", peer, rule, tokens, sizes) for tokens in sizes.lengths
            ]
            made, left_out = gpu.made({name: x for each in makers for name, x in each.items()}, memory)
            return made, left_out, _apart(rule, peer, sizes)
        except Exception as error:
            why_not = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"{rule}: not beside flash-linear-attention: {why_not}", flush=True)
    return {}, [], why_not


def _apart(rule: str, peer: Callable[..., Tensor], sizes: Sizes) -> float:
    """Return how far FLA's y is from lintra's, of the largest."""
    inputs = draw(rule, sizes.lengths[0], sizes.heads, sizes.dim, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        found, other = attend(rule)(*inputs).float(), peer(*inputs).float()
    return ((found - other).abs().max() / found.abs().max()).item()


def _passes(
    name: str, function: Callable[..., Tensor], rule: str, tokens: int, sizes: Sizes
) -> dict[str, Callable[[], gpu.Pass]]:
    def make(which: int) -> gpu.Pass:
        inputs = draw(rule, tokens, sizes.heads, sizes.dim, device=DEVICE, dtype=torch.bfloat16)
        return record(each_pass(function, inputs)[which])

    return {f"{name}, {passed}": partial(make, i) for i, passed in enumerate(PASSES)}


def _step(rule: str, batch: int, sizes: Sizes) -> gpu.Pass:
    """One token after a state."""
    drawn = draw(rule, 1, sizes.heads, sizes.dim, batch, device=DEVICE, dtype=torch.bfloat16)
    q, k, v, *others = (x.detach() for x in drawn)
    delta, decay = RULES[rule]
    state = ops.LinearState.of(torch.randn(batch, sizes.heads, sizes.dim, sizes.dim, device=DEVICE))
    options: dict[str, Any] = {"log_decay": others[0] if decay else None}
    options |= {"beta": others[-1] if delta else None, "normalize": False, "state": state}
    return record(lambda: ops.linear_attention(q, k, v, **options))


def rows(seconds: dict[str, float], sizes: Sizes) -> list[Row]:
    """Return the table: milliseconds of lintra, and how many times as long the others take."""
    found = []
    for rule in RULES:
        for ours in (f"{rule} at {tokens}, {passed}" for tokens in sizes.lengths for passed in PASSES):
            if ours not in seconds:
                continue
            found.append(Row(ours, 1e3 * seconds[ours], "ms"))
            name, passed = ours.rsplit(", ", 1)
            for other, least in (("FLA", 1), ("PyTorch", None)):
                if (theirs := f"{name}, {other}, {passed}") in seconds:
                    found.append(
                        Row(f"{ours}: {other} / lintra", seconds[theirs] / seconds[ours], "x", least)
                    )
        for n in sizes.steps:
            if (name := f"{rule}, step of {n}") in seconds:
                found.append(Row(name, 1e6 * seconds[name], "us"))
    return found

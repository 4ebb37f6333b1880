"""`python -m benchmarks gpu_recurrence`: the delta rule and decays of every feature on a GPU, beside FLA.

Compared are lintra's kernels, flash-linear-attention's own Triton kernels and chunked PyTorch, on the same
numbers in bfloat16, with decays and beta in float32. For flash-linear-attention, run
`pip install --no-deps fla-core einops`; without it, or where it fails, the reason is printed. Passes are
captured in CUDA graphs, so that kernels are timed and not Python, in one interleaved run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
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
DEVICE = "cuda"  # the results are named after it
PEERS = {  # in flash-linear-attention: module and function
    "gated": ("gla", "chunk_gla"),
    "delta": ("delta_rule", "chunk_delta_rule"),
    "gated delta": ("gated_delta_rule", "chunk_gated_delta_rule"),
    "KDA": ("kda", "chunk_kda"),
}
PASSES = ("forward", "forward + backward")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    lengths: tuple[int, ...] = (2048, 16384)
    heads: int = 16
    dim: int = 128
    steps: tuple[int, ...] = (1, 64)  # numbers of sequences to which one token is added
    rounds: int = 15


QUICK = Sizes(lengths=(128,), heads=2, dim=32, steps=(2,), rounds=2)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings. Raises OSError without a GPU."""
    gpu.check("gpu_recurrence")
    makers: dict[str, Callable[[], gpu.Pass]] = {}
    for rule in RULES:
        peer, why_not = fla(rule)
        why_not = why_not or _fails(rule, sizes)
        if why_not is not None:
            print(f"{rule}: not beside flash-linear-attention: {why_not}")
        for tokens in sizes.lengths:
            makers |= _passes(f"{rule} at {tokens}", attend(rule), rule, tokens, sizes)
            makers |= _passes(f"{rule} at {tokens}, PyTorch", attend(rule, impl="torch"), rule, tokens, sizes)
            if peer is not None and why_not is None:
                makers |= _passes(f"{rule} at {tokens}, FLA", peer, rule, tokens, sizes)
        makers |= {f"{rule}, step of {n}": partial(_step, rule, n, sizes) for n in sizes.steps}
    memory = torch.cuda.get_device_properties(0).total_memory
    contestants, left_out = gpu.made(makers, memory)
    timings = interleaved(contestants, rounds=sizes.rounds, progress=progress, finish=torch.cuda.synchronize)
    return rows({name: each.median for name, each in timings.items()}, sizes) + left_out, timings


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


@cache
def _fails(rule: str, sizes: Sizes) -> str | None:
    """Return why FLA's kernels, though installed, cannot be measured here. They may not compile with other
    versions of Triton, or on other GPUs, than they are made for."""
    peer, _ = fla(rule)
    assert peer is not None
    try:
        for maker in _passes("", peer, rule, sizes.lengths[0], sizes).values():
            maker()()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def details(sizes: Sizes) -> dict[str, object]:
    """Return the GPU and its software, and how far FLA's y is from lintra's, for the report."""
    apart = {}
    for rule in RULES:
        peer, why_not = fla(rule)
        why_not = why_not or _fails(rule, sizes)
        inputs = draw(rule, sizes.lengths[0], sizes.heads, sizes.dim, device="cuda", dtype=torch.bfloat16)
        if peer is None or why_not is not None:
            apart[rule] = why_not
            continue
        with torch.no_grad():
            found, other = attend(rule)(*inputs).float(), peer(*inputs).float()
        apart[rule] = ((found - other).abs().max() / found.abs().max()).item()
    return {"gpu": gpu.describe(), "FLA / lintra - 1, of the largest y": apart}


def _passes(
    name: str, function: Callable[..., Tensor], rule: str, tokens: int, sizes: Sizes
) -> dict[str, Callable[[], gpu.Pass]]:
    def make(which: int) -> gpu.Pass:
        inputs = draw(rule, tokens, sizes.heads, sizes.dim, device="cuda", dtype=torch.bfloat16)
        return record(each_pass(function, inputs)[which])

    return {f"{name}, {passed}": partial(make, i) for i, passed in enumerate(PASSES)}


def _step(rule: str, batch: int, sizes: Sizes) -> gpu.Pass:
    """One token after a state."""
    drawn = draw(rule, 1, sizes.heads, sizes.dim, batch, device="cuda", dtype=torch.bfloat16)
    q, k, v, *others = (x.detach() for x in drawn)
    delta, decay = RULES[rule]
    state = ops.LinearState.of(torch.randn(batch, sizes.heads, sizes.dim, sizes.dim, device="cuda"))
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

"""`python -m benchmarks predictions`: how training would scale on 8 to 4,096 GPUs, by the cost model.

Nothing is measured: every figure is a prediction of `lintra.bench.step_time` for nodes of 8 H100
(`lintra.bench.machines.h100`). A step has a fixed number of tokens, so that with more GPUs each has less
to do.  The efficiency of a step is the share of it that the network's operations take. Blocks are recomputed
in the backward pass.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lintra import pictures
from lintra.attention import delta, linear, softmax
from lintra.bench import machines
from lintra.bench.machines import Machine, h100
from lintra.bench.reports import Row, by_name
from lintra.bench.step_plan import strategies
from lintra.bench.step_time import Step, best
from lintra.bench.step_work import MIXED, Work
from lintra.bench.timing import Timing
from lintra.models import decoder

MEASURES = tuple(f"lintra/bench/{name}.py" for name in ("machines", "step_plan", "step_time", "step_work"))
MECHANISMS: dict[str, Any] = {"linear": linear.Config, "delta": delta.Config, "softmax": softmax.Config}
# The images of Katharopoulos et al. 2020, arXiv:2006.16236; widths of GPT-3 XL (Brown et al. 2020,
# arXiv:2005.14165, table 2.1) in 16 layers; Llama 2 70B (Touvron et al. 2023, arXiv:2307.09288).
MODELS: dict[str, dict[str, Any]] = {
    "the paper's": {"layers": 8, "heads": 8, "width": 256, "vocabulary": 256},
    "1 B": {"layers": 16, "heads": 16, "width": 2048, "vocabulary": 50_304, "activation": "swiglu"},
    "70 B": {
        "layers": 80,
        "heads": 64,
        "kv_heads": 8,
        "width": 8192,
        "vocabulary": 32_000,
        "activation": "swiglu",
        "mlp_ratio": 5.25,
    },
}
CONSTANTS = (
    *("H100_PEAK", "H100_REACHED", "H100_MEMORY", "H100_MEMORY_BANDWIDTH", "H100_NVLINK", "INFINIBAND"),
    *("LINK_REACHED", "FREE_MEMORY", "NCCL_CALL", "NCCL_NVLINK", "NCCL_NETWORK", "KERNELS", "LAUNCH"),
)
ENOUGH = 50  # percent of efficiency, below which a strategy no longer scales
SHOWN = ("1 B", "linear", 2**16)  # in the picture


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Cases that are predicted."""

    models: tuple[str, ...] = tuple(MODELS)
    mechanisms: tuple[str, ...] = tuple(MECHANISMS)
    lengths: tuple[int, ...] = (2**12, 2**16, 2**20, 2**22)
    tokens: int = 2**22  # per step
    gpus: tuple[int, ...] = tuple(2**i for i in range(3, 13))
    ranked: tuple[int, ...] = (8, 64, 512, 4096)  # numbers of GPUs for which the best strategy is named

    @property
    def turns(self) -> int:
        """Return the number of steps of `progress`: models with each mechanism."""
        return len(self.models) * len(self.mechanisms)


QUICK = Sizes(models=("1 B",), mechanisms=("linear",), lengths=(2**20,), gpus=(8, 16, 512), ranked=(8, 512))


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Predict everything -> the table's rows, and no timings."""
    rows: list[Row] = []
    for done, (model, mechanism) in enumerate(product(sizes.models, sizes.mechanisms), start=1):
        work = Work(config(model, mechanism))
        for length in sizes.lengths:
            found = steps(work, h100(), sizes, length)
            rows += _rows(case(model, mechanism, length), found, sizes)
        progress(done)
    return rows, {}


def details(sizes: Sizes) -> dict[str, object]:
    """Return the constants of the machine, for the report."""
    return {"predicted": True, "constants": {name: getattr(machines, name) for name in CONSTANTS}}


def config(model: str, mechanism: str) -> decoder.Config:
    """Return the configuration of one of MODELS."""
    return decoder.Config(attention=MECHANISMS[mechanism](), **MODELS[model])


def case(model: str, mechanism: str, length: int) -> str:
    """Return the name that a case has in the rows."""
    return f"{model}, {mechanism}, {length:,} tokens"


Steps = dict[str, dict[int, Step]]  # strategy -> GPUs -> the fastest of its plans


def steps(work: Work, machine: Machine, sizes: Sizes, length: int) -> Steps:
    """Return the fastest step of every strategy for each number of GPUs on which one fits."""
    found: Steps = {}
    sequences = max(1, sizes.tokens // length)
    for strategy in strategies(work.mechanism):
        each = {gpus: best(strategy, work, machine, gpus, length, sequences, MIXED) for gpus in sizes.gpus}
        found[strategy] = {gpus: step for gpus, step in each.items() if step is not None}
    return found


def _rows(name: str, found: Steps, sizes: Sizes) -> Iterator[Row]:
    """Rows of a case: how far each strategy scales, from how many GPUs on it fits, and the efficiency of the
    best strategies."""
    for strategy, line in found.items():
        if line:
            enough = [gpus for gpus, step in line.items() if 100 * step.efficiency >= ENOUGH]
            yield Row(f"{name}, {strategy}: fits from", min(line), "GPUs")
            yield Row(f"{name}, {strategy}: scales to", max(enough, default=0), "GPUs")
    for gpus in sizes.ranked:
        can = {strategy: line[gpus] for strategy, line in found.items() if gpus in line}
        if can:
            fastest = min(can, key=lambda strategy: can[strategy].seconds)
            yield Row(f"{name}, {gpus:,} GPUs, best {fastest}", 100 * can[fastest].efficiency, "%")
            yield Row(f"{name}, {gpus:,} GPUs: a step", can[fastest].seconds, "s")


def picture(path: Path, rows: list[Row], timings: dict[str, Timing], sizes: Sizes) -> list[Path]:
    """Draw tokens a second against GPUs for one case: a line per strategy, and one for sharing at no cost."""
    model, mechanism, length = SHOWN
    work = Work(config(model, mechanism))
    found = steps(work, h100(), sizes, length)
    lines = {
        strategy: {gpus: sizes.tokens / step.seconds / 1e6 for gpus, step in line.items()}
        for strategy, line in found.items()
    }
    step = next(iter(next(line for line in found.values() if line).values()))
    ideal = sizes.tokens / step.ideal_seconds / step.plan.ranks / 1e6
    lines = {"no cost of sharing": {gpus: ideal * gpus for gpus in sizes.gpus}, **lines}
    pictures.logarithmic(
        path,
        {name: line for name, line in lines.items() if line},
        x="H100 GPUs, 8 to a node",
        y="million tokens a second",
        title=f"predicted: {model} parameters, {mechanism} attention, {length:,} tokens a sequence",
    )
    return [path]


def tables(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return the tables of docs/scale.md for a saved report, a row for each case.

    For each strategy, a row has the fewest GPUs on which a step fits and the most on which it is efficient;
    then the best strategy for some numbers of GPUs, with its efficiency and its seconds per step."""
    rows, sizes = by_name(report), report["sizes"]
    columns = ("DDP", "FSDP2", "relay", "scan, ring", "FSDP2 x relay", "FSDP2 x scan, ring")
    reaches, fastest = [], []
    for model, mechanism, length in product(sizes["models"], sizes["mechanisms"], sizes["lengths"]):
        name, exchange = case(model, mechanism, length), "ring" if mechanism == "softmax" else "scan"
        named = [model, mechanism, f"{length:,}"]
        strategies = [column.replace("scan, ring", exchange) for column in columns]
        reaches.append([*named, *(_reach(rows, f"{name}, {strategy}") for strategy in strategies)])
        fastest.append([*named, *(_fastest(rows, f"{name}, {gpus:,} GPUs") for gpus in sizes["ranked"])])
    first = ["model", "attention", "tokens"]
    heads = [*first, *columns], [*first, *(f"on {gpus:,}" for gpus in sizes["ranked"])]
    return _lines(heads[0], reaches), _lines(heads[1], fastest)


def _lines(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(lines)


def _fastest(rows: Mapping[str, float], name: str) -> str:
    """Return the best strategy on so many GPUs; empty if no step fits."""
    start = f"{name}, best "
    for what, efficiency in rows.items():
        if what.startswith(start):
            seconds = rows[f"{name}: a step"]
            took = f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
            return f"{what.removeprefix(start)}, {efficiency:.0f} %, {took} s"
    return ""


def _reach(rows: Mapping[str, float], name: str) -> str:
    """Return the numbers of GPUs on which a strategy is efficient; empty if no step of it fits."""
    first, last = (rows.get(f"{name}: {what}") for what in ("fits from", "scales to"))
    if first is None or last is None:
        return ""
    if not last:
        return "none"
    return f"{last:,.0f}" if last == first else f"{first:,.0f} to {last:,.0f}"

"""`python -m benchmarks train`: one training step of the paper's image model, mechanism by mechanism."""

from collections.abc import Callable

import torch

from lintra import attention
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.bench.training_step import (
    MATMUL,
    MATMUL_OPERATIONS,
    QUICK,
    Sizes,
    matmul,
    model,
    operations,
    step,
)

__all__ = ["MEASURES", "QUICK", "Sizes", "run"]
MEASURES = ("lintra/native", "lintra/ops", "lintra/attention", "lintra/nn", "lintra/models")


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings."""
    contestants, configs = {"matmul": matmul()}, {}
    for name in (each for each in attention.names() if attention.mechanism(each).can.causal):
        mechanism = attention.for_length(attention.load(name).Config, sizes.tokens)
        configs[name] = model(mechanism, sizes)
        contestants[name] = step(configs[name], sizes)
    timings = interleaved(contestants, rounds=sizes.rounds, progress=progress)
    seconds = {name: timing.median for name, timing in timings.items()}
    rate = MATMUL_OPERATIONS / seconds.pop("matmul")
    rows = [Row(f"matmul {MATMUL}^3 float32", rate / 1e9, "GFLOP/s")]
    for name, taken in seconds.items():
        rows.append(Row(name, sizes.batch * sizes.tokens / taken, "tokens/s"))
        share = operations(configs[name], sizes) / taken / rate
        rows.append(Row(f"{name}: its products", 100 * share, "% of matmul"))
        shares = where_the_time_goes(contestants[name])
        rows += [Row(f"{name}: {op}", share, "% of time") for op, share in shares.items()]
    return rows, timings


def where_the_time_goes(call: Callable[[], object], most: int = 8) -> dict[str, float]:
    """The operators with the largest shares of one call's time, in percent."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    spent = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    largest = sorted(spent, key=lambda op: -spent[op])[:most]
    return {op: 100 * spent[op] / sum(spent.values()) for op in largest}

"""`lintra bench train`: one training step of the paper's image model, mechanism by mechanism."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lintra import attention
from lintra.attention import linear
from lintra.bench._report import Row
from lintra.bench._timing import Timing, interleaved
from lintra.models import Decoder, decoder

MEASURES = ("lintra/native", "lintra/ops", "lintra/attention", "lintra/nn", "lintra/models")
MATMUL = 2048  # rows and columns of the product that stands for what the hardware can do
MATMUL_OPERATIONS = 2 * MATMUL**3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much work is timed."""

    layers: int = 8
    width: int = 256
    batch: int = 4
    tokens: int = 784
    rounds: int = 10


QUICK = Sizes(layers=1, width=32, batch=1, tokens=32, rounds=2)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Times everything -> the table's rows and the single timings."""
    contestants = {"matmul": matmul()}
    for name in (each for each in attention.names() if attention.mechanism(each).can.causal):
        mechanism = attention.for_length(attention.load(name).Config, sizes.tokens)
        contestants[name] = step(model(mechanism, sizes), sizes)
    timings = interleaved(contestants, rounds=sizes.rounds, progress=progress)
    seconds = {name: timing.median for name, timing in timings.items()}
    rate = MATMUL_OPERATIONS / seconds.pop("matmul")
    rows = [Row(f"matmul {MATMUL}^3 float32", rate / 1e9, "GFLOP/s")]
    for name, taken in seconds.items():
        rows.append(Row(name, sizes.batch * sizes.tokens / taken, "tokens/s"))
        rows.append(Row(name, 100 * operations(sizes) / taken / rate, "% of matmul"))
        shares = where_the_time_goes(contestants[name])
        rows += [Row(f"{name}: {op}", share, "% of time") for op, share in shares.items()]
    return rows, timings


def where_the_time_goes(call: Callable[[], object], most: int = 8) -> dict[str, float]:
    """The operators that take the largest shares of one call's time, in percent of it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    spent = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    largest = sorted(spent, key=lambda op: -spent[op])[:most]
    return {op: 100 * spent[op] / sum(spent.values()) for op in largest}


def matmul() -> Callable[[], object]:
    """The product whose rate the others are measured by."""
    x = torch.randn(MATMUL, MATMUL)
    return lambda: x @ x


def model(mechanism: Any, sizes: Sizes) -> decoder.Config:
    """The paper's image model of this size around a mechanism's config."""
    return decoder.Config(
        vocabulary=256,
        attention=mechanism,
        layers=sizes.layers,
        heads=8,
        width=sizes.width,
        position="concatenated",
        output=decoder.LogisticMixture(components=10),
    )


def step(config: decoder.Config, sizes: Sizes, *, bf16: bool = False) -> Callable[[], object]:
    """One update: forward, backward, optimiser; under bf16 autocast if asked."""
    torch.manual_seed(0)
    network = config.build()
    return updates(network, torch.optim.RAdam(network.parameters(), 1e-4), sizes, bf16=bf16)


def updates(
    network: Decoder, optimizer: torch.optim.Optimizer, sizes: Sizes, *, bf16: bool
) -> Callable[[], object]:
    """Updates of a network by random tokens, on the device where it is."""
    device = next(network.parameters()).device
    tokens = torch.randint(256, (sizes.batch, sizes.tokens), device=device)

    def update() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = -network.output.log_prob(network(network.shift(tokens)), tokens).mean()
        loss.backward()
        optimizer.step()

    return update


def operations(sizes: Sizes) -> int:
    """6 for each parameter and token of one update."""
    parameters = sum(p.numel() for p in model(linear.Config(), sizes).build().parameters())
    return 6 * parameters * sizes.batch * sizes.tokens

"""One training step of the paper's image model, and the matrix product that it is compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lintra.bench.timing import interleaved
from lintra.models import Decoder, decoder

MATMUL = 2048  # rows and columns of the product that represents what the hardware can do
MATMUL_OPERATIONS = 2 * MATMUL**3
EMULATED = 3  # times as long as in float32, or longer, takes what a processor has no instructions for


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amount of work that is timed."""

    layers: int = 8
    width: int = 256
    batch: int = 4
    tokens: int = 784
    rounds: int = 10


QUICK = Sizes(layers=1, width=32, batch=1, tokens=32, rounds=2)


def matmul() -> Callable[[], object]:
    """The product whose rate the others are measured by."""
    x = torch.randn(MATMUL, MATMUL)
    return lambda: x @ x


def bf16_is_fast() -> bool:
    """Return whether the processor computes products in bfloat16: emulated, a training step takes minutes."""
    times = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(512, 512).to(dtype)
        times.append(interleaved({"product": lambda x=x: x @ x}, rounds=3, at_least=0)["product"].median)
    return times[1] < EMULATED * times[0]


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


def operations(config: decoder.Config, sizes: Sizes) -> int:
    """6 for each parameter and token of one update."""
    parameters = sum(p.numel() for p in config.build().parameters())
    return 6 * parameters * sizes.batch * sizes.tokens

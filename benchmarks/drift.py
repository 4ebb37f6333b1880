"""`python -m benchmarks drift`: what decoding loses where states are kept in bfloat16, by position.

Random queries, keys and values go token by token through a mechanism. Its state is kept in float32, in
bfloat16 rounded to the nearest (`generate(state_dtype=torch.bfloat16)`), and in bfloat16 rounded up or down
at random, which loses nothing on average. The error is that of y against the same mechanism over the whole
sequence in float64: the root mean square over all heads and the last `window` tokens, in percent of that
of y.  No time is measured.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lintra.attention import Attention, State, cosformer, delta, gated, linear, performer, retention
from lintra.bench.reports import Row
from lintra.bench.timing import Timing

MEASURES = ("lintra/native", "lintra/ops", "lintra/attention")
FLOAT32, NEAREST, RANDOM = "float32", "bfloat16", "bfloat16, at random"
WAYS = (FLOAT32, NEAREST, RANDOM)
_DISCARDED = 16  # bits of a float32 that bfloat16 does not have


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sequences that are decoded."""

    positions: tuple[int, ...] = (256, 784, 2048, 4096, 8192, 16384)
    window: int = 64  # tokens
    heads: int = 8
    dim: int = 64

    @property
    def turns(self) -> int:
        """Return the number of steps of `progress`: sequences."""
        return len(WAYS) * len(contestants(self))


QUICK = Sizes(positions=(8, 16), window=4, heads=2, dim=8)


@dataclass(frozen=True)
class Contestant:
    """A mechanism, and the mean of the keys and values, which scatter by 1 around it."""

    config: Any
    mean: float = 1.0


def contestants(sizes: Sizes) -> Mapping[str, Contestant]:
    """Return the mechanisms that never forget, then those that do, the slowest to forget first."""
    made = {
        "linear": Contestant(linear.Config()),
        "linear, around 0": Contestant(linear.Config(), mean=0.0),
        "cosformer": Contestant(cosformer.Config(max_length=max(sizes.positions))),
        "performer": Contestant(performer.Config()),
    }
    for exponent in (12, 9, 7, 5):
        config = retention.Config(fastest=2.0**-exponent, slowest=2.0**-exponent)
        made[f"retention, 1/{2**exponent} a token"] = Contestant(config)
    return made | {"gated": Contestant(gated.Config()), "delta": Contestant(delta.Config())}


@torch.no_grad()
def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Decode everything -> the rows of the table; there are no timings."""
    rows, done = [], 0
    for name, contestant in contestants(sizes).items():
        torch.manual_seed(0)
        mechanism = contestant.config.build(heads=sizes.heads, dim=sizes.dim, causal=True)
        inputs = _draw(mechanism, contestant.mean, max(sizes.positions))
        exact = mechanism.double()(**{what: x.double() for what, x in inputs.items()})
        mechanism.float()
        for way in WAYS:
            found = torch.cat(list(_decode(mechanism, inputs, way)), 1)
            for position in sizes.positions:
                here = slice(max(0, position - sizes.window), position)
                error = (found[:, here] - exact[:, here]).square().mean() / exact[:, here].square().mean()
                rows.append(Row(f"{name}, {way}, {position:,} tokens", 100 * error.sqrt().item(), "%"))
            progress(done := done + 1)
    return rows, {}


def _draw(mechanism: Attention, mean: float, tokens: int) -> dict[str, Any]:
    q, k, v = torch.randn(3, 1, tokens, mechanism.heads, mechanism.dim)
    reads = {name: torch.randn(1, tokens, width) for name, width in mechanism.extra_inputs().items()}
    return {"q": q, "k": k + mean, "v": v + mean, **reads}


def _decode(mechanism: Attention, inputs: Mapping[str, Any], way: str) -> Iterator[Tensor]:
    """y of one token after another."""
    state: State = mechanism.start(1)
    if way == NEAREST:
        state = mechanism.cast_state(state, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for i in range(inputs["q"].shape[1]):
        token = {name: x[:, i : i + 1] for name, x in inputs.items()}
        y, state = mechanism.extend(state=state, **token)
        if way == RANDOM:
            state = state._replace(kv=_at_random(state.kv, generator))
        yield y


def _at_random(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round to bfloat16, kept in float32: to the upper neighbour as often as x is near to it."""
    bits = x.view(torch.int32)
    added = torch.randint(0, 2**_DISCARDED, x.shape, dtype=torch.int32, generator=generator)
    return (bits + added & -(2**_DISCARDED)).view(torch.float32)

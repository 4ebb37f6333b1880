"""The time of one more token, against how many came before it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lintra.attention import linear, map_state, softmax
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.models import decoder

RNN = "linear, as an RNN"
CACHED = "softmax, cached keys and values"
RECOMPUTED = "softmax, recomputed"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model and the places at which it is timed."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    positions: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048)
    recomputed_to: int | None = None  # the last position at which recomputing is timed too; None: all
    rounds: int = 10


QUICK = Sizes(layers=1, heads=2, width=16, positions=(4, 8), rounds=2)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Times everything -> the table's rows and the single timings, named "WAY at POSITION"."""
    rnn, exact = _model(linear.Config(), sizes), _model(softmax.Config(), sizes)
    contestants: dict[str, Callable[[], object]] = {}
    for position in sizes.positions:
        contestants[f"{RNN} at {position}"] = _extend(rnn, position)
        contestants[f"{CACHED} at {position}"] = _extend(exact, position)
        if sizes.recomputed_to is None or position <= sizes.recomputed_to:
            contestants[f"{RECOMPUTED} at {position}"] = _recompute(exact, position)
    with torch.inference_mode():
        timings = interleaved(contestants, rounds=sizes.rounds, at_least=0.005, progress=progress)
    return [Row(name, 1e3 * timing.median, "ms") for name, timing in timings.items()], timings


def milliseconds(timings: dict[str, Timing], sizes: Sizes) -> dict[str, list[float]]:
    """The medians as one line for each way to decode, over the positions, or those that were timed."""
    names = {way: [f"{way} at {p}" for p in sizes.positions] for way in (RNN, CACHED, RECOMPUTED)}
    return {
        way: [1e3 * timings[name].median for name in each if name in timings] for way, each in names.items()
    }


def state_at(model: decoder.Decoder, batch: int, position: int) -> Any:
    """Return the state of `batch` sequences after `position` tokens, each in memory of its own."""
    _, state = model.extend(torch.zeros(1, position, dtype=torch.int64))
    return map_state(lambda x: x.expand(batch, *x.shape[1:]).clone(), state)


def _model(mechanism: Any, sizes: Sizes) -> decoder.Decoder:
    config = decoder.Config(
        vocabulary=256,
        attention=mechanism,
        layers=sizes.layers,
        heads=sizes.heads,
        width=sizes.width,
        position="sinusoidal",
        output=decoder.Logits(),
    )
    return config.build().eval()


def _extend(model: decoder.Decoder, position: int) -> Callable[[], object]:
    with torch.inference_mode():
        _, state = model.extend(torch.zeros(1, position, dtype=torch.int64))
    token = torch.zeros(1, 1, dtype=torch.int64)
    return lambda: model.extend(token, state)


def _recompute(model: decoder.Decoder, position: int) -> Callable[[], object]:
    tokens = torch.zeros(1, position + 1, dtype=torch.int64)
    return lambda: model(tokens)

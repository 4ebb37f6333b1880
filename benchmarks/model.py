"""`python -m benchmarks model`: the paper's image model against the length, linear and softmax.

The model has 8 layers of width 256 with 8 heads, as for the images of Katharopoulos et al. 2020,
arXiv:2006.16236. Timed are a step of training, with the same number of tokens at all lengths while that
leaves a sequence, and the next token at a position, one sequence at a time. Softmax uses PyTorch's own
kernels, with its keys and values cached.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lintra import pictures
from lintra.attention import linear, softmax
from lintra.bench import next_token, training_step
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved

MEASURES = (
    "lintra/native",
    "lintra/ops/linear_attention",
    "lintra/attention/linear.py",
    "lintra/attention/softmax.py",
    "lintra/nn",
    "lintra/models",
)
MECHANISMS = {"linear": linear.Config(), "softmax": softmax.Config()}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    tokens: int = 4096  # of a step of training
    step: training_step.Sizes = field(default_factory=training_step.Sizes)
    next: next_token.Sizes = field(
        default_factory=lambda: next_token.Sizes(
            layers=8, heads=8, width=256, positions=tuple(2**i for i in range(8, 15)), recomputed_to=512
        )
    )
    rounds: int = 5


QUICK = Sizes(lengths=(16, 32), tokens=32, step=training_step.QUICK, next=next_token.QUICK, rounds=2)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings."""
    steps: dict[str, Callable[[], object]] = {}
    for length in sizes.lengths:
        shape = replace(sizes.step, batch=max(1, sizes.tokens // length), tokens=length)
        for name, mechanism in MECHANISMS.items():
            steps[_step(name, length)] = training_step.step(training_step.model(mechanism, shape), shape)
    timings = interleaved(steps, rounds=sizes.rounds, at_least=0, settle=1.0, progress=progress)
    rows = []
    for length in sizes.lengths:
        tokens = max(1, sizes.tokens // length) * length
        rates = {name: tokens / timings[_step(name, length)].median for name in MECHANISMS}
        rows += [Row(_step(name, length), rate, "tokens/s") for name, rate in rates.items()]
        rows.append(Row(f"{_step('softmax / linear', length)}", rates["linear"] / rates["softmax"], "x"))
    written, more = next_token.run(sizes.next, lambda done: None)
    return [*rows, *written], timings | more


def _step(name: str, length: int) -> str:
    return f"{name}, training step of {length:,} tokens"


def picture(path: Path, rows: list[Row], timings: dict[str, Timing], sizes: Sizes) -> list[Path]:
    """Draw the time of a token in training against the length, and of the next token against its position."""
    training, written = (path.with_stem(f"{path.stem}-{what}") for what in ("training", "decoding"))
    rates = {row.what: row.figure for row in rows}
    pictures.logarithmic(
        training,
        {name: {n: 1e3 / rates[_step(name, n)] for n in sizes.lengths} for name in MECHANISMS},
        x="tokens of a sequence",
        y="training, time of a token (ms)",
        title=f"a step of training, {sizes.step.layers} layers of width {sizes.step.width}",
    )
    title = f"the next token, {sizes.next.layers} layers of width {sizes.next.width}"
    pictures.time_per_token(
        written, sizes.next.positions, next_token.milliseconds(timings, sizes.next), title
    )
    return [training, written]

"""A point of the scaling figure: who attends over how many tokens, and its cost in a process of its own."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from lintra import attention
from lintra.allocator import keep_freed_memory
from lintra.bench import calls
from lintra.bench.calls import Call, Inputs
from lintra.bench.memory import forget_peak, grow_at_most, peak, printed_by, ran_out
from lintra.bench.timing import finish_on

WRITTEN_OUT, FUSED = "softmax, written out", "softmax, SDPA"
ROUNDS = (1, 4, 8)  # of LSH, as in the paper
TELL = "from lintra.bench.points import tell"  # the first line of the program that `cost` runs
_WARM_UP = 256  # tokens
_REPEATED = 60.0  # seconds: a later call is timed instead of a shorter one, which gets fresh memory


@dataclass(frozen=True, kw_only=True)
class Point:
    """`who` is one of `ours`, or another contestant of the caller."""

    who: str
    batch: int
    tokens: int
    heads: int
    dim: int
    device: str


@dataclass(frozen=True)
class Cost:
    """Cost of one call."""

    seconds: float
    size: int  # bytes at the peak, beyond what was held before the call: the inputs are not in it


def ours() -> list[str]:
    """Softmax both ways, LSH with each number of rounds, every other mechanism."""
    others = [name for name in attention.names() if name not in ("softmax", "lsh")]
    return [WRITTEN_OUT, FUSED, *(f"lsh-{rounds}" for rounds in ROUNDS), *others]


def draw(point: Point) -> Inputs:
    return calls.draw(point.batch, point.tokens, point.heads, point.dim, point.device)


def cut(inputs: Inputs, point: Point) -> Inputs:
    """The first tokens of longer inputs, as the inputs of a point."""
    tokens = point.batch * point.tokens
    q, k, v = (
        x.detach().flatten(0, 1)[:tokens].unflatten(0, (point.batch, point.tokens)).requires_grad_()
        for x in inputs
    )
    return q, k, v


def call(point: Point, inputs: Inputs) -> Call:
    """Forward + backward; causal where there is such a form."""
    who = point.who
    if who in (WRITTEN_OUT, FUSED):
        return calls.passes(calls.fused if who == FUSED else calls.written_out, inputs)
    name, _, rounds = who.partition("-") if who.startswith("lsh-") else (who, "", "")
    options = {"rounds": int(rounds)} if rounds else {}
    return calls.mechanism(name, inputs, causal=calls.modes(name)[0], **options)


def cost(point: Point, most: int, tell: str = TELL) -> Cost:
    """Return the cost of a call in a process of its own that may need `most` bytes: the memory of the first
    one, and the time of a later one unless the first takes a minute or later ones run out of memory.

    tell: a line that imports `tell`, or another function of a point and `most` that prints as it does.
    Raises as `printed_by` does."""
    program = f"{tell}\nfrom lintra.bench.points import Point\ntell(Point(**{asdict(point)}), {most})"
    return Cost(**json.loads(printed_by(program)))


def tell(point: Point, most: int, call: Callable[[Point, Inputs], Call] = call) -> None:
    """Print its `Cost` as JSON, without what any first call loads and starts."""
    short = replace(point, batch=1, tokens=min(_WARM_UP, point.tokens))
    call(short, draw(short))()
    if point.device == "cpu":
        grow_at_most(most)
    both = call(point, draw(point))
    forget = forget_peak if point.device == "cpu" else torch.cuda.reset_peak_memory_stats
    held = peak if point.device == "cpu" else torch.cuda.max_memory_allocated
    forget()
    before = held()
    seconds = _seconds(both, point.device)
    size = held() - before
    if seconds < _REPEATED:
        keep_freed_memory()  # as where calls are timed; before, it would count as memory of the call
        try:
            both()
            seconds = _seconds(both, point.device)
        except Exception as error:
            if not ran_out(error):
                raise
    print(json.dumps({"seconds": seconds, "size": size}))


def _seconds(both: Call, device: str) -> float:
    start = time.perf_counter()
    both()
    finish_on(device)()
    return time.perf_counter() - start

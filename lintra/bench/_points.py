"""A point of the scaling figure: who attends over how many tokens, and its cost in a process of its own."""

import json
import time
from dataclasses import asdict, dataclass, replace

import torch

from lintra import attention
from lintra.bench import _calls, _peers
from lintra.bench._calls import Call, Inputs
from lintra.bench._memory import forget_peak, grow_at_most, peak, printed_by
from lintra.bench._timing import finish_on

WRITTEN_OUT, FUSED = "softmax, written out", "softmax, SDPA"
ROUNDS = (1, 4, 8)  # of LSH, as in the paper
_WARM_UP = 256  # tokens


@dataclass(frozen=True, kw_only=True)
class Point:
    """`who` is one of `ours` or a peer."""

    who: str
    batch: int
    tokens: int
    heads: int
    dim: int
    device: str


@dataclass(frozen=True)
class Cost:
    """Of one call."""

    seconds: float
    size: int  # bytes at the peak, beyond what was held before the call: the inputs are not in it


def ours() -> list[str]:
    """Softmax both ways, LSH with each number of rounds, every other mechanism."""
    others = [name for name in attention.names() if name not in ("softmax", "lsh")]
    return [WRITTEN_OUT, FUSED, *(f"lsh-{rounds}" for rounds in ROUNDS), *others]


def draw(point: Point) -> Inputs:
    return _calls.draw(point.batch, point.tokens, point.heads, point.dim, point.device)


def cut(inputs: Inputs, point: Point) -> Inputs:
    """The first tokens of longer inputs, as a point's own."""
    tokens = point.batch * point.tokens
    q, k, v = (
        x.detach().flatten(0, 1)[:tokens].unflatten(0, (point.batch, point.tokens)).requires_grad_()
        for x in inputs
    )
    return q, k, v


def call(point: Point, inputs: Inputs) -> Call:
    """Forward + backward; causal where there is such a form."""
    who = point.who
    if who in _peers.PEERS:
        return _peers.call(who, inputs)
    if who in (WRITTEN_OUT, FUSED):
        return _calls.passes(_calls.fused if who == FUSED else _calls.written_out, inputs)
    name, _, rounds = who.partition("-")
    options = {"rounds": int(rounds)} if rounds else {}
    return _calls.mechanism(name, inputs, causal=_calls.modes(name)[0], **options)


def cost(point: Point, most: int) -> Cost:
    """Of the first call in a process of its own that may need `most` bytes. Raises as `printed_by` does."""
    program = f"from lintra.bench import _points\n_points.tell(_points.Point(**{asdict(point)}), {most})"
    return Cost(**json.loads(printed_by(program)))


def tell(point: Point, most: int) -> None:
    """Prints its `Cost` as JSON. What any first call loads and starts is no part of it."""
    short = replace(point, batch=1, tokens=min(_WARM_UP, point.tokens))
    call(short, draw(short))()
    if point.device == "cpu":
        grow_at_most(most)
    both = call(point, draw(point))
    forget = forget_peak if point.device == "cpu" else torch.cuda.reset_peak_memory_stats
    held = peak if point.device == "cpu" else torch.cuda.max_memory_allocated
    forget()
    before, start = held(), time.perf_counter()
    both()
    finish_on(point.device)()
    print(json.dumps({"seconds": time.perf_counter() - start, "size": held() - before}))

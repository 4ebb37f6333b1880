"""Predicted cost of a step in which ranks wait for states, or exchange them.

With L layers, R ranks, shards of t tokens, c multiplications and additions per token and layer, `rate` of
them a second, and messages that take `latency` + bytes / `bandwidth` each, waiting or exchanging adds

    relay   (R - 1) (3 c t / rate + 2 messages)             rank r begins r layers late, and ends so
    scan    L_s (3 s t / rate + 2 log2(R) messages)         one more pass over keys and values, at s a token

to what the shards take by themselves, forward and backward, the backward counted as two forwards. L_s are the
layers whose states compose. Only ranks between two others make the extra pass: with two ranks none does. A
layer that can only wait makes the others wait too, whatever they do.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lintra.attention import Attention
from lintra.nn.attention_layer import AttentionLayer
from lintra.nn.context_parallel import Method
from lintra.nn.parameters import is_fsdp

CHUNK = 64  # tokens of the triangles of the parallel form
TOUCHED = 4  # operations that reading and writing a number counts for


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Assumed speeds of one rank, orders of magnitude: no measurement."""

    rate: float = 2e10  # multiplications and additions a second: one thread of a CPU
    latency: float = 1e-4  # seconds a message takes however short: gloo
    bandwidth: float = 1e9  # bytes a second

    @classmethod
    def of(cls, device: torch.device) -> "Machine":
        """Return the speeds assumed of a device."""
        return cls() if device.type in ("cpu", "meta") else cls(rate=5e13, latency=3e-5, bandwidth=5e10)


class Choice(NamedTuple):
    """Method by which a layer, named as in its network, gets what precedes a rank's shard, and why."""

    layer: str
    attention: str
    method: Method
    reason: str


def choose(
    model: nn.Module, ranks: int, rows: int, tokens: int, method: str, machine: Machine | None = None
) -> dict[nn.Module, Choice]:
    """Return the method of every `AttentionLayer` of a model.

    tokens: of the longest shard. method: "relay", "scan", where a mechanism has it, or "auto", whichever of
    the two is predicted to take less time."""
    layers = {x: name for name, x in model.named_modules() if isinstance(x, AttentionLayer)}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    machine = Machine.of(device) if machine is None else machine
    able = {x: exchange for x in layers if (exchange := x.attention.exchange()) is not None}
    found: dict[nn.Module, tuple[Method, str]] = {}
    for x in layers:
        if method == "relay":
            found[x] = "relay", "as asked for"
        elif x not in able:
            found[x] = "relay", "the mechanism has no state that composes"
        else:
            why = "as asked for" if method == "scan" else "FSDP2 would have ranks that wait run in turn"
            found[x] = "scan", FREE.get(able[x], why)
    composing = [x for x, exchange in able.items() if exchange == "scan"]
    if method == "auto" and composing and not is_fsdp(model):
        decided = _compare(
            model, list(layers), composing, len(able) < len(layers), ranks, rows, tokens, machine
        )
        found |= dict.fromkeys(composing, decided)
    return {x: Choice(name, x.attention.name, *found[x]) for x, name in layers.items()}


FREE = {
    "window": "its window is sent without waiting, at no further cost",
    "ring": "keys and values go round, so that no rank keeps all of them",
}


def _compare(
    model: nn.Module,
    layers: list[AttentionLayer],
    composing: list[AttentionLayer],
    waiting: bool,
    ranks: int,
    rows: int,
    tokens: int,
    machine: Machine,
) -> tuple[Method, str]:
    """The method of the layers whose states compose, and why."""
    if waiting:
        return "relay", "another layer has the ranks wait in any case"
    relay = relay_seconds(model, layers, ranks, rows, tokens, machine)
    scan = scan_seconds(composing, ranks, rows, tokens, machine)
    reason = f"predicted to add {_time(relay)} a step by waiting, {_time(scan)} by exchanging states"
    return ("scan" if scan < relay else "relay"), reason


def relay_seconds(
    model: nn.Module, layers: list[AttentionLayer], ranks: int, rows: int, tokens: int, machine: Machine
) -> float:
    """Return what waiting for states is predicted to add to a step of shards of `tokens`.

    A rank waits for a layer with the rest of its block, and not for the head."""
    inside: Any = getattr(model, "blocks", model)
    tables = {id(p) for x in inside.modules() if isinstance(x, nn.Embedding) for p in x.parameters()}
    weights = sum(p.numel() for p in inside.parameters() if id(p) not in tables) / len(layers)
    mixing = sum(mixing_operations(x.attention, ranks * tokens) for x in layers) / len(layers)
    seconds = 3 * (weights + mixing) * rows * tokens / machine.rate
    message = max(_message(state_numbers(x.attention), rows, machine) for x in layers)
    return (ranks - 1) * (seconds + 2 * message)


def scan_seconds(
    layers: Iterable[AttentionLayer], ranks: int, rows: int, tokens: int, machine: Machine
) -> float:
    """Return what exchanging states is predicted to add to a step of shards of `tokens`."""
    rounds = math.ceil(math.log2(ranks))
    total = 0.0
    for x in layers:
        numbers = state_numbers(x.attention) + transition_numbers(x.attention, ranks)
        if ranks > 2:
            total += 3 * state_operations(x.attention) * rows * tokens / machine.rate
        total += 2 * rounds * _message(numbers, rows, machine)
    return total


def state_numbers(attention: Attention) -> int:
    """Return how many numbers the state of a sequence has, where it is constant; 0 where it grows."""
    return sum(x.numel() for x in _parts(attention))


def transition_numbers(attention: Attention, ranks: int) -> int:
    """Return how many numbers a transition has that ranks send: with two ranks, none."""
    if ranks < 3:
        return 0
    g, f, _ = _state_sizes(attention)
    return g * f * f if attention.matrix_transition else g * f


def state_operations(attention: Attention) -> float:
    """Return what a token costs in the pass that finds what a shard does to a state, forward."""
    g, f, e = _state_sizes(attention)
    if not attention.matrix_transition:
        return g * f * e + TOUCHED * g * (f + e)
    # The transition is computed beside the state.
    return g * (sum(delta_operations(f, e + f, CHUNK)) + TOUCHED * (3 * f + e))


def mixing_operations(attention: Attention, tokens: int) -> float:
    """Return what a token costs besides projections and MLP in a sequence of so many tokens, forward."""
    if attention.can.state == "constant":
        g, f, e = _state_sizes(attention)
        if attention.matrix_transition:
            return g * sum(delta_operations(f, e, CHUNK))
        return g * (2 * f * e + CHUNK * (f + e))
    window = getattr(attention.config, "window", None)
    seen = tokens / 2 if window is None else min(window, tokens)
    return seen * attention.heads * (attention.dim + attention.value_dim)


def delta_operations(f: int, e: int, chunk: int, readers: float = 1) -> tuple[float, float]:
    """Return what a token and state cost by the delta rule in its form by chunks, a multiplication and an
    addition as one: in products of matrices, and in solving the triangles.

    f features, values of width e, `readers` query heads of a state."""
    read = chunk * (f + e) + f * e  # within the chunk, and of the state
    carried = f * (chunk + f + 2 * e + f * e / chunk)
    return readers * read + carried, chunk * (f + e) / 2


def _state_sizes(attention: Attention) -> tuple[int, int, int]:
    """Heads, features and width of the largest part of a state."""
    sizes = max(_parts(attention), key=lambda x: x.numel()).shape[1:]
    heads, features, *width = *sizes, 1
    return heads, features, width[0]


def _parts(attention: Attention) -> list[torch.Tensor]:
    """The tensors of the state of a sequence, without numbers."""
    return [x for x in attention.start(1, device="meta") if isinstance(x, torch.Tensor)]


def _message(numbers: int, rows: int, machine: Machine) -> float:
    return machine.latency + 4 * numbers * rows / machine.bandwidth


def _time(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"

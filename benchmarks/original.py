"""`python -m benchmarks original --checkout FOLDER`: the drop-in beside the original.

FOLDER is a checkout of idiap/fast-transformers with its C++ extensions built in place. A token of recurrent
encoders, a token of a recurrent decoder and forward passes of encoders are timed. Both sides have the same
weights and must give the same outputs. They use one thread, because one token has little to share.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lintra.bench import options
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved

MEASURES = ("lintra/compat",)
OURS, THEIRS = "lintra.compat.fast_transformers", "fast_transformers"
RECURRENT = ("linear", "full")
FORWARD = ("linear", "causal-linear", "full", "local", "exact-topk", "clustered", "improved-clustered")
RANDOM = ("clustered", "improved-clustered")  # hash with directions that each library samples for itself
OPTIONS = {"local_context": 64, "topk": 32, "clusters": 64, "iterations": 10, "bits": 32}


@dataclass(frozen=True, kw_only=True)
class Options(options.Options):
    """Options of this benchmark."""

    checkout: str | None = None  # a checkout of idiap/fast-transformers, its extensions built in place

    def __post_init__(self):
        super().__post_init__()
        if self.checkout is None or not (Path(self.checkout) / THEIRS / "builders").is_dir():
            raise ValueError(f"checkout must be a checkout of fast-transformers, got {self.checkout}")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    checkout: str | None = None
    layers: int = 4
    heads: int = 8
    dim: int = 32
    batch: int = 4
    steps: int = 32  # of a turn, starting from an empty state
    tokens: int = 512  # of a forward pass
    rounds: int = 15


QUICK = Sizes(layers=1, heads=2, dim=8, batch=2, steps=2, tokens=128, rounds=2)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> a row with the ratio theirs / ours for each kind of work, and the timings."""
    with importing_from(sizes.checkout), one_thread(), torch.no_grad():
        work = {
            f"{name}, {whose}": call
            for name, pair in contests(sizes)
            for whose, call in zip(("lintra", "original"), pair, strict=True)
        }
        timings = interleaved(work, rounds=sizes.rounds, progress=progress)
    names = dict.fromkeys(name.rpartition(", ")[0] for name in work)
    ratios = {name: timings[f"{name}, original"].median / timings[f"{name}, lintra"].median for name in names}
    return [Row(name, ratio, "x", at_least=1.0) for name, ratio in ratios.items()], timings


@contextmanager
def importing_from(checkout: str | None) -> Iterator[None]:
    """Make `fast_transformers` importable from a checkout."""
    sys.path.insert(0, str(Path(checkout or ".").absolute()))
    try:
        yield
    finally:
        del sys.path[0]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def contests(sizes: Sizes) -> Iterator[tuple[str, tuple[Callable[[], Any], Callable[[], Any]]]]:
    """Yield the name of each kind of work and the same call in lintra and in the original."""
    for attention in RECURRENT:
        yield (
            f"recurrent encoder, {attention}",
            both(f"recurrent {attention}", sizes, recurrent_encoder, attention),
        )
    yield "recurrent decoder, full", both("recurrent decoder", sizes, recurrent_decoder, "full")
    for attention in FORWARD:
        alike = attention not in RANDOM
        yield f"forward, {attention}", both(f"forward {attention}", sizes, encoder, attention, alike=alike)


def both(
    name: str, sizes: Sizes, build: Callable[..., Callable[[], Any]], attention: str, alike: bool = True
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Build the same call in lintra and in the original.

    Raises RuntimeError where the two give other outputs, unless `alike` is False."""
    ours, theirs = (build(partial(module, package), sizes, attention) for package in (OURS, THEIRS))
    close = torch.isclose(ours(), theirs(), rtol=1e-3, atol=1e-4)
    # If two keys have almost the same score, rounding decides which of them is among the best.
    if alike and close.double().mean() < 0.99:
        raise RuntimeError(f"{name}: lintra and the original differ")
    return ours, theirs


def module(package: str, name: str) -> ModuleType:
    """Import a submodule of lintra's drop-in or of the original."""
    return importlib.import_module(f"{package}.{name}")


def settings(sizes: Sizes) -> dict[str, Any]:
    """Return the arguments that all builders have in common."""
    return {
        "n_layers": sizes.layers,
        "n_heads": sizes.heads,
        "query_dimensions": sizes.dim,
        "value_dimensions": sizes.dim,
        "feed_forward_dimensions": 4 * sizes.heads * sizes.dim,
        "dropout": 0.0,
    }


def recurrent_encoder(load: Callable[[str], ModuleType], sizes: Sizes, attention: str) -> Callable[[], Any]:
    """Return a call that runs an encoder over tokens, one at a time, and gives the last output."""
    torch.manual_seed(0)
    builder = load("builders").RecurrentEncoderBuilder.from_kwargs(
        attention_type=attention, **settings(sizes)
    )
    model = builder.get().eval()
    tokens = torch.randn(sizes.steps, sizes.batch, sizes.heads * sizes.dim)

    def steps() -> torch.Tensor:
        y, state = tokens[0], None
        for token in tokens:
            y, state = model(token, state)
        return y

    return steps


def recurrent_decoder(load: Callable[[str], ModuleType], sizes: Sizes, attention: str) -> Callable[[], Any]:
    """Return a call that runs a decoder, with cross-attention to 64 vectors, over `sizes.steps` tokens."""
    torch.manual_seed(0)
    builder = load("builders").RecurrentDecoderBuilder.from_kwargs(
        self_attention_type=attention, cross_attention_type=attention, **settings(sizes)
    )
    model = builder.get().eval()
    tokens = torch.randn(sizes.steps, sizes.batch, sizes.heads * sizes.dim)
    memory = torch.randn(sizes.batch, 64, sizes.heads * sizes.dim)

    def steps() -> torch.Tensor:
        y, state = tokens[0], None
        for token in tokens:
            y, state = model(token, memory, state=state)
        return y

    return steps


def encoder(load: Callable[[str], ModuleType], sizes: Sizes, attention: str) -> Callable[[], Any]:
    """Return a call of an encoder's forward pass."""
    torch.manual_seed(0)
    builder = load("builders").TransformerEncoderBuilder.from_kwargs(
        attention_type=attention, **settings(sizes), **OPTIONS
    )
    model = builder.get().eval()
    x = torch.randn(sizes.batch, sizes.tokens, sizes.heads * sizes.dim)
    causal = attention == "causal-linear"
    mask = load("masking").TriangularCausalMask(sizes.tokens) if causal else None
    return lambda: model(x, attn_mask=mask)

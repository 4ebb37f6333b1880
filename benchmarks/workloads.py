"""The program that benchmarks/regression.py runs in a checkout, this one or an older one of lintra.

It imports only what lintra 0.1 has too. It answers `names` with the names of all workloads, and `run N NAME`
with the seconds that N calls of one took.
"""

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import lintra.compat.fast_transformers as original
from lintra import attention
from lintra.models import decoder, encoder, seq2seq

try:
    from lintra import generation
except ImportError:  # lintra 0.1
    from lintra import generate as generation

Call = Callable[[], object]
HEADS, DIM, WIDTH, LAYERS = 8, 64, 256, 2
TRAINED = ("linear", "softmax", "longformer", "delta")  # on dense, padded and packed batches
ENCODED = ("linear", "softmax", "nystromformer")
MODES = {"causal": True, "bidirectional": False}


def workloads(tokens: int) -> dict[str, Call]:
    """Return all workloads by name, on sequences of about `tokens` tokens."""
    torch.manual_seed(0)
    return {**mechanisms(tokens), **models(tokens), **decoding(tokens), **drop_in(tokens)}


def mechanisms(tokens: int) -> dict[str, Call]:
    """Forward + backward of every mechanism, causal and bidirectional."""
    found = {}
    q, k, v = (torch.randn(1, tokens, HEADS, DIM, requires_grad=True) for _ in range(3))
    for name in attention.names():
        can = attention.mechanism(name).can
        for mode, causal in MODES.items():
            if can.causal if causal else can.bidirectional:
                config = attention.for_length(attention.load(name).Config, tokens)
                built = config.build(heads=HEADS, dim=DIM, causal=causal)
                widths = built.extra_inputs() if hasattr(built, "extra_inputs") else built.reads()
                extra = {what: torch.randn(1, tokens, width) for what, width in widths.items()}
                found[f"{name}, {mode}"] = _both(built, q, q if built.shared_key else k, v, **extra)
    return found


def _both(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Call:
    def both() -> None:
        function(*inputs, **options).sum().backward()

    return both


def models(tokens: int) -> dict[str, Call]:
    """Training steps and evaluations of whole networks, dense, padded and packed."""
    found = {}
    lengths = [tokens // 4, tokens // 2, tokens, tokens // 3]
    symbols = torch.zeros(len(lengths), tokens, dtype=torch.int64)
    mask = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    packed, bounds = symbols[mask][None], torch.tensor([0, *lengths]).cumsum(0)
    for name in TRAINED:
        step = _log_prob(decoder.Config(**_shape(name, tokens), vocabulary=256).build())
        found[f"decoder of {name}, training step"] = _both(step, symbols)
        found[f"decoder of {name}, padded, training step"] = _both(step, symbols, mask=mask)
        found[f"decoder of {name}, packed, training step"] = _both(step, packed, cu_seqlens=bounds)
    for name in ENCODED:
        config = encoder.Config(**_shape(name, tokens), vocabulary=256, outputs=2, pool="mean")
        found[f"encoder of {name}, padded, forward"] = _evaluated(config.build().eval(), symbols, mask=mask)
    source = encoder.Config(**_shape("linear", tokens), vocabulary=256)
    pairs = seq2seq.Config(**_shape("linear", tokens), vocabulary=256, encoder=source).build().eval()
    encode: Any = getattr(pairs, "encode_memory", None) or pairs.remember  # its name in 0.1
    found["sequence to sequence, forward"] = _evaluated(
        lambda: pairs(symbols, encode(symbols, mask), mask=mask)
    )
    return found


def _shape(name: str, tokens: int) -> dict[str, Any]:
    config = attention.for_length(attention.load(name).Config, tokens)
    return {"attention": config, "layers": LAYERS, "heads": HEADS, "width": WIDTH}


def _log_prob(model: Any) -> Callable[..., Tensor]:
    return lambda symbols, **layout: model.output.log_prob(model(symbols, **layout), symbols)


def _evaluated(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Call:
    @torch.no_grad()
    def call() -> None:
        function(*inputs, **options)

    return call


def decoding(tokens: int) -> dict[str, Call]:
    """One token after a prompt with every recurrent mechanism, and sampling with the fused step."""
    found = {}
    for name in attention.names():
        if attention.mechanism(name).can.recurrent:
            model = decoder.Config(**_shape(name, tokens), vocabulary=256).build().eval()
            for batch in (1, 64):
                found[f"decoder of {name}, next token of {batch}"] = _next_token(model, batch, tokens // 2)
    sampled = decoder.Config(**_shape("linear", tokens), vocabulary=256).build().eval()
    for batch in (1, 64):
        found[f"sampling 32 tokens of {batch}"] = lambda batch=batch: generation.generate(
            sampled, steps=32, batch=batch, seed=0
        )
    return found


def _next_token(model: Any, batch: int, prompt: int) -> Call:
    with torch.no_grad():
        _, state = model.extend(torch.zeros(batch, prompt, dtype=torch.int64))
    return _evaluated(model.extend, torch.zeros(batch, 1, dtype=torch.int64), state)


def drop_in(tokens: int) -> dict[str, Call]:
    """Models of `lintra.compat.fast_transformers`: whole sequences and one token."""
    original.install()
    builders = import_module("fast_transformers.builders")
    mask = import_module("fast_transformers.masking").TriangularCausalMask(tokens)
    x, found = torch.randn(4, tokens, WIDTH), {}
    shape = {"n_layers": LAYERS, "n_heads": HEADS, "query_dimensions": 32, "value_dimensions": 32}
    shape["feed_forward_dimensions"] = 4 * WIDTH
    for name, causal in (("linear", "causal-linear"), ("full", "full")):
        network = builders.TransformerEncoderBuilder.from_kwargs(**shape, attention_type=causal).get().eval()
        found[f"fast_transformers, {name}, forward"] = _evaluated(network, x, attn_mask=mask)
        step = builders.RecurrentEncoderBuilder.from_kwargs(**shape, attention_type=name).get().eval()
        found[f"fast_transformers, {name}, recurrent step"] = _evaluated(step, x[:, 0])
    return found


def server(tokens: int) -> Callable[[str], Any]:
    """Return the function that answers a line: `names`, or `run N NAME`."""
    calls = workloads(tokens)

    def answer(line: str) -> Any:
        if line == "names":
            return list(calls)
        _, count, name = line.split(maxsplit=2)
        call, start = calls[name], time.perf_counter()
        for _ in range(int(count)):
            call()
        return time.perf_counter() - start

    return answer

"""`python -m benchmarks drop_in`: models of transformers on lintra's CPU kernels and on their own functions.

The models have random weights and the sizes of published models, with fewer layers, because what counts is
the time of a layer. Both kinds of kernels run in turns on the same model; a row is transformers' time over
lintra's. Its bound is the ratio that would remain if lintra's call took only the time of PyTorch's matrix
products and softmax, which run in the same way in both.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lintra
from benchmarks.families import fallbacks
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved

MEASURES = ("lintra/compat", "lintra/native")
VOCABULARY = 4096
GDN = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
KDA = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "linear_head_dim": 128,
    "linear_num_heads": 8,
}
MAMBA2 = {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "n_groups": 1, "state_size": 128}
MAMBA = {"hidden_size": 768, "state_size": 16}
# Operators by the beginnings of their names.
IN_COMMON = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product",
)
FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    shrink: int = 1  # divides the numbers of tokens
    layers: int = 4
    training_layers: int = 2
    steps: int = 8  # single tokens of a turn of decoding
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 3

    @property
    def turns(self) -> int:
        return self.rounds * len(self.threads)


QUICK = Sizes(shrink=16, layers=2, steps=2, threads=(1,), rounds=2)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> a row for each kind of work and number of threads, and the timings."""
    before, rows, timings = torch.get_num_threads(), [], {}
    try:
        for turn, threads in enumerate(sizes.threads):
            torch.set_num_threads(threads)
            for name, least, call in work(sizes):
                name = f"{name}, {threads} thread{'s' * (threads > 1)}"
                found = compare(call, sizes.rounds)
                timings |= {f"{name}, {whose}": timing for whose, timing in found.items()}
                slow = found["transformers"].median
                rows.append(Row(name, slow / found["lintra"].median, "x", at_least=least))
                rows.append(Row(f"{name}: bound", slow / in_common(call), "x"))
            progress((turn + 1) * sizes.rounds)
    finally:
        torch.set_num_threads(before)
    return rows, timings


def compare(call: Callable[[str], object], rounds: int) -> dict[str, Timing]:
    """Time a call on transformers' functions and on lintra's, once per turn."""
    whose = ("transformers", "lintra")
    return interleaved({name: partial(call, name) for name in whose}, rounds=rounds, at_least=0, settle=2)


def in_common(call: Callable[[str], object]) -> float:
    """Return the seconds of a call on lintra's kernels that go into PyTorch's products and softmax."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        call("lintra")
    events = profiled.key_averages()
    return 1e-6 * sum(x.self_cpu_time_total for x in events if x.key.startswith(IN_COMMON))


def work(sizes: Sizes) -> Iterator[tuple[str, float, Callable[[str], object]]]:
    """Yield the name of each kind of work, the least ratio asked of it, and the call for given kernels."""
    hybrid = [LINEAR] * (sizes.layers - 1) + [FULL]
    linear = {"num_hidden_layers": sizes.training_layers, "layer_types": [LINEAR] * sizes.training_layers}
    mamba2 = build("Mamba2Config", sizes, **MAMBA2)
    yield "Mamba-2, prefill of 2,048 tokens", 2.5, prefill(mamba2, 2048 // sizes.shrink)
    mamba = build("MambaConfig", sizes, **MAMBA)
    yield "Mamba, prefill of 1,024 tokens", 3.0, prefill(mamba, 1024 // sizes.shrink)
    falcon = build("FalconMambaConfig", sizes, **MAMBA)
    yield "Falcon Mamba, prefill of 1,024 tokens", 3.0, prefill(falcon, 1024 // sizes.shrink)
    for name, model in (
        ("GDN", build("Qwen3_5TextConfig", sizes, **linear, **GDN)),
        ("KDA", build("KimiLinearConfig", sizes, **linear, **dense(sizes), **KDA)),
    ):
        yield f"{name}, training step of 2,048 tokens", 2.0, training(model, 2048 // sizes.shrink)
    for dtype, least in ((torch.float32, 1.15), (torch.bfloat16, 1.3)):
        model = build("Qwen3_5TextConfig", sizes, layer_types=hybrid, **GDN).to(dtype)
        named = f"3 GDN + 1 full, {str(dtype).removeprefix('torch.')}"
        yield f"{named}, prefill of 1,024 tokens", least, prefill(model, 1024 // sizes.shrink)
        for batch, factor in ((1, 1.0), (32, 2.0)):
            yield f"{named}, decoding {batch} at a time", factor, decoding(model, batch, sizes.steps)


def dense(sizes: Sizes) -> dict[str, Any]:
    """Return the settings by which a mixture-of-experts model has no experts."""
    return {
        "mlp_layer_types": ["dense"] * sizes.training_layers,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }


def build(config: str, sizes: Sizes, **settings: Any) -> nn.Module:
    """Build a causal language model of transformers, with random weights, for inference."""
    import transformers

    torch.manual_seed(0)
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    settings = {"vocab_size": VOCABULARY, "num_hidden_layers": sizes.layers, **ends, **settings}
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**settings)).eval()


def kernels(model: nn.Module, whose: str) -> AbstractContextManager[object]:
    """Return a context in which a model runs on transformers' functions, or on lintra's kernels."""
    return lintra.accelerate(model) if whose == "lintra" else fallbacks(model)


def prefill(model: nn.Module, tokens: int) -> Callable[[str], object]:
    """Return a call that reads a prompt and predicts the next token."""
    prompt = torch.randint(VOCABULARY, (1, tokens))

    def call(whose: str) -> Tensor:
        with kernels(model, whose), torch.no_grad():
            return model(prompt, use_cache=True, logits_to_keep=1).logits

    return call


def training(model: nn.Module, tokens: int) -> Callable[[str], object]:
    """Return a call of a forward and backward pass."""
    sample = torch.randint(VOCABULARY, (1, tokens))

    def call(whose: str) -> None:
        model.train()
        model.zero_grad()
        with kernels(model, whose):
            model(sample, labels=sample, use_cache=False).loss.backward()
        model.eval()

    return call


def decoding(model: nn.Module, batch: int, steps: int) -> Callable[[str], object]:
    """Return a call that reads `steps` single tokens of each sequence, after those of the calls before."""
    tokens = torch.randint(VOCABULARY, (batch, 16))
    caches: dict[str, Any] = {}

    def call(whose: str) -> None:
        with kernels(model, whose), torch.no_grad():
            if whose not in caches:
                caches[whose] = model(tokens, use_cache=True).past_key_values
            for _ in range(steps):
                model(tokens[:, :1], past_key_values=caches[whose], use_cache=True)

    return call

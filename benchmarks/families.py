"""Families of transformers that run on lintra's CPU kernels as they do on transformers' own functions.

    python -m benchmarks.families --out lintra/compat/families.json

The models are tiny and random. They have all kernels of a family, and sizes that are awkward for kernels.
docs/huggingface.md shows what this program writes, and `lintra list --families` prints it.
"""

import argparse
import inspect
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

import lintra
from lintra.bench.reports import save
from lintra.compat import kernels

MEASURES = ["benchmarks/families.py", "lintra/compat", "lintra/ops", "lintra/native"]
VOCABULARY, TOKENS, NEW = 64, 37, 8
LOGITS, GRADIENTS = 1e-5, 1e-4  # relative errors that are allowed in float32

_ENDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
# Weights large enough that no part of a layer vanishes in rounding.
_WEIGHTS = {"initializer_range": 0.2}
_MODEL = {**_ENDS, **_WEIGHTS, "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
_ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_ONE_OF_EACH = {"layer_types": ["linear_attention", "full_attention"]}
_GROUPS = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_GDN = {**_MODEL, **_ATTENTION, **_GROUPS, **_ONE_OF_EACH}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}
_KDA = {**_MODEL, **_ATTENTION, **_LATENT, **_EXPERTS, **_ONE_OF_EACH}
_KDA_HEADS = {"linear_head_dim": 8, "linear_num_heads": 4}
_SSD = {
    **_MODEL,
    **_ATTENTION,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_MAMBA = {**_MODEL, "state_size": 8}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "projection_intermediate_size": 16,
}


@dataclass(frozen=True)
class Family:
    """A family of models: its recurrence, the class of its configuration, and a tiny one."""

    recurrence: str
    config: str
    settings: dict[str, Any]
    vision: bool = False  # the language model is part of a vision-language model

    def build(self) -> nn.Module:
        """Build the model for inference, with weights from the global random generator."""
        import transformers

        config = getattr(transformers, self.config)(**self.settings)
        config._experts_implementation = "eager"  # the faster ones have no float64
        if self.vision:
            whole = transformers.Glm5NextConfig(text_config=config.to_dict(), vision_config=_VISION)
            return transformers.Glm5NextForConditionalGeneration(whole).eval()
        return transformers.AutoModelForCausalLM.from_config(config).eval()


FAMILIES = {
    "qwen3_next": Family("gated delta rule", "Qwen3NextConfig", {**_GDN, **_QWEN_EXPERTS, "head_dim": 8}),
    "qwen3_5": Family("gated delta rule", "Qwen3_5TextConfig", {**_GDN, "head_dim": 8}),
    "qwen3_5_moe": Family(
        "gated delta rule", "Qwen3_5MoeTextConfig", {**_GDN, **_QWEN_EXPERTS, "head_dim": 8}
    ),
    "qwen4_exp": Family(
        "gated delta rule",
        "Qwen4ExpTextConfig",
        {
            **_GDN,
            **_QWEN_EXPERTS,
            "head_dim": 8,
            "hc_count": 2,
            "hc_lowrank": 4,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
    "olmo_hybrid": Family("gated delta rule", "OlmoHybridConfig", _GDN),
    "kimi_linear": Family("KDA", "KimiLinearConfig", {**_KDA, **_KDA_HEADS, "num_local_experts": 4}),
    "bailing_hybrid": Family(
        "KDA",
        "BailingHybridConfig",
        {**_KDA, "head_dim": 8, "num_local_experts": 8, "n_group": 2, "topk_group": 1},
    ),
    "glm5_next": Family(
        "KDA",
        "Glm5NextTextConfig",
        {**_KDA, **_KDA_HEADS, "q_lora_rank": 16, "qk_rope_head_dim": 0, "n_routed_experts": 4},
        vision=True,
    ),
    "mamba2": Family(
        "SSD",
        "Mamba2Config",
        {**_MODEL, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    ),
    "bamba": Family("SSD", "BambaConfig", {**_SSD, "attn_layer_indices": [1]}),
    "falcon_h1": Family("SSD", "FalconH1Config", {**_SSD, "mamba_d_ssm": 64, "head_dim": 8}),
    "granitemoehybrid": Family(
        "SSD",
        "GraniteMoeHybridConfig",
        {
            **_SSD,
            "num_local_experts": 4,
            "shared_intermediate_size": 16,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "nemotron_h": Family(
        "SSD",
        "NemotronHConfig",
        {
            **{name: x for name, x in _MODEL.items() if name != "num_hidden_layers"},
            **_ATTENTION,
            "layers_block_type": ["mamba", "attention", "moe"],
            "head_dim": 8,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "zamba2": Family(
        "SSD",
        "Zamba2Config",
        {
            **_MODEL,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "hybrid"],
            "adapter_rank": 4,
        },
    ),
    "mamba": Family("selective scan", "MambaConfig", _MAMBA),
    "falcon_mamba": Family("selective scan", "FalconMambaConfig", _MAMBA),
    "jamba": Family(
        "selective scan",
        "JambaConfig",
        {
            **_MODEL,
            **_ATTENTION,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
        },
    ),
    "zamba": Family(
        "selective scan",
        "ZambaConfig",
        {
            **_MODEL,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
        },
    ),
    "lfm2": Family(
        "short convolution",
        "Lfm2Config",
        {**_MODEL, **_ATTENTION, "layer_types": ["conv", "full_attention"]},
    ),
    "lfm2_moe": Family(
        "short convolution",
        "Lfm2MoeConfig",
        {
            **_MODEL,
            **_ATTENTION,
            "layer_types": ["conv", "full_attention"],
            **_EXPERTS,
            "num_experts": 4,
            "num_dense_layers": 1,
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How much a family on lintra's kernels differs from the same model on transformers' functions."""

    kernels: list[str]  # of lintra, in the model
    logits: float  # relative error in float32, of left-padded sequences
    cached: float  # the same for logits from a prefill and the single tokens after it
    gradients: float  # the same for the gradients of all weights
    same_tokens: bool  # whether greedy generation in float64 gives the same tokens

    @property
    def passed(self) -> bool:
        close = self.logits <= LOGITS and self.cached <= LOGITS and self.gradients <= GRADIENTS
        return close and self.same_tokens


def check(name: str) -> Outcome:
    """Compare a family's tiny model on lintra's kernels with itself on transformers' functions."""
    torch.manual_seed(0)
    model = FAMILIES[name].build()
    tokens = torch.randint(VOCABULARY, (2, TOKENS))
    real = torch.ones_like(tokens)
    real[0, :5] = 0
    with fallbacks(model):
        expected = [*_forward(model, tokens, real), _gradients(model, tokens)]
    with lintra.accelerate(model) as accelerated:
        found = [*_forward(model, tokens, real), _gradients(model, tokens)]
    logits, cached, gradients = (_error(x, y) for x, y in zip(found, expected, strict=True))
    model.double()
    with fallbacks(model):
        written = _generate(model, tokens, real)
    with lintra.accelerate(model):
        same = torch.equal(_generate(model, tokens, real), written)
    used = sorted({each.kernel.rpartition(".")[2] for each in accelerated.replaced})
    return Outcome(kernels=used, logits=logits, cached=cached, gradients=gradients, same_tokens=same)


@contextmanager
def fallbacks(model: nn.Module) -> Iterator[None]:
    """Make a model use transformers' PyTorch functions, whatever packages are installed."""
    before = [
        (sys.modules[module], name, function)
        for module in {type(part).__module__ for part in model.modules()}
        for name, function in vars(sys.modules[module]).items()
        if isinstance(function, FunctionType) and kernels.of_transformers(function)
    ]
    for module, name, function in before:
        setattr(module, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


@torch.no_grad()
def _forward(model: nn.Module, tokens: Tensor, real: Tensor) -> list[Tensor]:
    """The logits [b t n] of real tokens; those of the last tokens, from a cache."""
    whole = model(tokens, attention_mask=real).logits[real.bool()]
    out = model(tokens[1:, :-3], use_cache=True)
    steps = []
    for place in range(TOKENS - 3, TOKENS):
        cache = out.get("past_key_values", out.get("cache_params"))
        name = "past_key_values" if "past_key_values" in out else "cache_params"
        out = model(tokens[1:, place : place + 1], use_cache=True, **{name: cache})
        steps.append(out.logits)
    return [whole, torch.cat(steps, 1)]


def _gradients(model: nn.Module, tokens: Tensor) -> Tensor:
    """All weights' gradients in one vector, in training."""
    model.train()
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    model.eval()
    return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


def _generate(model: Any, tokens: Tensor, real: Tensor) -> Tensor:
    return model.generate(
        tokens, attention_mask=real, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def _error(x: Tensor, y: Tensor) -> float:
    return ((x - y).abs().max() / y.abs().max()).item()


def table(report: dict[str, Any]) -> str:
    """Return a row for each family."""
    lines = ["| family | recurrence | logits | cached | gradients | same tokens |", "| --- " * 6 + "|"]
    for name, each in report["families"].items():
        cells = [f"`{name}`", each["recurrence"]]
        cells += [f"{each[what]:.0e}" for what in ("logits", "cached", "gradients")]
        lines.append(f"| {' | '.join([*cells, 'yes' if each['same_tokens'] else '**no**'])} |")
    return "\n".join(lines)


def main() -> int:
    """Check all families, print and save the outcomes -> 1 if one of them fails."""
    parser = argparse.ArgumentParser(description="Families of transformers on lintra's CPU kernels.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    outcomes = {name: check(name) for name in FAMILIES}
    families = {
        name: {"recurrence": FAMILIES[name].recurrence, **asdict(outcome), "passed": outcome.passed}
        for name, outcome in outcomes.items()
    }
    save(
        options.out,
        command=shlex.join(["python", "-m", "benchmarks.families", *sys.argv[1:]]),
        versions={
            "lintra": lintra.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "transformers": metadata.version("transformers"),
        },
        measures=MEASURES,
        sizes={"tokens": TOKENS, "new": NEW, "logits": LOGITS, "gradients": GRADIENTS},
        families=families,
    )
    print(table({"families": families}))
    return 0 if all(outcome.passed for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

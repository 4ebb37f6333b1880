"""Run a transformers model with Qwen 3.5's layers, with and without lintra's CPU kernels.

    python examples/faster_qwen.py            about a minute
    python examples/faster_qwen.py --quick    some seconds, tiny

The layers are three gated delta nets, then softmax attention, as in the published models. The weights are
random, so nothing is downloaded. Load a model of your own with `AutoModelForCausalLM.from_pretrained`; the
one line with `lintra.accelerate` is the same.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

sys.modules["fla"] = None  # if it is installed, transformers uses its kernels, which need a GPU
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig  # noqa: E402

import lintra  # noqa: E402

PUBLISHED = {"hidden_size": 1024, "intermediate_size": 3584, "head_dim": 256}
TINY = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}


def build(quick: bool) -> Qwen3_5ForCausalLM:
    """Build the model for inference."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=4096,
        num_hidden_layers=4,  # every fourth is softmax attention
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        eos_token_id=None,
        **(TINY if quick else PUBLISHED),
    )
    return Qwen3_5ForCausalLM(config).eval()


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(call: Callable[[], object], model: Qwen3_5ForCausalLM, times: int) -> tuple[float, float]:
    """Return the median seconds of a call as transformers computes it, and accelerated, in turns."""
    before, after = [], []
    for _ in range(times + 1):
        before.append(seconds(call))
        with lintra.accelerate(model):
            after.append(seconds(call))
    return statistics.median(before[1:]), statistics.median(after[1:])  # the first ones warm up


def main() -> None:
    """Time a prompt and 32 sequences generated together, and print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args()
    model = build(options.quick)
    prompt = torch.randint(4096, (1, 64 if options.quick else 1024))
    many = torch.randint(4096, (32, 8))
    work = {
        f"a prompt of {prompt.shape[1]} tokens": lambda: model(prompt, logits_to_keep=1),
        "32 sequences, 16 tokens each": lambda: model.generate(many, max_new_tokens=16, do_sample=False),
    }
    times = 2 if options.quick else 5
    with torch.no_grad():
        with lintra.accelerate(model) as accelerated:
            print(accelerated)
        for name, call in work.items():
            before, after = compare(call, model, times)
            print(f"{name}: {before:.2f} s, with lintra {after:.2f} s, {before / after:.1f} x")


if __name__ == "__main__":
    main()

"""Tiny models of Hugging Face classes for every mechanism of the registry."""

import functools

import torch

from lintra import attention, hf

VOCABULARY = 11
LENGTH = 64  # tokens, for mechanisms that need a longest length


@functools.cache
def names(*, causal: bool) -> list[str]:
    """Return the mechanisms that can be causal, or bidirectional."""
    found = []
    for name in attention.names():
        try:
            mechanism(name).build(heads=2, dim=8, causal=causal)
        except ValueError:
            continue
        found.append(name)
    return found


def mechanism(name: str, length: int = LENGTH):
    """Return the configuration of a mechanism for sequences of up to `length` tokens."""
    return attention.for_length(attention.load(name).Config, length)


def config(name: str = "linear", length: int = LENGTH, **changes) -> hf.LintraConfig:
    """Return the configuration of two tiny layers."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.LintraConfig(**sizes | {"attention": mechanism(name, length)} | changes)


def build(name: str = "linear", kind=hf.LintraForCausalLM, dtype=torch.float64, **changes):
    """Return a model in evaluation mode, with random biases and norms so that they matter."""
    torch.manual_seed(0)
    model = kind(config(name, **changes)).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random symbols."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(rows, side):
    """Rows of different lengths as input_ids, padded with an invalid symbol, and attention_mask."""
    longest = max(map(len, rows))
    ids, mask = torch.full((2, len(rows), longest), 0)
    ids -= 1
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}

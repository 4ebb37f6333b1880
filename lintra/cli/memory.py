"""Estimate of the memory that sampling takes, before it is taken."""

import torch

from lintra.allocator import available
from lintra.attention import State, leaves
from lintra.cli.arguments import UsageError
from lintra.generation.cuda_graph import has_constant_state
from lintra.models import Decoder, Forecaster
from lintra.nn.parameters import reference_param

_MODEST = 0.9  # the part of the free memory that may be asked for: others use it too
_MADE = 4_096  # most tokens read to see how a state grows: the time is quadratic in them
_DONE = 48  # bytes per sampled token: in its batch, among all, and in a picture


def check_training(weights: int, device: torch.device) -> None:
    """Raise UsageError if so many float32 weights, their gradients and one moment of each, the least that
    training takes, would not fit in memory."""
    free, needed = available(device), 3 * 4 * weights
    if free is not None and needed > free:
        raise UsageError(
            f"{weights / 1e6:,.0f} M parameters need at least {needed / 1e9:,.1f} GB in training "
            f"and {free / 1e9:.1f} GB are free: take fewer --layers or a smaller --width"
        )


def check_batch(model: Decoder, batch: int, prompt: int, steps: int) -> None:
    """Raise UsageError if so many sequences at once would not fit in memory."""
    one, free = per_sequence(model, prompt, steps), available(reference_param(model).device)
    _check_one(one, prompt + steps, free)
    if free is not None and batch * one > _MODEST * free:
        raise UsageError(
            f"{batch:,} sequences at once need about {batch * one / 1e9:.1f} GB and {free / 1e9:.1f} GB are "
            f"free: take a --batch of at most {int(_MODEST * free / one):,}"
        )


def check_all(n: int, tokens: int) -> None:
    """Raise UsageError if n sequences of so many tokens would not fit in memory when sampled."""
    free = available(torch.device("cpu"))
    _check_one(tokens * _DONE, tokens, free)
    if free is not None and n * tokens * _DONE > _MODEST * free:
        raise UsageError(
            f"{n:,} sequences take about {n * tokens * _DONE / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: "
            f"draw at most {int(_MODEST * free / (tokens * _DONE)):,} in one go"
        )


@torch.no_grad()
def check_paths(model: Forecaster, history: torch.Tensor, horizon: int, samples: int) -> None:
    """Raise UsageError if so many paths by which each series [b t] may continue would not fit in memory."""
    free = available(reference_param(model).device)
    seen = torch.nn.functional.pad(history[:1], (0, horizon))[:, :_MADE]
    state = model.extend(seen.to(reference_param(model).device))[1]
    one = 2 * sum(x.nbytes for x in leaves(state)) + horizon * _DONE
    if free is not None and len(history) * samples * one > _MODEST * free:
        raise UsageError(
            f"{samples:,} paths of {horizon:,} rows for each of {len(history):,} series need about "
            f"{len(history) * samples * one / 1e9:,.1f} GB and {free / 1e9:.1f} GB are free: take fewer "
            "--samples, or a smaller --batch or --horizon"
        )


def _check_one(needed: int, tokens: int, free: int | None) -> None:
    if free is not None and needed > _MODEST * free:
        raise UsageError(
            f"one sequence of {tokens:,} tokens needs about {needed / 1e9:,.1f} GB and {free / 1e9:.1f} GB "
            "are free: make it shorter"
        )


@torch.no_grad()
def per_sequence(model: Decoder, prompt: int, steps: int) -> int:
    """Estimate how many bytes one more sequence takes while it is sampled: twice its state at the end (that
    before and that after a token), and the activations of the prompt or, without one, of a token.
    """
    config = model.config
    kept = _kept(model, prompt + steps) if steps else 0  # without steps, scored in parallel
    # Numbers that a token takes at once, as seen in the memory of a process: embeddings of what surrounds it
    # and queries, keys, values with their features count for 16 widths, the feed-forward part twice.
    heads = max(config.width, config.heads * config.dim)
    block = 16 * heads + 2 * config.mlp_ratio * config.width
    # Four copies of the probabilities, two of them in float64; of each component, if it is a mixture.
    symbols = 24 * config.vocabulary * getattr(config.output, "components", 1)
    return round(2 * kept + 4 * (prompt + 1) * (block + model.output.size) + symbols)


def _kept(model: Decoder, tokens: int) -> int:
    """Return the bytes of a state of so many tokens, extrapolated from fewer where there are many."""
    made = min(tokens, _MADE)
    kept = sum(x.nbytes for x in leaves(_state(model, made)))
    if made == tokens or has_constant_state(model):
        return kept
    half = sum(x.nbytes for x in leaves(_state(model, made // 2)))
    return kept + (kept - half) * (tokens - made) // (made - made // 2)


def _state(model: Decoder, tokens: int) -> State:
    """Make a state of so many tokens: only the mechanism knows how large one gets."""
    if has_constant_state(model):
        return model.start(1)
    return model.extend(torch.zeros(1, tokens, dtype=torch.int64, device=reference_param(model).device))[1]

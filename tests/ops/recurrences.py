"""Recurrences with every rule and decay: random inputs, the definition, and the values to compare."""

import torch
from torch.nn import functional

from lintra.ops import LinearState, linear_attention, recurrence_reference
from lintra.testing.laws import gradients

KINDS = {  # by name: whether there is a beta, and the decay
    "sum, feature": (False, "feature"),
    "delta": (True, None),
    "delta, head": (True, "head"),
    "delta, feature": (True, "feature"),
}


def draw(kind, b=2, t=9, h=4, g=2, d=5, e=3, *, dtype=torch.float64, seed=0):
    """q, unit keys, v, log_decay or None, beta in [0, 2] or None, and a state, all differentiable."""
    generator = torch.Generator().manual_seed(seed)
    delta, decay = KINDS[kind]
    shapes = [(b, t, h, d), (b, t, g, d), (b, t, g, e), (b, t, g, d), (b, t, g), (b, g, d, e)]
    q, k, v, rate, beta, state = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    rate = -(rate[..., 0] if decay == "head" else rate).abs()
    total = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = [x.to(dtype) for x in (q, functional.normalize(k, dim=-1), v)]
    inputs += [rate.to(total) if decay else None, (2 * beta.sigmoid()).to(total) if delta else None]
    return [None if x is None else x.requires_grad_() for x in (*inputs, state.to(total))]


def given_ones(inputs):
    return [x for x in inputs if x is not None]


def fast(q, k, v, log_decay, beta, state, **options):
    """y and kv."""
    before = None if state is None else LinearState.of(state)
    options = {"normalize": False, **options}
    y, after = linear_attention(q, k, v, log_decay=log_decay, beta=beta, state=before, **options)
    return y, after.kv


def reference(q, k, v, log_decay, beta, state):
    if log_decay is not None and log_decay.dim() == 3:
        log_decay = log_decay[..., None]
    return recurrence_reference(q, k, v, log_decay, beta, state)


def results(call, inputs):
    """y, the final state, and the gradients of an uneven sum over both."""
    y, state = call(*inputs)
    return [y, state, *gradients(torch.cat((y.flatten(), state.flatten())), given_ones(inputs))]


def of_repeated_heads(q, k, v, *others, heads):
    """The definition; those of q, k and v with fewer heads are repeated to `heads` of them."""
    return reference(*(x.repeat_interleave(max(1, heads // x.shape[2]), 2) for x in (q, k, v)), *others)


def of_packed(*inputs, bounds):
    """The definition for each sequence of a packed batch alone; outputs and states are concatenated."""
    *tokens, state = inputs
    found = [
        reference(*(None if x is None else x[:, i:j] for x in tokens), state[at : at + 1])
        for at, (i, j) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    ]
    return torch.cat([y for y, _ in found], 1), torch.cat([after for _, after in found])

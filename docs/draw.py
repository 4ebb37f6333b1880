"""Draws docs/pictures/NAME.png: the attention matrix of a mechanism, by the definition in its test file.

    python docs/draw.py [NAME ...]

The output of attention is its matrix times the values, so the values are the rows of the identity. A bar
beside every picture says what the colours mean, the same ones in all.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from lintra import attention, pictures

FOLDER = Path(__file__).parent / "pictures"
TOKENS, DIM = 64, 16

# Options that show a method on 64 tokens; the defaults for all others.
OPTIONS: dict[str, dict[str, Any]] = {
    "aft": {"window": 8, "max_length": TOKENS},
    "bigbird": {"block": 4, "random_blocks": 1},
    "clustered": {"clusters": 8, "improved": False},
    "delta": {"conv": None, "decay": False},
    "ssd": {"conv": None, "gate": False, "skip": False},
    "kda": {"conv": None, "gate": False},
    "linformer": {"rank": 8},
    "longformer": {"window": 4, "global_tokens": 2},
    "longshort": {"window": 8, "rank": 4, "segment": 8, "dual_norm": False},
    "lsh": {"rounds": 2, "chunk": 8},
    "nystromformer": {"landmarks": 8},
    "performer": {"features": 64},
}

WIPES = (12, 28, 44)  # tokens at which the gates forget everything before
PERIOD, ASKED = 8, 16  # a key comes again after PERIOD tokens; a query asks for the same key for ASKED tokens

# What else a reader has to know about the drawing.
NOTES = {
    **dict.fromkeys(
        ("delta", "kda"), f"keys come again after {PERIOD} tokens,\nqueries ask for one {ASKED} times"
    ),
    "ssd": f"tokens {WIPES[0]}, {WIPES[1]} and {WIPES[2]} take long steps,\nthe others short ones",
    "gated": f"tokens {WIPES[0]}, {WIPES[1]} and {WIPES[2]} wipe the state,\nthe others keep it",
}


def draw(name: str) -> None:
    """Draw one picture with a panel for each form that the mechanism has."""
    panels = {}
    for causal, label in ((False, "bidirectional"), (True, "causal")):
        can = attention.mechanism(name).can
        if can.causal if causal else can.bidirectional:
            weights = matrix(name, causal)
            most = np.abs(weights).max()
            notes = [f"{name}, {label}", NOTES.get(name, "")]
            if most > 1.001:  # without a denominator, outputs may be of any size
                weights, notes = weights / most, [*notes, f"divided by the largest, {most:.3g}"]
            panels["\n".join(filter(None, notes))] = weights
    pictures.matrices(FOLDER / f"{name}.png", panels, f"weight of a value, {TOKENS} tokens")


def matrix(name: str, causal: bool) -> np.ndarray:
    """Return [t t]: how much of each value (column) is in each output (row)."""
    config = attention.for_length(attention.load(name).Config, TOKENS, **OPTIONS.get(name, {}))
    torch.manual_seed(0)
    q, k = repeated_keys() if name in ("delta", "kda") else keys_and_queries()
    if name == "aft":  # each channel has its own weights: draw those of one, repeated for all channels
        q, k = (x[..., :1].expand(-1, -1, -1, TOKENS) for x in (q, k))
    shape = {"heads": 1, "dim": q.shape[3], "value_dim": TOKENS}
    mechanism = config.build(causal=causal, **shape).double().eval()
    inputs = [q, q if mechanism.shared_key else k, torch.eye(TOKENS, dtype=torch.float64)[None, :, None]]
    # Gates are open and new values are written whole; global tokens use the same projections as the others.
    known: dict[str, Any] = {"gate": 1.0, "beta": 2.0} | dict(
        zip(("global_q", "global_k", "global_v"), inputs, strict=True)
    )
    if name == "gated":
        known["decay"] = wiping(mechanism)
    if name == "ssd":
        known["dt"] = torch.full((1, TOKENS, 1), -3.0).index_fill(1, torch.tensor(WIPES), 3.0)
    for what, width in mechanism.extra_inputs().items():
        x = torch.as_tensor(known.get(what, 0.0), dtype=torch.float64)
        inputs.append(x.expand(1, TOKENS, width) if x.dim() == 0 else x.flatten(2))
    with torch.no_grad():
        return import_module(f"tests.attention.test_{name}").dense(mechanism, *inputs)[0, :, 0].numpy()


def keys_and_queries() -> tuple[torch.Tensor, torch.Tensor]:
    """A smooth random walk, so that nearby tokens are similar, as in real data."""
    generator = torch.Generator().manual_seed(0)
    walk = torch.randn(1, TOKENS, 1, DIM, generator=generator, dtype=torch.float64).cumsum(1) / 3
    walk = walk - walk.mean(1, keepdim=True)
    noise = torch.randn(walk.shape, generator=generator, dtype=torch.float64) / 3
    return walk, walk + noise


def repeated_keys() -> tuple[torch.Tensor, torch.Tensor]:
    """A few orthogonal keys in turn, and queries that ask for the same one for many tokens."""
    keys, tokens = torch.eye(PERIOD, DIM, dtype=torch.float64)[None, :, None], torch.arange(TOKENS)
    return keys[:, tokens // ASKED], keys[:, tokens % PERIOD]


def wiping(mechanism: Any) -> torch.Tensor:
    """Return [1 t r]: the inputs for which the decays are 0 at WIPES and 1 elsewhere, in all features."""
    rates = torch.full((TOKENS, DIM), 100.0, dtype=torch.float64)
    rates[list(WIPES)] = -100.0
    return torch.linalg.solve(mechanism.weight[0], (rates - mechanism.bias).mT).mT[None]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=attention.names())
    for each in parser.parse_args().names:
        draw(each)

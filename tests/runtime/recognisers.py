"""Recognisers of every kind that the runtime serves: every kind of input, and each mechanism."""

import numpy as np
import torch

from lintra.attention import delta, gated, kda, linear, retention, rfa, softmax, ssd
from lintra.audio import features
from lintra.audio.symbols import Symbols
from lintra.models import ctc, encoder

READ = features.Config(rate=8_000, bins=10)
GIVEN = features.Config(kind="given", bins=5)
CHARACTERS = Symbols("character", (" ", "a", "é", "日"))
WORDS = Symbols("word", ("one", "two", "three"))
PHONEMES = Symbols("phoneme", ("W", "AH", "N"), (("one", ("W", "AH", "N")),))

RECOGNISERS = {  # settings of the encoder, and of the recogniser around it
    "four to one": ({}, {}),
    "two to one": ({"attention": retention.Config(), "position": "rotary"}, {"subsample": 2}),
    "frames as they are": ({"inputs": 5}, {"subsample": 1, "features": GIVEN}),
    "post": ({"norm": "post", "norm_kind": "rms", "activation": "swiglu"}, {"features": GIVEN}),
    "concatenated": ({"position": "concatenated", "width": 32, "heads": 2}, {"symbols": WORDS}),
    "learned": ({"position": "learned", "max_length": 9, "inputs": 1}, {"symbols": PHONEMES}),
    "rfa": ({"attention": rfa.Config(features=10, gate=True), "position": "none"}, {"subsample": 2}),
    "gated": ({"attention": gated.Config(rank=5)}, {}),
    "delta": (
        {"attention": delta.Config(), "norm_kind": "rms", "activation": "swiglu", "position": "none"},
        {"subsample": 2},
    ),
    "kda": (
        {"attention": kda.Config(rank=3), "head_dim": 10, "inputs": 5},
        {"subsample": 1, "features": GIVEN},
    ),
    "ssd": (
        {"attention": ssd.Config(), "mlp_ratio": 0.0, "position": "rotary"},
        {"symbols": PHONEMES, "subsample": 2},
    ),
    "convolved": ({"conv": 3, "qk_norm": "l2", "output_gate": True, "position": "concatenated"}, {}),
    "softmax": ({"attention": softmax.Config(), "position": "rotary"}, {"features": GIVEN, "subsample": 2}),
    "hybrid": ({"attention": (gated.Config(rank=5), softmax.Config(window=3))}, {"subsample": 2}),
    "wide": ({"inputs": 40}, {"features": features.Config(rate=8_000, bins=3, shift_ms=25.0)}),
}


def build(kind="four to one", **changes):
    """In evaluation mode, with random weights and statistics, and with symbols that vary."""
    torch.manual_seed(0)
    of_encoder, around = RECOGNISERS[kind]
    shape = {"inputs": 12, "layers": 2, "heads": 3, "width": 36, "causal": True} | of_encoder
    part = encoder.Config(**{"attention": linear.Config()} | shape)
    options = {"symbols": CHARACTERS, "features": READ, "normalize": "global", "encoder": part}
    model = ctc.Config(**options | around | changes).build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.head.weight.mul_(5)
        if model.config.normalize == "global":
            model.fit_statistics(frames(model, 100))
    return model


def frames(model, count, seed=0):
    """Input frames [t i] for the model, around 3."""
    draw = np.random.default_rng(seed).standard_normal
    return (3 + 2 * draw((count, model.config.features.bins))).astype(np.float32)


def noise(samples, seed=0):
    """Alternately loud and quiet noise."""
    generator = np.random.default_rng(seed)
    loudness = np.repeat(generator.uniform(0.001, 0.5, samples // 400 + 1), 400)[:samples]
    return (loudness * generator.uniform(-1, 1, samples)).astype(np.float32)

"""Decoders of every kind that the runtime serves, small and with biases and norms that matter."""

import torch

from lintra.attention import linear, retention, rfa
from lintra.models import decoder
from lintra.nn import LogisticMixture

LENGTH = 20  # positions, where they are bounded

KINDS = {
    "plain": {},
    "post": {"norm": "post", "final_norm": True},
    "post, no last norm": {"norm": "post", "norm_kind": "rms", "feed_kind": "swiglu"},
    "rms": {"norm_kind": "rms"},
    "swiglu": {"feed_kind": "swiglu", "feed": 3.0},
    "kv_heads": {"heads": 6, "kv_heads": 2, "width": 24},
    "one key head": {"heads": 4, "kv_heads": 1, "width": 64},
    "relu": {"attention": linear.Config(feature_map=linear.Relu())},
    "squared relu": {"attention": linear.Config(feature_map=linear.SquaredRelu())},
    "identity": {"attention": linear.Config(feature_map=linear.Identity(), normalize=False)},
    "not normalised": {"attention": linear.Config(normalize=False)},
    "context": {"context": (1, 4), "position": "grid", "grid": (5, 4)},
    "three axes": {"context": (3, 1, 9), "position": "grid", "grid": (2, 5, 2), "start": True},
    "learned": {"position": "learned", "max_length": LENGTH, "embed": "value"},
    "nowhere": {"position": "none", "start": False},
    "rotary": {"position": "rotary", "heads": 2, "width": 24},
    "retention": {
        "attention": retention.Config(),
        "position": "rotary",
        "heads": 4,
        "kv_heads": 2,
        "width": 48,
    },
    "bare retention": {"attention": retention.Config(gate=False, normalize_heads=False, fastest=0.5)},
    "rfa": {
        "attention": rfa.Config(features=10, gate=True, gate_bias=1.0),
        "heads": 4,
        "kv_heads": 2,
        "width": 40,
    },
    "rfa, no gate": {"attention": rfa.Config(features=24, learn_sigma=False, den_eps=0.2)},  # far from 0 / 0
    "arccos": {
        "attention": rfa.Config(features=24, kernel="arccos"),
        "position": "rotary",
        "heads": 2,
        "width": 24,
    },
    "mixture": {
        "output": LogisticMixture(components=3),
        "position": "concatenated",
        "norm": "post",
        "heads": 2,
        "width": 128,
    },
    "one": {"heads": 1, "width": 1, "position": "none", "feed": 1.0, "layers": 1, "vocabulary": 1},
}


def build(**changes):
    """In evaluation mode, not as initialised."""
    torch.manual_seed(0)
    options = {"vocabulary": 5, "layers": 2, "heads": 3, "width": 36} | changes
    model = decoder.Config(**options).build().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model

"""Decoders of every kind that the runtime serves: `tests.kinds.build` makes them."""

from lintra.attention import linear, retention, rfa
from lintra.nn import LogisticMixture
from tests import kinds

KINDS = kinds.KINDS | {
    "squared relu": {"attention": linear.Config(feature_map=linear.SquaredRelu())},
    "identity": {"attention": linear.Config(feature_map=linear.Identity(), normalize=False)},
    "three axes": {"context": (3, 1, 9), "position": "grid", "grid": (2, 5, 2), "start": True},
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
    "retention by key-value heads": {
        "attention": retention.Config(decay_per="kv_head"),
        "heads": 4,
        "kv_heads": 2,
        "width": 48,
    },
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
    "one": {"heads": 1, "width": 1, "position": "none", "mlp_ratio": 1.0, "layers": 1, "vocabulary": 1},
}

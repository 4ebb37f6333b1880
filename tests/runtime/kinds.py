"""Decoders of every kind that the runtime serves: `tests.kinds.build` makes them."""

from lintra.attention import delta, gated, kda, linear, retention, rfa, ssd
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
    "gated": {"attention": gated.Config(rank=5, temperature=2.0), "width": 48},
    "gated, rotary": {
        "attention": gated.Config(rank=16, value_heads=4),
        "position": "rotary",
        "heads": 4,
        "kv_heads": 2,
        "width": 48,
    },
    "delta": {"attention": delta.Config(), "norm_kind": "rms", "activation": "swiglu", "position": "none"},
    "delta, no decay": {
        "attention": delta.Config(decay=False, conv=1, gate=False, negative_eigenvalues=True)
    },
    "delta, shared keys": {
        "attention": delta.Config(conv=3, value_heads=4),
        "position": "rotary",
        "heads": 2,
        "kv_heads": 1,
        "width": 40,
    },
    "delta, no convolution": {"attention": delta.Config(conv=None), "head_dim": 10},
    "kda": {"attention": kda.Config(), "norm_kind": "rms", "position": "none"},
    "kda, low rank": {
        "attention": kda.Config(rank=3, negative_eigenvalues=True, conv=5),
        "heads": 4,
        "kv_heads": 2,
        "width": 32,
        "head_dim": 18,
    },
    "kda, no gate": {"attention": kda.Config(gate=False, conv=None), "position": "rotary"},
    "ssd": {"attention": ssd.Config(), "norm_kind": "rms", "mlp_ratio": 0.0, "position": "none"},
    "ssd, value heads": {
        "attention": ssd.Config(value_heads=4, gate=False),
        "heads": 1,
        "width": 24,
        "head_dim": 12,
        "position": "rotary",
    },
    "ssd, no skip": {"attention": ssd.Config(skip=False, conv=None), "norm": "post"},
    "convolved linear": {"conv": 4, "qk_norm": "l2", "output_gate": True, "context": (1,)},
    "convolved retention": {
        "attention": retention.Config(gate=False, normalize_heads=False, value_heads=6),
        "conv": 2,
        "output_gate": True,
        "position": "rotary",
    },
    "convolved rfa": {
        "attention": rfa.Config(features=10, gate=True, den_eps=0.2),
        "conv": 4,
        "qk_norm": "l2",
        "position": "rotary",
        "head_dim": 14,
    },
    "one": {"heads": 1, "width": 1, "position": "none", "mlp_ratio": 1.0, "layers": 1, "vocabulary": 1},
}

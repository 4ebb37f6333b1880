"""The functions of the stand-in, each paired with FLA's recurrence in plain PyTorch and float32."""

import importlib.util
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest
import torch
from torch.nn import functional

try:
    FLA = distribution("fla-core")
except PackageNotFoundError:
    pytest.skip("fla-core is not installed (pip install -e '.[dev]')", allow_module_level=True)

HEADS, WIDTH, VALUE_WIDTH = 2, 8, 12


def function(path):
    """A function of the stand-in, such as "gla.chunk_gla"."""
    module, name = path.rsplit(".", 1)
    return getattr(import_module(f"lintra.compat.fla.ops.{module}"), name)


@cache
def naive(op, name):
    """A reference of FLA, read from its file, since the package around it requires a GPU."""
    spec = importlib.util.spec_from_file_location(f"fla_{op}", FLA.locate_file(f"fla/ops/{op}/naive.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def log_retention(x):
    return (1 - 2.0 ** (-5 - torch.arange(HEADS))).log().expand(x.shape[:3])


def log_lightning(x):
    return (-8 / HEADS * (1 - 1 / 4) * torch.arange(HEADS)).expand(x.shape[:3])


def linear(q, k, v, state):
    call = naive("linear_attn", "naive_recurrent_linear_attn")
    return call(q, k, v, initial_state=state, output_final_state=True)


def simple(q, k, v, g, state):
    return naive("simple_gla", "naive_recurrent_simple_gla")(q, k, v, g, initial_state=state)


def gla(q, k, v, g, state):
    return naive("gla", "naive_recurrent_gla")(q, k, v, g, initial_state=state, output_final_state=True)


def delta(q, k, v, beta, state):
    q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
    y, state = naive("delta_rule", "delta_rule_recurrence")(q, k, v, beta, initial_state=state)
    return y.transpose(1, 2), state


def gated_delta(q, k, v, g, beta, state):
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    call = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    return call(q, k, v, beta, g, initial_state=state, output_final_state=True)


def kda(q, k, v, g, beta, state):
    call = naive("kda", "naive_recurrent_kda")
    return call(q, k, v, g, beta, initial_state=state, output_final_state=True)


def retention(q, k, v, state):
    return simple(q, k, v, log_retention(q), state)


def lightning(q, k, v, state):
    return simple(q, k, v, log_lightning(q), state)


@dataclass
class Case:
    """A function, its arguments beside q, k and v by name with their kinds, and its oracle."""

    path: str
    oracle: Any
    extra: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    grouped: bool = False  # more value heads than key heads

    def __post_init__(self):
        self.function = function(self.path)

    def draw(self, dtype=torch.float32, *, values=HEADS, t=50, b=2):
        """q, k, v, the other arguments and a state, all differentiable."""
        generator = torch.Generator().manual_seed(0)
        shapes = {"heads": (values,), "features": (values, WIDTH), "beta": (values,)}
        drawn = [
            torch.randn(b, t, *shape, generator=generator)
            for shape in ((HEADS, WIDTH), (HEADS, WIDTH), (values, VALUE_WIDTH))
        ]
        drawn[1] = functional.normalize(drawn[1], dim=-1)
        for kind in self.extra.values():
            x = torch.randn(b, t, *shapes[kind], generator=generator)
            drawn.append(x.sigmoid() if kind == "beta" else -x.abs())
        drawn.append(torch.randn(b, values, WIDTH, VALUE_WIDTH, generator=generator))
        return [x.to(dtype).requires_grad_() for x in drawn]

    def __call__(self, q, k, v, *others, **options):
        """o and the final state of the stand-in; the last of `others` is the initial state."""
        *extra, state = others
        given = dict(zip(self.extra, extra, strict=True)) | self.options
        given = {"initial_state": state, "output_final_state": True} | given | options
        return self.function(q, k, v, **given)


DECAY = {"g": "heads"}
DELTA = {"beta": "beta"}
LAYER = {"layer_idx": 1, "num_layers": 4}
CASES = [
    Case("linear_attn.chunk_linear_attn", linear, {}, {"normalize": False}),
    Case("linear_attn.fused_chunk_linear_attn", linear, {}, {"normalize": False}),
    Case("linear_attn.fused_recurrent_linear_attn", linear),
    Case("simple_gla.chunk_simple_gla", simple, DECAY),
    Case("simple_gla.fused_chunk_simple_gla", simple, DECAY),
    Case("simple_gla.fused_recurrent_simple_gla", simple, DECAY),
    Case("gla.chunk_gla", gla, {"g": "features"}),
    Case("gla.fused_recurrent_gla", gla, {"gk": "features"}),
    Case("retention.chunk_retention", retention),
    Case("retention.fused_chunk_retention", retention),
    Case("retention.fused_recurrent_retention", retention),
    Case("lightning_attn.chunk_lightning_attn", lightning, {}, LAYER),
    Case("lightning_attn.fused_recurrent_lightning_attn", lightning, {}, LAYER),
    Case("delta_rule.chunk_delta_rule", delta, DELTA),
    Case("delta_rule.fused_recurrent_delta_rule", delta, DELTA),
    Case("gated_delta_rule.chunk_gated_delta_rule", gated_delta, DECAY | DELTA, grouped=True),
    Case("gated_delta_rule.fused_recurrent_gated_delta_rule", gated_delta, DECAY | DELTA, grouped=True),
    Case("kda.chunk_kda", kda, {"g": "features"} | DELTA, grouped=True),
    Case("kda.fused_recurrent_kda", kda, {"g": "features"} | DELTA, grouped=True),
]
BY_NAME = {case.path.split(".")[1]: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=BY_NAME)
# One function for each recurrence: the others share its implementation.
RULES = ["chunk_linear_attn", "chunk_simple_gla", "chunk_gla", "chunk_delta_rule", "chunk_gdn", "chunk_kda"]
every_rule = pytest.mark.parametrize(
    "case", [BY_NAME[name.replace("gdn", "gated_delta_rule")] for name in RULES], ids=RULES
)

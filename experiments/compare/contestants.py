"""Who is compared: mechanisms with their options, and feature maps with states of equal size."""

import dataclasses
from collections.abc import Callable
from typing import Any

from experiments.compare.problems import Problem
from lintra import attention
from lintra.attention import linear

_LENGTH = object()  # stands for the number of tokens of the problem
_SUMMED = 8  # numbers per head if the features are a second-order expansion


def _same(width: int) -> dict[str, Any]:
    return {}


def _half(width: int) -> dict[str, Any]:
    """Half as many heads, for maps to twice as many features as a head has numbers."""
    return {"heads": width // 64, "head_dim": 32}


def _expanded(width: int) -> dict[str, Any]:
    """As many small heads as hold about as many numbers as w/32 heads of 32 x 32 hold, 32 w."""
    size = linear.Taylor2().size(_SUMMED) * _SUMMED
    return {"heads": round(32 * width / size), "head_dim": _SUMMED}


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One row of a table: a mechanism, its options, and heads that give it a state of the common size."""

    name: str
    mechanism: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    heads: Callable[[int], dict[str, Any]] = _same  # width -> fields of the model's Config
    conv: int | None = None  # tokens of the network's convolution, which makes it causal; None: the problem's

    def model(self, problem: Problem) -> Any:
        """Return the Config of its network for a problem."""
        length = problem.task(None).build().length
        options = {name: length if value is _LENGTH else value for name, value in self.options.items()}
        config = attention.for_length(attention.load(self.mechanism).Config, length, **options)
        network = self.heads(problem.width)
        if self.conv is not None:
            network |= {"conv": self.conv} if problem.causal else {"conv": self.conv, "causal": True}
        return problem.model(config, network)

    def obstacle(self, problem: Problem) -> str | None:
        """Return why it takes no part in a problem, None if it does."""
        if problem.causal and not attention.mechanism(self.mechanism).can.causal:
            return "has no causal form"
        config = attention.load(self.mechanism).Config
        own = self.options.get("conv", getattr(config, "conv", None))
        if (own or self.conv) is not None and problem.network.get("conv") is not None:
            return "has a convolution, and so has the network"
        return None


def _map(name: str, map_of: Any, heads: Callable[[int], dict[str, Any]] = _same) -> Contestant:
    return Contestant(f"linear-{name}", "linear", {"feature_map": map_of}, heads)


CONTESTANTS = (
    Contestant("deltanet-reflecting", "delta", {"conv": None, "decay": False, "negative_eigenvalues": True}),
    Contestant("deltanet", "delta", {"conv": None, "decay": False}),
    Contestant("softmax", "softmax"),
    Contestant("linear", "linear"),
    Contestant("gated", "gated"),
    Contestant("retention", "retention"),
    Contestant("delta", "delta", {"conv": None}),
    Contestant("delta-reflecting", "delta", {"conv": None, "negative_eigenvalues": True}),
    Contestant("kda", "kda", {"conv": None}),
    Contestant("kda-reflecting", "kda", {"conv": None, "negative_eigenvalues": True}),
    Contestant("ssd", "ssd", {"conv": None}),
    Contestant("delta-convolved", "delta"),
    Contestant("softmax-convolved", "softmax", conv=4),
    Contestant("linear-convolved", "linear", conv=4),
    _map("relu", linear.Relu()),
    _map("squared-relu", linear.SquaredRelu()),
    _map("hedgehog", linear.Hedgehog(), _half),
    _map("dpfp", linear.Dpfp(), _half),
    _map("taylor", linear.Taylor2(), _expanded),
    # eps: the default when the first of its trials were made
    Contestant("performer", "performer", {"features": 32, "redraw_every": 100, "eps": 1e-20}),
    Contestant("rfa", "rfa"),
    Contestant("rfa-gated", "rfa", {"gate": True}),
    Contestant("cosformer", "cosformer"),
    Contestant("aft", "aft", {"window": 16, "max_length": _LENGTH}),
    Contestant("longformer", "longformer", {"window": 16}),
    Contestant("longshort", "longshort", {"window": 16, "rank": 8}),
    Contestant("bigbird", "bigbird", {"block": 16}),
    Contestant("lsh", "lsh", {"chunk": 16, "rounds": 4, "redraw_every": None}),
    Contestant("clustered", "clustered", {"clusters": 64, "redraw_every": None}),
    Contestant("linformer", "linformer", {"rank": 128}),
    Contestant("nystromformer", "nystromformer", {"landmarks": 32}),
)
BY_NAME = {contestant.name: contestant for contestant in CONTESTANTS}
# Of the study of feature maps, FAVOR+ being Performer's; all have about the same number of state entries.
MAPS = (
    "linear",
    "linear-relu",
    "linear-squared-relu",
    "linear-hedgehog",
    "linear-taylor",
    "linear-dpfp",
    "performer",
)

"""A case, a mechanism in one configuration and mode, and what laws do with one."""

# Laws call with lists of inputs, whose lengths no type knows.
# pyright: reportCallIssue=false, reportArgumentType=false

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import Attention, Capabilities, leaves
from lintra.ops.rope import RotaryEmbedding

BATCH, TIME, DIM, VALUE_DIM = 2, 19, 6, 4
EXACT: dict[str, Any] = {
    "rtol": 1e-9,
    "atol": 1e-11,
}  # float64; sums of about 1e2 terms taken in another order


@dataclass(frozen=True)
class Case:
    """One mechanism in one configuration and mode."""

    name: str
    config: Any
    causal: bool
    heads: int = 4
    kv_heads: int = 2
    rotary: bool = False
    value_dim: int = VALUE_DIM
    time: int = TIME
    batch: int = BATCH
    dim: int = DIM
    seed: int = 0

    def __str__(self) -> str:
        mode = "causal" if self.causal else "bidirectional"
        return f"{self.name}-{mode}{'-rotary' if self.rotary else ''}-{self.config}".replace(" ", "")

    def build(self, **shape) -> Attention:
        """Return the mechanism with the same initial values each time; the global generator is restored."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim, "value_dim": self.value_dim}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.config.build(causal=self.causal, **sizes | shape).double()

    def possible(self) -> bool:
        """Return whether this mode can be built; what cannot is refused with a ValueError."""
        try:
            attention = self.build()
        except ValueError:
            return False
        return not self.rotary or attention.rope_dim > 0

    def draw(
        self, time: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> list[Tensor]:
        """q, k, v and what else the mechanism reads [b t width], in its order."""
        time = self.time if time is None else time
        generator = torch.Generator().manual_seed(self.seed + seed)
        attention = self.build()
        shapes = [(self.heads, self.dim), (self.kv_heads, self.dim), (attention.value_heads, self.value_dim)]
        shapes += [(width,) for width in extra_inputs(self).values()]
        sampled = [
            torch.randn(self.batch, time, *shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in shapes
        ]
        if attention.shared_key:
            sampled[1] = sampled[0].clone()
        return [x.requires_grad_() for x in sampled]

    def fits(self, time: int) -> bool:
        """Return whether sequences of that length go."""
        longest = getattr(self.config, "max_length", None)
        return longest is None or longest >= time

    def sized(self, time: int) -> int:
        """A length that a law names, or the longest there is where the case is a small one."""
        return time if self.time >= TIME else min(time, self.time)

    def masks(self) -> list[Tensor]:
        """`some_masks` of its sizes."""
        return some_masks(self.time, self.batch)

    def rope(self, first: int, time: int, mask: Tensor | None = None) -> RotaryEmbedding | None:
        if not self.rotary:
            return None
        here = torch.ones(self.batch, time, dtype=torch.bool) if mask is None else mask
        return RotaryEmbedding(first + here.cumsum(1) - 1, 100.0)


@cache
def can(case: Case) -> Capabilities:
    """Return what the mechanism declares in this configuration."""
    return case.build().can


@cache
def extra_inputs(case: Case) -> dict[str, int]:
    """Return what the mechanism takes beyond q, k, v: name -> width."""
    return case.build().extra_inputs()


@cache
def outputs(case: Case) -> tuple[int, int]:
    """Return the heads of y and their width."""
    attention = case.build()
    return attention.out_heads, attention.value_dim


def always(case: Case) -> bool:
    return True


def recurrent(case: Case) -> bool:
    return keeps_state(case) and not can(case).lookahead


def keeps_state(case: Case) -> bool:
    return case.causal and can(case).recurrent


def cross(case: Case) -> bool:
    return not case.causal and not case.rotary and can(case).cross


def linear_cost(case: Case) -> bool:
    return (
        "t^2" not in can(case).cost and getattr(case.config, "impl", None) != "reference" and not case.rotary
    )


def long(case: Case) -> bool:
    """65,536 tokens are too many for what is quadratic; then 16 queries of all of them are looked at."""
    if case.causal:
        return linear_cost(case) and can(case).state == "constant"
    return cross(case) and not can(case).joint_queries and case.fits(65_536)


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a sum of y with fixed, unequal weights."""
    found = torch.autograd.grad(weighted(y), inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def weighted(y: Tensor) -> Tensor:
    return (y * torch.arange(1, y.numel() + 1, dtype=y.dtype, device=y.device).sin().reshape(y.shape)).sum()


def raises(kind: type[Exception], pattern: str, call: Callable[..., object], *args, **options) -> None:
    """Assert that a call raises an exception of this kind, whose text has the pattern in it."""
    try:
        call(*args, **options)
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
    assert re.search(pattern, said), f"another message: {said}"


def same_states(one: object, other: object) -> None:
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert_close(a, b, **EXACT)


def some_masks(time: int = TIME, batch: int = BATCH) -> list[Tensor]:
    """Padding at the right, at the left, holes; never the whole of a sample."""
    places, some, few = torch.arange(time), min(5, time - 1), min(3, time)
    holes = torch.rand(batch, time, generator=torch.Generator().manual_seed(3)) > 0.4
    holes[:, time // 2] = True
    return [
        torch.stack((places < time - some, places < few))[torch.arange(batch) % 2],
        torch.stack((places >= some, places >= time - few))[torch.arange(batch) % 2],
        holes,
    ]


def among(x: Tensor, i: int, neighbour: float) -> Tensor:
    """Return x with all samples but number i full of a number."""
    others = torch.arange(len(x), device=x.device) != i
    return torch.where(others.reshape(-1, *[1] * (x.dim() - 1)), neighbour, x)


def forward(case: Case, attention: Attention, *inputs: Tensor, mask=None) -> Tensor:
    q, k, v, *rest = inputs
    named = dict(zip(extra_inputs(case), rest, strict=True))
    return attention(q, k, v, mask=mask, rope=case.rope(0, q.shape[1], mask), **named)


def extend(
    case: Case, attention: Attention, inputs: list[Tensor], state, mask=None, rope=None, stepped: bool = False
):
    """`extend`, or `extend_by_steps`."""
    q, k, v, *rest = inputs
    named = dict(zip(extra_inputs(case), rest, strict=True))
    call = partial(extend_by_steps, attention) if stepped else attention.extend
    return call(q, k, v, state, mask=mask, rope=rope, **named)


def extend_by_steps(attention: Attention, *args, **options):
    """`extend` by the loop over the recurrence that the base class has."""
    with patch.object(attention, "_extend", partial(Attention._extend, attention)):
        return attention.extend(*args, **options)

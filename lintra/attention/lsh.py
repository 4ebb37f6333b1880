"""LSH attention: Kitaev et al. 2020, "Reformer", arXiv:2001.04451, section 2.

Queries and keys are one vector u, keys at length 1. A random hash puts vectors of similar direction in one
bucket; the tokens are sorted by bucket and cut into chunks of m, and a query attends to its own chunk and
those beside it. With P_i^r the keys that round r = 1, 2, ... lets query i see, and P_i their union,

    y_i = sum_{j in P_i} exp(s u_i . u_j / |u_j|) v_j / sum_{j in P_i} exp(s u_i . u_j / |u_j|)

which is computed round by round (appendix A): each key counts 1 / (the number of rounds that see it), and the
rounds are joined by their log-sum-exps. j = i is left out unless nothing else is seen, or with `see_self`.

Cost of t tokens: 2 t m (d + e) multiplications and additions a head and round, t d c for the hash (c up to
64 columns by default), and a sort. The state keeps u, v and the buckets of every token.

A causal query reads no later token. But tokens are sorted all together, so later ones may push an earlier key
out of a query's sight: the outputs of a sequence are not those of its prefixes, and generating token by token
gives each token the output that the last token of the sequence so far has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lintra.attention._scores import ScoredAttention
from lintra.attention._state import append
from lintra.attention.base import Capabilities
from lintra.config import fields
from lintra.ops import lsh
from lintra.ops.layout import Layout

LEVELS = range(1, 13)  # up to 2^12 buckets: 131,072 tokens in chunks of 64, more tokens a bucket beyond


@dataclass(frozen=True, kw_only=True)
class Config:
    """LSH attention (Reformer)."""

    # Models from before hashes were redrawn kept their first ones.
    ABSENT: ClassVar = {"redraw_every": None}

    rounds: int = 2  # hashes, each with its own sort
    chunk: int = 64  # tokens per chunk of the sorted sequence
    buckets: int | None = None  # of a round, a power of two; None: up to 2 a chunk of real tokens
    look_back: int = 1  # chunks a query sees before its own
    look_ahead: int = 0  # chunks it sees after its own
    wrap: bool = True  # the chunk before the first is the last one of the round
    across_buckets: bool = True  # False: a query sees only keys of its own bucket
    see_self: bool = False  # a token's own key is one like any other; else only where it sees nothing else
    exact_union: bool = True  # each key counts once; False: as often as rounds see it
    scale: float = 1.0  # multiplies the scores; no unit
    dropout: float = 0.0  # probability of dropping a weight in training
    redraw_every: int | None = 1  # training steps with one set of hashes, by lintra.train or
    # `attention.redraw`; None: the first one stays
    seed: int = 0  # of the first set

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, rounds=1, chunk=1, look_back=0, look_ahead=0, redraw_every=1)
        if self.buckets is not None and not (2 <= self.buckets <= 2**14 and self.buckets.bit_count() == 1):
            raise ValueError(f"buckets must be a power of two from 2 to {2**14}, got {self.buckets}")
        fields.finite(self, "scale")
        fields.probability(self, "dropout")

    def build(self, **shape) -> "LshAttention":
        return LshAttention(self, **shape)


def highest_level(time: int, chunk: int) -> int:
    """Return how many buckets sequences of `time` tokens get, 2 a chunk, as the power of two below."""
    return min(max(1, (2 * time // chunk).bit_length() - 1), LEVELS[-1])


class LshState(NamedTuple):
    """u [b s h d], v [b s h e] in the dtype they came in; bucket [b s h r l] for each number of buckets there
    may be; real [b s]."""

    u: Tensor
    v: Tensor
    bucket: Tensor
    real: Tensor


class LshAttention(ScoredAttention):
    """LSH attention. State: everything so far, with its buckets."""

    paper = "Kitaev et al. 2020, arXiv:2001.04451"
    shared_key = True
    can = Capabilities(
        causal=True,
        bidirectional=True,
        cross=False,
        recurrent=True,
        state="grows",
        cost="O(t log t + t d)",
        lookahead=True,
    )

    rotations: Tensor  # [h rounds hashes d columns]

    def __init__(self, config: Config, **shape):
        super().__init__(config, **shape)
        self.levels = list(LEVELS) if config.buckets is None else [config.buckets.bit_length() - 1]
        self.pattern = lsh.Pattern(
            causal=self.causal,
            chunk=config.chunk,
            look_back=config.look_back,
            look_ahead=config.look_ahead,
            wrap=config.wrap,
            across_buckets=config.across_buckets,
            see_self=config.see_self,
        )
        sizes = [lsh.columns(level) for level in self.levels]
        self.shape = (self.heads, config.rounds, max(map(len, sizes)), self.dim, max(map(max, sizes)))
        sampled = self._draw(torch.Generator(device="cpu").manual_seed(config.seed))
        self._register_buffers(rotations=sampled)

    def redraw(self, generator: torch.Generator) -> None:
        """New hashes, between sequences: the keys in a state keep the buckets they were put into."""
        self.rotations.copy_(self._draw(generator))

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **_: Any) -> Tensor:
        levels = self._levels(q.shape[1], layout.mask)
        return self._attend(lsh.lsh_attention, self._hash(q, v, layout, levels), levels)

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LshState:
        ids = (self.heads, self.config.rounds, len(self.levels))
        return LshState(
            torch.empty(batch, 0, self.heads, self.dim, device=device, dtype=dtype),
            torch.empty(batch, 0, self.heads, self.value_dim, device=device, dtype=dtype),
            torch.empty(batch, 0, *ids, device=device, dtype=torch.int16),
            torch.empty(batch, 0, device=device, dtype=torch.bool),
        )

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LshState, layout: Layout, **_: Any
    ) -> tuple[Tensor, LshState]:
        """The new tokens get what `forward` over everything so far gives them."""
        after = append(state, self._hash(q, v, layout, self.levels))
        if q.shape[1] == 1:
            return self._attend(lsh.lsh_attention_newest, after, self.levels), after
        y = self._attend(lsh.lsh_attention, after, self.levels)
        return y[:, state.u.shape[1] :], after

    def _step(self, q: Tensor, k: Tensor, v: Tensor, state: LshState, **_: Any) -> tuple[Tensor, LshState]:
        """One token: sorted among those so far, it attends to its chunks. The paper has no recurrence."""
        return LshAttention._extend(self, q, k, v, state, Layout(q.shape[0], 1, q.device))

    def _draw(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.shape, generator=generator, device="cpu", dtype=torch.float64)

    def _hash(self, u: Tensor, v: Tensor, layout: Layout, levels: list[int]) -> LshState:
        """Tokens with their buckets. Gradients go through q: k is the same vector."""
        return LshState(u, v, lsh.buckets(u, self.rotations, levels), layout.real(u))

    def _attend(self, attention: Callable[..., Tensor], tokens: LshState, levels: list[int]) -> Tensor:
        sizes = 2 ** torch.tensor(levels, device=tokens.u.device)
        enough = sizes * self.config.chunk <= 2 * tokens.real.sum(1, keepdim=True)
        level = (enough.sum(1).clamp(min=1) - 1)[:, None, None, None, None]
        return attention(
            tokens.u,
            tokens.v,
            tokens.bucket.take_along_dim(level, 4)[..., 0],
            self.pattern,
            mask=tokens.real,
            exact_union=self.config.exact_union,
            **self.weighing(),
        )

    def _levels(self, time: int, mask: Tensor | None) -> list[int]:
        """The numbers of buckets, as powers of two, that sequences of `time` tokens less padding may need."""
        if self.config.buckets is not None:
            return self.levels
        highest = highest_level(time, self.config.chunk)
        return list(range(1 if mask is not None else highest, highest + 1))

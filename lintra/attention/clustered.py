"""Clustered attention: Vyas et al. 2020, "Fast transformers with clustered attention", arXiv:2007.04825.

Queries that are near each other attend alike: by proposition 1 their weights differ by at most their distance
times the norm of K. They are put into clusters (a sign hash of each, then Lloyd's algorithm on the hashes),
and the mean q^c of the queries of cluster c attends for all of them, section 3.2:

    A^c = softmax(s q^c K^T)      y_i = A^c V

Improved clustered attention, section 3.3, looks again at the keys T_c with the largest weights in A^c: there
each member i distributes their total weight itself, elsewhere it keeps A^c,

    A_il = (sum_{l in T_c} A^c_l) exp(s q_i . k_l) / sum_{l in T_c} exp(s q_i . k_l)   for l in T_c

which is never further from softmax in the sum of absolute differences. Clusters and T_c are constants:
gradients go through q^c, q_i, k and v.

Each bit of a hash is the side of a random plane, with a standard normal bias as in the authors' code: planes
through 0 would tell directions alone, and put queries of one direction and any length into one cluster.

Cost of t queries and s keys: t n (d + 10 c) multiplications and additions a head for n-bit hashes and 10
iterations, c s (d + e), and improved t k (d + e) for k keys a cluster. There is no causal form: clusters and
keys are chosen from all of the sequence.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from lintra.attention._scores import ScoredAttention, TokenMemory
from lintra.attention.base import Capabilities
from lintra.config import fields
from lintra.ops import clustering
from lintra.ops.autocast import no_autocast
from lintra.ops.blocks import block_attention
from lintra.ops.checks import sum_dtype
from lintra.ops.layout import Layout
from lintra.ops.padding import connected_zeros, real_tokens

BLOCK = 16  # fewest queries of a cluster to a block, unless they look at fewer keys


@dataclass(frozen=True, kw_only=True)
class Config:
    """Clustered attention."""

    # Models from before the hash was redrawn kept their first one, whose planes went through 0.
    ABSENT: ClassVar = {"redraw_every": None, "hash_bias": False}

    clusters: int = 100  # of the queries of a sequence, for each head
    bits: int = 63  # of a query's hash
    hash_bias: bool = True  # planes of the hash lie beside 0, so that lengths count; else directions alone
    iterations: int = 10  # of Lloyd's algorithm
    improved: bool = True  # every query attends itself to the keys its cluster finds most important
    topk: int = 32  # number of those keys
    scale: float | None = None  # multiplies the scores; no unit; None: (size of a head) ** -0.5
    dropout: float = 0.0  # probability of dropping a weight in training
    redraw_every: int | None = 1  # training steps with one hash and first centroids, by lintra.train or
    # `attention.redraw`; None: they stay
    seed: int = 0  # of the first hash and centroids

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, clusters=1, bits=1, iterations=0, topk=1, redraw_every=1)
        fields.together(self, "topk", improved=True)
        fields.finite(self, "scale")
        fields.probability(self, "dropout")

    def build(self, **shape) -> "ClusteredAttention":
        return ClusteredAttention(self, **shape)


class ClusteredAttention(ScoredAttention):
    """Clustered attention. Every call clusters the queries it is given."""

    paper = "Vyas et al. 2020, arXiv:2007.04825"
    can = Capabilities(
        causal=False,
        bidirectional=True,
        cross=True,
        recurrent=False,
        state="none",
        cost="O(t c d)",
        joint_queries=True,
    )
    planes: Tensor  # [h n d]
    bias: Tensor | None  # [h n], of the planes
    draws: Tensor  # [h c], which query of a run is a first centroid; integers, so that no dtype changes them

    def __init__(self, config: Config, *, causal: bool, **shape):
        if causal:
            raise ValueError(
                f"clustered attention ({self.paper}) has no causal form: which queries share a cluster and "
                "which keys it looks at depends on later tokens, got causal=True"
            )
        super().__init__(config, causal=causal, **shape)
        generator = torch.Generator(device="cpu").manual_seed(config.seed)
        planes, draws, bias = self._draw(generator)
        self._register_buffers(planes=planes, draws=draws, bias=bias if config.hash_bias else None)

    def redraw(self, generator: torch.Generator) -> None:
        for buffer, sampled in zip((self.planes, self.draws, self.bias), self._draw(generator), strict=True):
            if buffer is not None:
                buffer.copy_(sampled)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **_: Any) -> Tensor:
        return self._attend(q, k, v, layout.mask, layout.mask)

    def _cross_attend(self, q: Tensor, memory: TokenMemory, layout: Layout) -> Tensor:
        return self._attend(q, *memory[:2], layout.mask, memory.real)

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Planes, draws and the bias, which is sampled last: a seed gives the same planes without it."""
        size = (self.heads, self.config.bits, self.dim)
        planes = torch.randn(size, generator=generator, device="cpu", dtype=torch.float64)
        draws = torch.randint(2**31, (self.heads, self.config.clusters), generator=generator, device="cpu")
        bias = torch.randn(size[:2], generator=generator, device="cpu", dtype=torch.float64)
        return planes, draws, bias

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, real: Tensor | None) -> Tensor:
        """Queries q [b t h d] with their mask [b t], keys and values with theirs, real [b s]."""
        config = self.config
        if q.numel() == 0 or v.numel() == 0:
            return connected_zeros((*q.shape[:3], self.value_dim), q, k, v)
        codes = clustering.sign_codes(q, self.planes, self.bias)
        cluster = clustering.cluster(codes, self.draws, iterations=config.iterations, mask=mask)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = self._scores(self._means(q, cluster, mask), k)
        if real is None:
            weights = scores.softmax(-1)
        else:
            some = real.any(-1, keepdim=True)
            scores = scores.masked_fill((some & ~real)[:, None, None], -math.inf)
            weights = scores.softmax(-1).masked_fill(~some[:, None, None], 0.0)
        if not config.improved:
            return _of_cluster(self._values(weights, v), cluster).transpose(1, 2).to(v.dtype)
        top = scores.detach().topk(min(config.topk, scores.shape[3]), sorted=False).indices
        mass = weights.gather(3, top).sum(-1, keepdim=True)
        rest = self._values(weights.scatter(3, top, 0.0), v)
        y = _of_cluster(mass, cluster) * self._exact(q, k, v, cluster, top, real)
        return (y + _of_cluster(rest, cluster)).transpose(1, 2).to(v.dtype)

    def _means(self, q: Tensor, cluster: Tensor, mask: Tensor | None) -> Tensor:
        """The mean query [b h c d] of each cluster; 0 for an empty one."""
        members = functional.pad(q.to(sum_dtype(q.dtype)), (0, 1), value=1.0)  # the last column counts
        if mask is not None:
            members = members * mask[:, None, :, None]
        sums = clustering.member_sums(members, cluster, self.config.clusters)
        return sums[..., :-1] / sums[..., -1:].clamp(min=1)

    def _scores(self, centre: Tensor, k: Tensor) -> Tensor:
        """s q . k [b h c s] for queries [b h c d] and keys [b g s d]."""
        together = (centre * self.scale).unflatten(1, (self.kv_heads, -1)).flatten(2, 3)
        with no_autocast(k):
            return (together @ k.to(centre.dtype).mT).unflatten(2, (-1, centre.shape[2])).flatten(1, 2)

    def _values(self, weights: Tensor, v: Tensor) -> Tensor:
        """weights [b h c s] times v [b g s e] -> [b h c e]."""
        if self.config.dropout and self.training:
            weights = functional.dropout(weights, self.config.dropout)
        together = weights.unflatten(1, (self.kv_heads, -1)).flatten(2, 3)
        with no_autocast(v):
            y = together @ v.to(weights.dtype)
        return y.unflatten(2, (-1, weights.shape[2])).flatten(1, 2)

    def _exact(
        self, q: Tensor, k: Tensor, v: Tensor, cluster: Tensor, top: Tensor, real: Tensor | None
    ) -> Tensor:
        """Softmax attention [b h t e] of each query to the keys `top` [b h c k] of its cluster."""
        clusters, time = self.config.clusters, q.shape[2]
        # The keys of a cluster are a few blocks of as many places as those of its queries.
        per_cluster = max(1, top.shape[3] // max(BLOCK, time // clusters))
        size = -(-top.shape[3] // per_cluster)
        blocks = clustering.Blocks.of(cluster, clusters, size)
        added = per_cluster * size - top.shape[3]
        seen = None
        if real is not None or added:
            known = real_tokens(real, v.transpose(1, 2))[:, None, None].expand(*top.shape[:3], -1)
            seen = functional.pad(known.gather(3, top), (0, added)).flatten(0, 1).flatten(1)
        top = functional.pad(top, (0, added))
        rows = _of_cluster(q, blocks.member.flatten(2))
        keys, values = (_keys(x, top, self.group).flatten(2, 3) for x in (k, v))
        entries = blocks.cluster[..., None] * per_cluster + torch.arange(per_cluster, device=top.device)
        entries = entries.flatten(0, 1)[:, None]
        rows, keys, values = (x.flatten(0, 1)[:, :, None] for x in (rows, keys, values))
        y = block_attention(
            rows,
            keys,
            values,
            entries,
            torch.ones_like(entries[:1], dtype=torch.bool),
            block=size,
            visible=seen,
            **self.weighing(),
        )
        return _of_cluster(y[:, :, 0].unflatten(0, cluster.shape[:2]), blocks.place)


def _of_cluster(x: Tensor, cluster: Tensor) -> Tensor:
    """x [b h c e] for the cluster of each token [b h t] -> [b h t e]."""
    first = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1) * x.shape[2]
    return x.flatten(0, 2).index_select(0, (first + cluster).flatten()).view(*cluster.shape, x.shape[3])


def _keys(x: Tensor, top: Tensor, group: int) -> Tensor:
    """x [b g s d] at the places top [b h c k] -> [b h c k d]."""
    return _of_cluster(x, top.unflatten(1, (-1, group)).flatten(2)).reshape(*top.shape, x.shape[3])

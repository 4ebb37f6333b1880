"""Clustered queries that look only at the keys their cluster finds most important, and only back.

Which keys these are depends on the whole sequence, as in the library: nothing later reaches an
output, but later tokens may change what earlier ones look at. A query whose keys are all later gets 0.
"""

import torch
from torch import Tensor

from lintra.attention import clustered
from lintra.compat.fast_transformers._inner import InnerAttention, Real
from lintra.compat.fast_transformers.attention.improved_clustered_attention import (
    IMPROVED,
    ImprovedClusteredAttention,
)
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry
from lintra.ops import clustering
from lintra.ops.autocast import no_autocast
from lintra.ops.checks import sum_dtype
from lintra.ops.padding import real_tokens
from lintra.ops.softmax_attention import softmax_attention


class ImprovedClusteredCausalAttention(ImprovedClusteredAttention):
    """The `topk` keys of a query's cluster, of them those up to its own place; memory grows by l topk e."""

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        if q.shape[1] == k.shape[1] == 1:  # causal and bidirectional masks are then the same
            return self._causal(q, k, v, real)
        return InnerAttention._bidirectional(self, q, k, v, real)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        hashes = self._mechanism(clustered.Config, q, v, causal=False, **self._options())
        assert isinstance(hashes, clustered.ClusteredAttention)
        codes = clustering.sign_codes(q, hashes.planes, hashes.bias)
        cluster = clustering.cluster(codes, hashes.draws, iterations=self.iterations, mask=real.q)  # [b h t]
        known = real_tokens(real.k, k)
        q, k, v = (x.movedim(1, 2) for x in (q, k, v))
        with torch.no_grad(), no_autocast(q):
            # The sum over a cluster ranks keys as its mean does.
            wide = q.to(sum_dtype(q.dtype))
            total = torch.zeros_like(wide[:, :, :1]).repeat(1, 1, self.clusters, 1)
            total.scatter_add_(2, cluster[..., None].expand_as(wide), wide)
            scores = (total @ k.to(wide.dtype).mT).masked_fill(~known[:, None, None], -torch.inf)
            top = scores.topk(min(self.topk, k.shape[2]), -1).indices  # [b h c k]
            top = top.gather(2, cluster[..., None].expand(-1, -1, -1, top.shape[3]))  # [b h t k]
            seen = known[:, None, None].expand(*top.shape[:3], -1).gather(3, top)
            visible = seen & (top <= torch.arange(q.shape[2], device=q.device)[:, None])
        keys, values = (
            x.gather(2, top.flatten(2)[..., None].expand(-1, -1, -1, x.shape[3])).unflatten(2, top.shape[2:])
            for x in (k, v)
        )
        partial = softmax_attention(
            q[..., None, :],
            keys,
            values,
            visible=visible[..., None, :],
            **self._weighing(),
        )
        return partial.o[..., 0, :].movedim(1, 2).to(v.dtype)


for name in ("causal-improved-clustered", "improved-causal"):  # the second is what it is called here besides
    AttentionRegistry.register(name, ImprovedClusteredCausalAttention, IMPROVED)

"""An attention free transformer: Zhai et al. 2021, arXiv:2105.14103.

No query meets a key: each channel takes a mean of its values, weighted by its own keys and by a number for
every pair of places, and the query only gates what comes out (equation 2):

    y_t = sigmoid(q_t) * sum_s exp(k_s + w_ts) * v_s / sum_s exp(k_s + w_ts)

AFT-simple has w = 0: running sums, with the largest key so far of each channel (ops/running.py). AFT-local
learns w_ts for places nearer than `window` and takes 0 for the others, which still count: a block reads those
in and beside it by a product of matrices, and the sum of all others (ops/near_far.py).

Cost of t tokens: 3 t d a head; with a window w about 6 t w d more. State of AFT-simple: 3 d numbers.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lintra.attention.base import Attention, Capabilities, Exchange
from lintra.config import fields
from lintra.config.fields import spelled
from lintra.ops import checks
from lintra.ops.autocast import widened
from lintra.ops.layout import Layout
from lintra.ops.near_far import near_and_far
from lintra.ops.padding import connected_zeros
from lintra.ops.running import ExpSums, no_sums, running_sums, total_sums
from lintra.ops.state import State, map_state


@dataclass(frozen=True, kw_only=True)
class Config:
    """Attention free transformer."""

    window: int | None = None  # places nearer than this have weights of their own; None: AFT-simple
    max_length: int | None = None  # tokens, padding included, for which those weights are learned
    rank: int | None = None  # w is a product of two matrices with this many columns; None: a table

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, window=1, max_length=1, rank=1)
        if (self.window is None) != (self.max_length is None):
            raise ValueError(
                f"window and max_length go together, got window={self.window}, max_length={self.max_length}"
            )
        if self.window is None and self.rank is not None:
            raise ValueError(f"rank needs a window, got rank={self.rank} and window=None")

    def build(self, **shape) -> "AttentionFree":
        return AttentionFree(self, **shape)


class AttentionFree(Attention):
    """AFT-simple and AFT-local. State of the former: `ExpSums` [b g d]."""

    paper = "Zhai et al. 2021, arXiv:2105.14103"
    memory = ExpSums
    can = Capabilities(
        causal=True, bidirectional=True, cross=True, recurrent=True, state="constant", cost="O(t d)"
    )

    def __init__(self, config: Config, **shape):
        if config.window is not None:
            self.can = replace(self.can, cross=False, recurrent=False, state="none", cost="O(t w d)")
        super().__init__(config, **shape)
        self.rope_dim = 0
        if self.dim != self.value_dim:
            raise ValueError(
                f"attention {self.name!r} weighs each channel of v by its own of q and k: value_dim must be "
                f"dim={self.dim}, got {self.value_dim}"
            )
        if config.window is None or config.max_length is None:
            return
        seen = config.window if self.causal else 2 * config.window - 1
        if config.rank is None:
            self.bias = nn.Parameter(0.01 * torch.randn(config.max_length, seen))
        else:
            # A product of two has the spread of one table: 0.01 = sqrt(rank) * spread^2.
            spread = 0.1 * config.rank**-0.25
            self.query_bias = nn.Parameter(spread * torch.randn(config.max_length, config.rank))
            self.key_bias = nn.Parameter(spread * torch.randn(config.max_length, config.rank))

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **_: Any) -> Tensor:
        if self.config.window is not None:
            return self._local(q, k, v, layout)
        if self.causal:
            return super()._forward(q, k, v, layout)
        return self._gate(q, self._encode_memory(k, v, layout).mean()[:, None])

    def exchange(self) -> Exchange | None:
        return "scan" if self.can.recurrent else None

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ExpSums:
        if not self.can.recurrent:
            raise ValueError(f"attention {self.name!r} has no recurrent form with {spelled(self.config)}")
        dtype = checks.sum_dtype(dtype or torch.get_default_dtype())
        return no_sums(batch, self.kv_heads, self.dim, device=device, dtype=dtype)

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: ExpSums, layout: Layout, **_: Any
    ) -> tuple[Tensor, ExpSums]:
        if not q.shape[1]:
            return connected_zeros(q.shape, q, k, v), map_state(torch.clone, state)
        k, v = widened(k, v)
        state = state if layout.shard is None else self._sums_before(k, v, state, layout)
        sums = running_sums(k, v, layout.mask, state)
        # Views would keep the sums of all tokens as long as the state is kept.
        return self._gate(q, sums.mean()), ExpSums(*(x[:, -1].clone() for x in sums))

    def _sums_before(self, k: Tensor, v: Tensor, state: ExpSums, layout: Layout) -> ExpSums:
        """The sums of the shards on earlier ranks, all times exp of the largest key that they have."""
        assert layout.shard is not None
        total = total_sums(k, v, layout.mask)
        earlier = layout.shard.gather(total.highest)
        before = torch.stack((state.highest, *earlier)).amax(0)
        highest = torch.maximum(before, total.highest)

        def own(transition: bool) -> tuple[Tensor, Tensor | None]:
            added = (
                torch.stack((total.numerator, total.denominator), -1)
                * (total.highest - highest).exp()[..., None]
            )
            return added, (before - highest).exp() if transition else None

        like = torch.stack((state.numerator, state.denominator), -1)
        sums = layout.shard.state(like, tuple(state.highest.shape), own)
        return ExpSums(sums[..., 0], sums[..., 1], before)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, state: ExpSums, **_: Any) -> tuple[Tensor, ExpSums]:
        """Add one token to both sums: the reference of `extend`."""
        k, v = (x[:, 0] for x in widened(k, v))
        highest = torch.maximum(state.highest, k.detach())
        kept, weight = (state.highest - highest).exp(), (k - highest).exp()
        after = ExpSums(kept * state.numerator + weight * v, kept * state.denominator + weight, highest)
        return self._gate(q, after.mean()[:, None]), after

    def check_memory(self, memory: State, q: Tensor) -> None:
        """Raise as the base class does, and unless the memory has this mechanism's heads and widths."""
        super().check_memory(memory, q)
        checks.parts("memory", memory, ExpSums, ("b g d",) * 3, self.sizes())

    def _encode_memory(self, k: Tensor, v: Tensor, layout: Layout) -> ExpSums:
        k, v = widened(k, v)
        return total_sums(k, v, layout.mask)

    def _cross_attend(self, q: Tensor, memory: ExpSums, layout: Layout) -> Tensor:
        return self._gate(q, memory.mean()[:, None])

    def _gate(self, q: Tensor, mean: Tensor) -> Tensor:
        """sigmoid(q) times the mean [b t g d] of its key-value head."""
        return (widened(q)[0].sigmoid() * mean.repeat_interleave(self.group, 2)).to(q.dtype)

    def _local(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """The weighted values where places count from the first token: real ones come first."""
        config, left = self.config, layout.left_align()
        if q.shape[1] > config.max_length:
            raise ValueError(
                f"attention {self.name!r} has weights for max_length={config.max_length} tokens, got "
                f"t={q.shape[1]}"
            )
        if not q.shape[1]:
            return connected_zeros(q.shape, *self.parameters(), q, k, v)
        if left is not None:
            q, k, v = (left.gather(x) for x in (q, k, v))
        k, v = widened(k, v)
        names = ("bias",) if config.rank is None else ("query_bias", "key_bias")
        learned = [getattr(self, name)[: k.shape[1]].to(k.dtype) for name in names]
        mask = None if left is None else left.mask
        means = near_and_far(k, v, learned, mask, window=config.window, causal=self.causal).mean()
        y = self._gate(q, means)
        return y if left is None else left.restore(y)

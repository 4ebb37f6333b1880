"""An attention free transformer: Zhai et al. 2021, arXiv:2105.14103.

No query meets a key: each channel takes a mean of its values, weighted by its own keys and by a number for
every pair of places, and the query only gates what comes out (equation 2):

    y_t = sigmoid(q_t) * sum_s exp(k_s + w_ts) * v_s / sum_s exp(k_s + w_ts)

AFT-simple has w = 0: sums that are carried along, with the largest key so far of each channel
(ops/running.py). AFT-local learns w_ts for places nearer than `window` and takes 0 beyond, where the sum goes
on: outside the band it is again a running sum, inside a product of matrices by blocks (ops/near_far.py).

Cost of t tokens: 3 t d a head; with a window w of them 2 t w d more. State of AFT-simple: 3 d numbers.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lintra import fields
from lintra.attention.base import Attention, Capabilities
from lintra.ops import checks
from lintra.ops.autocast import no_autocast, widened
from lintra.ops.near_far import near_and_far
from lintra.ops.padding import LeftAlign, zero_padding
from lintra.ops.rope import RotaryEmbedding
from lintra.ops.running import ExpSums, no_sums, running_sums, total_sums


@dataclass(frozen=True, kw_only=True)
class Config:
    """Attention free transformer."""

    window: int | None = None  # places nearer than this have weights of their own; None: AFT-simple
    max_length: int | None = None  # tokens, padding included, that such weights are learned for
    rank: int | None = None  # w is a product of two matrices with so many columns; None: a table

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

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> Tensor:
        self.check_rope(rope)
        self.check(q, k, v, mask)
        if self.config.window is not None:
            return self._local(q, k, v, mask)
        if self.causal:
            return super().forward(q, k, v, mask=mask)
        (q,) = zero_padding(mask, q)
        return zero_padding(mask, self._gate(q, self._totals(k, v, mask).mean()[:, None]))[0]

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ExpSums:
        if self.config.window is not None:
            return super().start(batch)
        dtype = checks.sum_dtype(dtype or torch.get_default_dtype())
        return no_sums(batch, self.kv_heads, self.dim, device=device, dtype=dtype)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ExpSums,
        *,
        mask: Tensor | None = None,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[Tensor, ExpSums]:
        self._check_recurrent(rope)
        self.check(q, k, v, mask)
        self.check_causal()
        self.check_sums(state, ExpSums, ("b g d",) * 3, q)
        if not q.shape[1]:
            return torch.zeros_like(q), state
        q, k, v = zero_padding(mask, q, k, v)
        k, v = widened(k, v)
        sums = running_sums(k, v, mask, state)
        y = zero_padding(mask, self._gate(q, sums.mean()))[0]
        return y, ExpSums(*(x[:, -1].clone() for x in sums))  # views would keep the whole line

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, state: ExpSums, *, rope: RotaryEmbedding | None = None
    ) -> tuple[Tensor, ExpSums]:
        """One token more in both sums: the reference of `extend`."""
        self._check_recurrent(rope)
        self.check_step(q, k, v, state)
        k, v = (x[:, 0] for x in widened(k, v))
        highest = torch.maximum(state.highest, k.detach())
        kept, weight = (state.highest - highest).exp(), (k - highest).exp()
        after = ExpSums(kept * state.numerator + weight * v, kept * state.denominator + weight, highest)
        return self._gate(q, after.mean()[:, None]), after

    def encode_memory(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> ExpSums:
        self.check_cross()
        self.check(None, k, v, mask)
        return self._totals(k, v, mask)

    def cross_attend(self, q: Tensor, memory: ExpSums, mask: Tensor | None = None) -> Tensor:
        self.check_cross_attend(q, memory, ExpSums, mask)
        (q,) = zero_padding(mask, q)
        return zero_padding(mask, self._gate(q, memory.mean()[:, None]))[0]

    def _totals(self, k: Tensor, v: Tensor, mask: Tensor | None) -> ExpSums:
        k, v = widened(*zero_padding(mask, k, v))
        return total_sums(k, v, mask)

    def _gate(self, q: Tensor, mean: Tensor) -> Tensor:
        """sigmoid(q) times the mean [b t g d] of its key-value head."""
        return (widened(q)[0].sigmoid() * mean.repeat_interleave(self.group, 2)).to(q.dtype)

    def _local(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[1] > self.config.max_length:
            raise ValueError(
                f"attention {self.name!r} has weights for max_length={self.config.max_length} tokens, "
                f"got t={q.shape[1]}"
            )
        if mask is None:
            return self._gate(q, self._mean(k, v, None))
        packed = LeftAlign.of(mask)
        q, k, v = (packed.gather(x) for x in (q, k, v))
        return packed.restore(self._gate(q, self._mean(k, v, packed.mask)))

    def _mean(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The weighted values where places count from the first token: real ones come first."""
        k, v = widened(k, v)
        names = ("bias",) if self.config.rank is None else ("query_bias", "key_bias")
        learned = [getattr(self, name)[: k.shape[1]].to(k.dtype) for name in names]
        with no_autocast(k):
            return near_and_far(k, v, learned, mask, window=self.config.window, causal=self.causal).mean()

    def _check_recurrent(self, rope: RotaryEmbedding | None) -> None:
        self.check_rope(rope)
        if not self.can.recurrent:
            raise NotImplementedError(f"attention {self.name!r} has no recurrent form with {self.config}")

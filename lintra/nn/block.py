"""One layer of a transformer: a mechanism, then a feed-forward, each with a residual and a norm."""

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor, nn

from lintra.attention._base import zero_padding
from lintra.nn.feed import Feed
from lintra.nn.heads import Heads, HeadsState
from lintra.ops import _check

NormPlace = Literal["pre", "post"]
NormKind = Literal["layer", "rms"]


def build_norm(kind: NormKind, width: int) -> nn.Module:
    """LayerNorm (Ba et al. 2016, arXiv:1607.06450) or RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    if kind not in ("layer", "rms"):
        raise ValueError(f"norm_kind must be 'layer' or 'rms', got {kind!r}")
    return nn.LayerNorm(width) if kind == "layer" else nn.RMSNorm(width, eps=1e-6)


class Block(nn.Module):
    """x [b t c] -> [b t c] through `mix` and `feed`.

    norm "pre": x + mix(norm x), then x + feed(norm x). "post": norm(x + mix x), then norm(x + feed x), as in
    the papers before 2020. With a mask, padded places give 0.
    """

    def __init__(
        self,
        mix: Heads,
        feed: Feed,
        *,
        width: int,
        norm: NormPlace = "pre",
        norm_kind: NormKind = "layer",
        dropout: float = 0.0,
    ):
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
        self.pre, self.width = norm == "pre", width
        self.mix, self.feed = mix, feed
        self.norm_mix, self.norm_feed = build_norm(norm_kind, width), build_norm(norm_kind, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "b t c"], *, mask: Bool[Tensor, "b t"] | None = None, **given: Tensor
    ) -> Float[Tensor, "b t c"]:
        """A whole sequence; `given` is what the mechanism takes at each call, such as a `global_mask`."""
        _check.activations(x, mask, self.width)
        (x,) = zero_padding(mask, x)
        return self._rest(x, self.mix(self._enter(x), mask=mask, **given), mask)

    def start(self, batch: int) -> HeadsState:
        """The state before any token."""
        return self.mix.start(batch)

    def extend(
        self,
        x: Float[Tensor, "b t c"],
        state: HeadsState | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t c"], HeadsState]:
        """Any number of tokens after `state` (None: before any token)."""
        _check.activations(x, mask, self.width)
        (x,) = zero_padding(mask, x)
        mixed, after = self.mix.extend(self._enter(x), state, mask=mask)
        return self._rest(x, mixed, mask), after

    def _enter(self, x: Tensor) -> Tensor:
        return self.norm_mix(x) if self.pre else x

    def _rest(self, x: Tensor, mixed: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(mixed)
        if self.pre:
            x = x + self.dropout(self.feed(self.norm_feed(x)))
        else:
            x = self.norm_mix(x)
            x = self.norm_feed(x + self.dropout(self.feed(x)))
        return zero_padding(mask, x)[0]

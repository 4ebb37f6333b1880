"""A network that reads a whole sequence, of symbols or features, and says something of it or of each token.

    tokens [b t] or features [b t i] -> x [b t c] -> blocks -> norm -> pooled or per token -> [b o] or [b t o]

Bidirectional where the mechanism can be. With a mask, sequences of different lengths make a batch in which
each gives what it gives alone; with `cu_seqlens` [n+1] they make a row without padding, [1 t] or [1 t i], and
predictions are [n o] or [1 t o]. Causal and without a pool it also reads piece by piece, with `extend`.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lintra.attention import AttentionConfig, State, linear
from lintra.legacy import renamed_arguments
from lintra.models import _io
from lintra.models._io import EncoderIOConfig
from lintra.models.base import TransformerBase, TransformerConfig, blocks
from lintra.nn.mask import warn_if_inverted
from lintra.nn.parameters import reference_param
from lintra.ops.layout import CuSeqlens, Layout


@renamed_arguments(feed="mlp_ratio", feed_kind="activation")
@dataclass(frozen=True, kw_only=True)
class Config(EncoderIOConfig, TransformerConfig):
    """An encoder of any mechanism."""

    attention: AttentionConfig = field(default_factory=linear.Config)
    causal: bool | None = None  # None: bidirectional where the mechanism can be

    def __post_init__(self):
        TransformerConfig.__post_init__(self)
        EncoderIOConfig.__post_init__(self)

    def build(self) -> "Encoder":
        return Encoder(self)


class EncoderState(NamedTuple):
    """seen [b]: real tokens so far; layers: the state of each block."""

    seen: Tensor
    layers: tuple[State, ...]


class Encoder(TransformerBase):
    """tokens [b t] or features [b t i] -> predictions [b o], or [b t o] without a pool."""

    def __init__(self, config: Config):
        causal = _causal(config)
        embedding = _io.input_embedding(config, config.embedded)
        super().__init__(config, embedding, blocks(config, config.attention, causal=causal))
        self.causal = causal
        self.head = _io.head(config, config.width)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "m *t o"]:
        """`extra` is what the mechanism takes at each call, such as a `global_mask`."""
        layout = _io.input_layout(self.config, x, mask, cu_seqlens)
        return _io.predict(self.config.pool, self.head, self._hidden(x, layout, extra), layout)

    def hidden(
        self,
        x: Tensor,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "b t c"]:
        """Return the hidden vector of each token, before any prediction; 0 in padded places."""
        return self.read(x, mask=mask, cu_seqlens=cu_seqlens, **extra)[0]

    def read(
        self, x: Tensor, *, mask: Tensor | None, cu_seqlens: CuSeqlens | None, **extra: Tensor
    ) -> tuple[Tensor, Layout]:
        """Return what `hidden` does, and the layout of it."""
        layout = _io.input_layout(self.config, x, mask, cu_seqlens)
        return self._hidden(x, layout, extra), layout

    def check_input(self, x: Tensor, mask: Bool[Tensor, "b t"] | None = None) -> None:
        """Raise ValueError or TypeError unless the encoder can read x with this mask."""
        layout = _io.input_layout(self.config, x, mask, None)
        _io.checked(self.config, self.embedding, x, layout)

    def _hidden(self, x: Tensor, layout: Layout, extra: dict[str, Tensor]) -> Tensor:
        warn_if_inverted(layout.mask)
        x = self._embed(x, layout)
        run = self.block_runner()
        for block in self.blocks:
            x = run(block, x, layout=layout, **extra)
        return layout.zero(self.norm(layout.zero(x)))

    def _embed(self, x: Tensor, layout: Layout) -> Tensor:
        """Return what goes into the first block; 0 in padded places."""
        x = self.embedding(_io.checked(self.config, self.embedding, x, layout))
        return layout.zero(self.add_positions(x, layout))

    def start(self, batch: int) -> EncoderState:
        """The state before any token. Raises ValueError unless the encoder is causal and has no pool."""
        if not self.causal:
            raise ValueError("extend needs an encoder that sees no future: build it with causal=True")
        if self.config.pool is not None:
            raise ValueError(
                f"extend predicts for each token, so pool must be None, got {self.config.pool!r}"
            )
        seen = torch.zeros(batch, dtype=torch.int64, device=reference_param(self).device)
        return EncoderState(seen, tuple(block.start(batch) for block in self.blocks))

    def extend(
        self,
        x: Tensor,
        state: EncoderState | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        **extra: Tensor,
    ) -> tuple[Float[Tensor, "b t o"], EncoderState]:
        """Predictions for any number of tokens after `state` (None: before any), as of the whole sequence;
        `extra` is of these tokens.

        Raises what `start` does, and ValueError for a state of another model or batch. With attention "lsh",
        where later tokens decide which earlier ones are seen, the two differ.
        """
        layout = _io.input_layout(self.config, x, mask, cu_seqlens)
        state = self.start(layout.n) if state is None else state
        self.check_state(state, EncoderState, layout.n, "x")
        layout = layout.after(state.seen)
        hidden, layers = self.run_blocks(self._embed(x, layout), state.layers, layout, **extra)
        y = _io.predict(None, self.head, hidden, layout)
        return y, EncoderState(layout.seen_after(), layers)


def _causal(config: Config) -> bool:
    if config.causal is not None:
        return config.causal
    shape: dict[str, Any] = {
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "dim": config.width // config.heads,
    }
    try:
        with torch.device("meta"):
            config.attention.build(causal=False, **shape)
    except ValueError:
        return True  # or wrong altogether: then building the blocks says why
    return False

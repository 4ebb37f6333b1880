"""A network that reads a whole sequence, of symbols or features, and predicts for it or for each token.

    tokens [b t] or features [b t i] -> x [b t c] -> blocks -> norm -> pooled or per token -> [b o] or [b t o]

Bidirectional where the mechanism can be, or by causal layers of which every second reads from the end
(`alternating`: Alkin et al. 2024, arXiv:2406.04303). With a mask, sequences of different lengths form a batch
in which each has the output it has alone. With `cu_seqlens` [n+1] they form a row without padding, [1 t] or
[1 t i], and predictions are [n o] or [1 t o]. A causal encoder without a pool also reads piece by piece, with
`extend`.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lintra.attention import State
from lintra.config import fields
from lintra.legacy import renamed_arguments, renamed_attributes
from lintra.models import _io
from lintra.models._io import EncoderIOConfig
from lintra.models.base import TransformerBase, TransformerConfig, build_blocks
from lintra.nn.block import build_norm
from lintra.nn.mask import warn_if_inverted
from lintra.nn.parameters import reference_param
from lintra.ops import checks
from lintra.ops.layout import CuSeqlens, Layout

HeadActivation = Literal["gelu", "gelu_tanh", "relu", "tanh"]


@renamed_arguments(feed="mlp_ratio", feed_kind="activation")
@dataclass(frozen=True, kw_only=True)
class Config(EncoderIOConfig, TransformerConfig):
    """An encoder of any mechanism, or of several."""

    causal: bool | None = None  # None: bidirectional where all mechanisms with their options can be
    alternating: bool = False  # causal layers, of which every second of each mechanism reads from the end
    token_types: int | None = None  # kinds of tokens, each with an embedding that is added; None: one kind
    embedding_norm: bool = False  # a norm before the first block
    head_activation: HeadActivation | None = None  # of a hidden layer before the outputs; None: no such layer
    head_norm: bool = False  # a norm after that activation

    def __post_init__(self):
        TransformerConfig.__post_init__(self)
        EncoderIOConfig.__post_init__(self)
        fields.at_least(self, token_types=1)
        if self.alternating and (self.causal or self.layers < 2 * len(self.mechanisms)):
            raise ValueError(
                "alternating layers read in both directions: they can be neither causal nor streaming, and "
                f"of each mechanism there are 2 or more, got causal={self.causal}, layers={self.layers} and "
                f"{len(self.mechanisms)} in attention"
            )
        if self.head_activation is not None and self.outputs is None:
            raise ValueError(f"head_activation needs outputs, got {self.head_activation!r} without")
        if self.head_norm and self.head_activation is None:
            raise ValueError("head_norm comes after head_activation, which is None")

    def causal_arguments(self) -> str:
        """Return the arguments that make this encoder causal, for messages."""
        return "alternating=False and causal=True" if self.alternating else "causal=True"

    def build(self) -> "Encoder":
        return Encoder(self)


class EncoderState(NamedTuple):
    """seen [b]: real tokens so far; layers: the state of each block."""

    seen: Tensor
    layers: tuple[State, ...]


@renamed_attributes(read="encode")
class Encoder(TransformerBase):
    """tokens [b t] or features [b t i] -> predictions [b o], or [b t o] without a pool."""

    def __init__(self, config: Config):
        causal = _causal(config)
        embedding = _io.input_embedding(config, config.embedded)
        if causal and config.pool == "first":
            raise ValueError("the first token of a causal encoder sees no other: take pool='last' or 'mean'")
        super().__init__(config, embedding, build_blocks(config, causal=causal or config.alternating))
        self.causal = causal
        self.token_types = (
            None if config.token_types is None else nn.Embedding(config.token_types, config.width)
        )
        self.embedding_norm = nn.Identity()
        if config.embedding_norm:
            self.embedding_norm = build_norm(config.norm_kind, config.width, config.norm_eps)
        self.head = _head(config)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "m *t o"]:
        """Return predictions [b o], or [b t o] without a pool.

        `extra`: inputs of the mechanism at each call, such as a `global_mask`, and `token_types` [b t] of
        an encoder that has them; None: all are of type 0."""
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
        return self.encode(x, mask=mask, cu_seqlens=cu_seqlens, **extra)[0]

    def encode(
        self, x: Tensor, *, mask: Tensor | None, cu_seqlens: CuSeqlens | None, **extra: Tensor
    ) -> tuple[Tensor, Layout]:
        """Return what `hidden` does, and its layout."""
        layout = _io.input_layout(self.config, x, mask, cu_seqlens)
        return self._hidden(x, layout, extra), layout

    def check_input(self, x: Tensor, mask: Bool[Tensor, "b t"] | None = None) -> None:
        """Raise ValueError or TypeError unless the encoder can read x with this mask."""
        layout = _io.input_layout(self.config, x, mask, None)
        _io.validate_input(self.config, self.embedding, x, layout)

    def _hidden(self, x: Tensor, layout: Layout, extra: dict[str, Tensor]) -> Tensor:
        warn_if_inverted(layout.mask)
        x = self._embed(x, layout, extra.pop("token_types", None))
        run = self.block_runner()
        for number, block in enumerate(self.blocks):
            own = self.extra_of(block, extra)
            if self.config.alternating and number // len(self.config.mechanisms) % 2:
                own = {name: _flipped(each) for name, each in own.items()}
                x = run(block, x.flip(1), layout=layout.reversed(), **own).flip(1)
            else:
                x = run(block, x, layout=layout, **own)
        return layout.zero(self.norm(layout.zero(x)))

    def _embed(self, x: Tensor, layout: Layout, token_types: Int[Tensor, "b t"] | None) -> Tensor:
        """Return what goes into the first block; 0 in padded places."""
        x = self.embedding(_io.validate_input(self.config, self.embedding, x, layout))
        x = self.add_positions(x, layout)
        if self.token_types is not None:
            if token_types is None:
                token_types = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
            checks.shape("token_types", token_types, "b t", {"b": x.shape[0], "t": x.shape[1]})
            token_types = layout.zero(token_types)
            checks.symbols("token_types", token_types, self.token_types.num_embeddings - 1)
            x = x + self.token_types(token_types)
        elif token_types is not None:
            raise TypeError("token_types needs an encoder of a configuration that says how many there are")
        return layout.zero(self.embedding_norm(x))

    def start(self, batch: int, *, device: torch.device | str | None = None) -> EncoderState:
        """Return the state before any token, on a device (None: that of the weights).

        Raises ValueError unless the encoder is causal and has no pool."""
        if not self.causal:
            raise ValueError(
                f"extend needs an encoder that sees no future: build it with {self.config.causal_arguments()}"
            )
        if self.config.pool is not None:
            raise ValueError(
                f"extend predicts for each token, so pool must be None, got {self.config.pool!r}"
            )
        device = reference_param(self).device if device is None else device
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        return EncoderState(seen, tuple(block.start(batch, device=device) for block in self.blocks))

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
        state = self.start(layout.n, device=layout.device) if state is None else state
        self.check_state(state, EncoderState, layout.n, "x")
        layout = layout.after(state.seen)
        x = self._embed(x, layout, extra.pop("token_types", None))
        hidden, layers = self.run_blocks(x, state.layers, layout, **extra)
        y = _io.predict(None, self.head, hidden, layout)
        return y, EncoderState(layout.seen_after(), layers)


def _flipped(x: Tensor | None) -> Tensor | None:
    """Reverse an input of the mechanism along the tokens; one without them is for the mechanism to refuse."""
    return x if x is None or x.dim() < 2 else x.flip(1)


def _head(config: Config) -> nn.Module:
    """Build the layers from hidden vectors to predictions, a hidden one among them if it is configured."""
    last = _io.build_head(config, config.width)
    if config.head_activation is None:
        return last
    kinds = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": nn.ReLU(), "tanh": nn.Tanh()}
    norm = build_norm(config.norm_kind, config.width, config.norm_eps) if config.head_norm else nn.Identity()
    return nn.Sequential(nn.Linear(config.width, config.width), kinds[config.head_activation], norm, last)


def _causal(config: Config) -> bool:
    if config.causal is not None or config.alternating:
        return bool(config.causal)
    shape: dict[str, Any] = {
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "dim": config.dim,
    }
    try:
        with torch.device("meta"):
            for mechanism in config.mechanisms:
                mechanism.build(causal=False, **shape)
    except ValueError:
        return True  # or wrong altogether: then building the blocks says why
    return False

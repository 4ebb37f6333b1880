"""A causal network over symbols: embedding and position, blocks, the parameters of the next symbol.

    tokens [b t] -> x [b t c] -> blocks -> norm -> params [b t p]

Trained in parallel with `forward`, an RNN with `extend`: the same weights, the same numbers. With
`cu_seqlens` [n+1] (`lintra.ops.packed`) the row tokens [1 t] holds n sequences, each by itself, and a state
is of n.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lintra import fields
from lintra.attention import AttentionConfig, State, linear
from lintra.legacy import renamed_arguments
from lintra.models._io import check_tokens
from lintra.models._transformer import TransformerBase, TransformerConfig, blocks
from lintra.nn.block import Block
from lintra.nn.distributions import LogisticMixture, Logits
from lintra.nn.embedding import ContextEmbedding, TokenEmbedding, ValueEmbedding
from lintra.nn.parameters import reference_param
from lintra.ops import checks
from lintra.ops.history import look_back
from lintra.ops.packed import Bounds, PackedRow, count_sequences, new_tokens, packed_row

FARTHEST = 2**16  # places that an embedding may look back: a state remembers as many tokens


@renamed_arguments(feed="mlp_ratio", feed_kind="activation")
@dataclass(frozen=True, kw_only=True)
class Config(TransformerConfig):
    """A decoder of any mechanism that has a causal form."""

    vocabulary: int  # n, the symbols 0 .. n-1
    attention: AttentionConfig = field(default_factory=linear.Config)
    embed: Literal["token", "value"] = "token"  # value: the symbols are levels on a scale
    output: Logits | LogisticMixture = field(default_factory=Logits)
    start: bool = True  # a start symbol, numbered n, stands before the first one
    context: tuple[int, ...] = ()  # so many places earlier stand further symbols to embed with each one

    def __post_init__(self):
        super().__post_init__()
        fields.at_least(self, vocabulary=1)
        if any(place < 1 for place in self.context) or len(set(self.context)) < len(self.context):
            raise ValueError(f"context must be different places, each at least 1, got {self.context}")
        if self.context and max(self.context) > FARTHEST:
            raise ValueError(f"context must look back {FARTHEST:,} places at most, got {max(self.context):,}")
        if self.context and not (self.start and self.embed == "token"):
            raise ValueError(
                "context needs start=True, for what stands before the first token, and embed='token', got "
                f"start={self.start} and embed={self.embed!r}"
            )

    def build(self) -> "Decoder":
        return Decoder(self)


class DecoderState(NamedTuple):
    """seen [b]: real tokens so far; recent [b r]: the last of them, as far back as the embedding looks, the
    latest one last; layers: the state of each block.
    """

    seen: Tensor
    recent: Tensor
    layers: tuple[State, ...]


class Decoder(TransformerBase):
    """tokens [b t] -> params [b t p] of the distribution `output` over the symbol that follows each token."""

    def __init__(self, config: Config):
        super().__init__(config, _embedding(config), self.layers(config))
        self.output = config.output.build(config.vocabulary)
        self.start_token = config.vocabulary if config.start else None
        self.head = nn.Linear(config.width, self.output.size)

    @staticmethod
    def layers(config: Config) -> Iterable[Block]:
        """The blocks of this network."""
        return blocks(config, config.attention)

    def forward(
        self,
        tokens: Int[Tensor, "b t"],
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: Bounds | None = None,
    ) -> Float[Tensor, "b t p"]:
        """A whole sequence; params at t belong to the symbol after tokens[t]."""
        row = packed_row(cu_seqlens, "tokens", tokens, mask)
        x, _ = self.enter(tokens, None, mask, row)
        for block in self.blocks:
            x = self.run_block(block, x, mask=mask, cu_seqlens=row)
        return self.head(self.norm(x))

    def shift(self, targets: Int[Tensor, "b t"], cu_seqlens: Bounds | None = None) -> Int[Tensor, "b t"]:
        """What the network reads to predict `targets`: the start symbol, then all but the last of them, in
        each sequence."""
        if self.start_token is None:
            raise ValueError("shift needs a start symbol: build the decoder with start=True")
        checks.shape("targets", targets, "b t", {})
        before = torch.cat((torch.full_like(targets[:, :1], self.start_token), targets[:, :-1]), 1)
        if cu_seqlens is None:
            return before
        _, position = PackedRow.of(cu_seqlens, "targets", targets).locate()
        return before.masked_fill(position == 0, self.start_token)

    def start(self, batch: int) -> DecoderState:
        """The state before any token."""
        layers = tuple(block.start(batch) for block in self.blocks)
        return DecoderState(*self.nothing_seen(batch), layers)

    def nothing_seen(self, batch: int) -> tuple[Int[Tensor, "b"], Int[Tensor, "b r"]]:
        """`seen` and `recent` of a state before any token: as if start symbols had stood there."""
        device, reach = reference_param(self).device, max(self.config.context, default=0)
        return (
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.full((batch, reach), self.config.vocabulary, dtype=torch.int64, device=device),
        )

    def extend(
        self,
        tokens: Int[Tensor, "b t"],
        state: DecoderState | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: Bounds | None = None,
    ) -> tuple[Float[Tensor, "b t p"], DecoderState]:
        """Any number of tokens after `state` (None: before any): a prompt in parallel, or one at a time.

        Raises ValueError for a state of another model or batch.
        """
        row = packed_row(cu_seqlens, "tokens", tokens, mask)
        n = count_sequences(tokens, row)
        state = self.start(n) if state is None else state
        self.check_state(state, DecoderState, n, "tokens")
        x, recent = self.enter(tokens, state, mask, row)
        x, layers = self.run_blocks(x, state.layers, mask, row)
        seen = state.seen + new_tokens(tokens, mask, row)
        return self.head(x), DecoderState(seen, recent, layers)

    def enter(
        self, tokens: Tensor, state: DecoderState | None, mask: Tensor | None, row: PackedRow | None
    ) -> tuple[Tensor, Tensor]:
        """What goes into the first block after `state` (None: before any token), and `recent` of the next."""
        check_tokens(tokens, mask, self.config.vocabulary - (0 if self.config.start else 1))
        n = count_sequences(tokens, row)
        seen, recent = self.nothing_seen(n) if state is None else (state.seen, state.recent)
        tokens = tokens if mask is None else tokens.masked_fill(~mask, 0)
        if self.config.context:
            before, recent = look_back(tokens, recent, self.config.context, mask, row)
            x = self.embedding(tokens, before)
        else:
            x = self.embedding(tokens)
        return self.add_positions(x, seen, mask, row), recent

    def check_state(self, state: Any, kind: type, n: int, what: str) -> None:
        super().check_state(state, kind, n, what)
        reach = max(self.config.context, default=0)
        if state.recent.shape != (n, reach):
            raise ValueError(
                f"state must encode_memory {reach} tokens, got recent of {list(state.recent.shape)}"
            )


def _embedding(config: Config) -> nn.Module:
    if config.context:
        return ContextEmbedding(config.vocabulary, config.embedded, config.context)
    embedding = TokenEmbedding if config.embed == "token" else ValueEmbedding
    return embedding(config.vocabulary, config.embedded, config.start)

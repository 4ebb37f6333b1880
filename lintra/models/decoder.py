"""A causal network over symbols: embedding and position, blocks, the parameters of the next symbol.

    tokens [b t] -> x [b t c] -> blocks -> norm -> params [b t p]

`forward` trains in parallel, `extend` runs as an RNN: the same weights give the same numbers. With
`cu_seqlens` [n+1] (`lintra.ops.layout`) tokens [1 t] pack n sequences, each by itself, and a state
holds n.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lintra.attention import State
from lintra.config import fields
from lintra.legacy import renamed_arguments
from lintra.models._io import check_tokens
from lintra.models.base import TransformerBase, TransformerConfig, build_blocks
from lintra.nn.block import Block
from lintra.nn.context_parallel import ContextParallel
from lintra.nn.distributions import LogisticMixture, Logits
from lintra.nn.embedding import ContextEmbedding, TiedHead, TokenEmbedding, ValueEmbedding
from lintra.nn.mask import warn_if_inverted
from lintra.nn.parameters import hooked, is_fsdp, reference_param
from lintra.ops import checks
from lintra.ops.history import look_back
from lintra.ops.layout import CuSeqlens, Layout

FARTHEST = 2**16  # places that an embedding may look back: a state remembers as many tokens


@renamed_arguments(feed="mlp_ratio", feed_kind="activation")
@dataclass(frozen=True, kw_only=True)
class Config(TransformerConfig):
    """A decoder of any mechanism, or of several, that have a causal form."""

    vocabulary: int  # n, the symbols 0 .. n-1
    embed: Literal["token", "value"] = "token"  # value: the symbols are levels on a scale
    output: Logits | LogisticMixture = field(default_factory=Logits)
    start: bool = True  # a start symbol, numbered n, precedes the first one
    context: tuple[int, ...] = ()  # offsets, in tokens, of earlier symbols whose embeddings are added
    tie_embeddings: bool = False  # the head's weight is the table of the token embedding

    def __post_init__(self):
        super().__post_init__()
        fields.at_least(self, vocabulary=1)
        fields.offsets(self, "context")
        if self.context and max(self.context) > FARTHEST:
            raise ValueError(f"context must look back {FARTHEST:,} places at most, got {max(self.context):,}")
        if self.context and not (self.start and self.embed == "token"):
            raise ValueError(
                "context needs start=True, for what stands before the first token, and embed='token', got "
                f"start={self.start} and embed={self.embed!r}"
            )
        one_table = self.embed == "token" and isinstance(self.output, Logits) and self.embedded == self.width
        if self.tie_embeddings and not one_table:
            raise ValueError(
                "tie_embeddings needs a vector as wide as the network for each symbol, so embed='token', "
                f"output=Logits() and no position='concatenated', got embed={self.embed!r}, "
                f"output={self.output} and position={self.position!r}"
            )

    @property
    def look_back(self) -> int:
        """Number of tokens that the embedding looks back; 0: it sees each token alone."""
        return max(self.context, default=0)

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

    context_parallel: ContextParallel | None = None  # of `lintra.distributed`: tokens are shards of sequences

    def __init__(self, config: Config):
        super().__init__(config, _embedding(config), self.build_blocks(config))
        self.output = config.output.build(config.vocabulary)
        self.start_token = config.vocabulary if config.start else None
        if config.tie_embeddings:
            table = cast("TokenEmbedding", getattr(self.embedding, "own", self.embedding))
            self.head = TiedHead(table, config.vocabulary)
        else:
            self.head = nn.Linear(config.width, self.output.size)

    @staticmethod
    def build_blocks(config: Config) -> Iterable[Block]:
        """Build the blocks of this network."""
        return build_blocks(config)

    def forward(
        self,
        tokens: Int[Tensor, "b t"],
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "b t p"]:
        """Return params of a whole sequence; those at t are of the symbol after tokens[t].

        `extra`: inputs of the mechanism at each call, such as a `global_mask`; not over several ranks."""
        layout = self.input_layout(tokens, mask, cu_seqlens)
        warn_if_inverted(mask)
        if self.context_parallel is not None:
            if extra:
                raise TypeError(f"a sequence over several ranks takes no {', '.join(extra)}")
            layout = self.context_parallel.place(layout)
        x = self._embed_first(tokens, layout)
        run = self.block_runner()
        for block in self.blocks:
            x = run(block, x, layout=layout, **self.extra_of(block, extra))
        return self.head(self.norm(layout.zero(x)))

    def _embed_first(self, tokens: Tensor, layout: Layout) -> Tensor:
        """Return what goes into the first block, of a whole sequence or of a rank's shard of it."""
        if self.context_parallel is None:
            return self.embed(tokens, None, layout)[0]
        reach = self.config.look_back

        def own(layout: Layout, places: slice) -> Tensor:
            here, recent = tokens[:, places], None
            if layout.shard is not None and reach:
                (before,), real = layout.shard.window([layout.zero(here)], reach, layout)
                recent = torch.where(real, before, self.nothing_seen(1, here.device)[1])
            return self.embed(here, recent, layout)[0]

        return self.context_parallel.exchange(layout, own)

    def block_runner(self) -> Callable[..., Tensor]:
        """Return how a block is called, as `TransformerBase` does.

        Where blocks are recomputed in the backward, a state that is handed from rank to rank comes in from
        outside, so that it is not received again. What ranks exchange is kept, except for the keys and values
        of a ring, which go round again."""
        context, run = self.context_parallel, super().block_runner()
        if context is None or run is nn.Module.__call__:
            return run

        def run_shard(block: Block, x: Tensor, *, layout: Layout) -> Tensor:
            if context.method(block.attn) == "scan":
                record: list[list[Tensor]] = []
                contexts = [context.ranks.record_or_replay(record, replays=x) for x in (False, True)]
                return cast("Any", run(block, x, layout=layout, context_fn=lambda: tuple(contexts)))

            if is_fsdp(self):  # weights would be gathered by all ranks together, one of which waits
                raise ValueError(
                    f"FSDP2 cannot recompute layers that wait for a state, such as "
                    f"{block.attn.attention.name!r}: context_parallel needs method='scan', or the decoder "
                    "checkpoint_blocks=False"
                )

            def behind(state: State, layout: Layout, places: slice) -> tuple[Tensor, State]:
                extend = hooked(block, "extend")
                return cast("Any", run(extend, x[:, places], state, layout=layout.after(state.seen)))

            return context.relay.run(block.start, layout, behind)[0]

        return run_shard

    def shift(
        self,
        targets: Int[Tensor, "b t"],
        cu_seqlens: CuSeqlens | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
    ) -> Int[Tensor, "b t"]:
        """Return what the network reads to predict `targets`: the start symbol, then all but the last of
        them, in each sequence. mask: True for real targets, needed only if padding comes
        before or between them; the symbols at padding have no meaning."""
        if self.start_token is None:
            raise ValueError("shift needs a start symbol: build the decoder with start=True")
        checks.shape("targets", targets, "b t", {})
        layout = Layout.of("targets", targets, mask, cu_seqlens)
        left = layout.left_align()
        targets = targets if left is None else left.gather(targets)
        before = torch.cat((torch.full_like(targets[:, :1], self.start_token), targets[:, :-1]), 1)
        if left is not None:
            return left.restore(before)
        return before.masked_fill(layout.locate()[1] == 0, self.start_token) if layout.packed else before

    def start(self, batch: int, *, device: torch.device | str | None = None) -> DecoderState:
        """Return the state before any token, on a device (None: that of the weights)."""
        layers = tuple(block.start(batch, device=device) for block in self.blocks)
        return DecoderState(*self.nothing_seen(batch, device), layers)

    def nothing_seen(
        self, batch: int, device: torch.device | str | None = None
    ) -> tuple[Int[Tensor, "b"], Int[Tensor, "b r"]]:
        """Return `seen` and `recent` of a state before any token, as if start symbols stood there."""
        reach = self.config.look_back
        device = reference_param(self).device if device is None else device
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
        cu_seqlens: CuSeqlens | None = None,
        **extra: Tensor,
    ) -> tuple[Float[Tensor, "b t p"], DecoderState]:
        """Return params of any number of tokens after `state` (None: before any), and the state after them.

        `extra` is as in `forward`. Raises ValueError for a state of another model or batch.
        """
        layout = self.input_layout(tokens, mask, cu_seqlens)
        state = self.start(layout.n, device=layout.device) if state is None else state
        self.check_state(state, DecoderState, layout.n, "tokens")
        layout = layout.after(state.seen)

        def embed(before: DecoderState, layout: Layout) -> tuple[Tensor, DecoderState]:
            x, recent = self.embed(tokens, before.recent, layout)
            return x, before._replace(seen=layout.seen_after(), recent=recent)

        before = state._replace(layers=())
        if self.context_parallel is None or not self.context_parallel.extending:
            x, after = embed(before, layout)
        else:
            x, after = self.context_parallel.extend(before, layout, embed)
        x, layers = self.run_blocks(x, state.layers, layout, **extra)
        return self.head(x), after._replace(layers=layers)

    def input_layout(self, tokens: Tensor, mask: Tensor | None, cu_seqlens: CuSeqlens | None) -> Layout:
        """Return the layout of tokens. Raises ValueError or TypeError unless they are integers [b t], and
        mask or cu_seqlens go with them."""
        check_tokens(tokens)
        return Layout.of("tokens", tokens, mask, cu_seqlens)

    def embed(self, tokens: Tensor, recent: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return what goes into the first block, 0 in padded places, and `recent` of the next state.

        recent: that of the state before (None: before any token). Raises ValueError for unknown tokens."""
        tokens = layout.zero(tokens)
        self.check_symbols(tokens)
        recent = self.nothing_seen(layout.n, layout.device)[1] if recent is None else recent
        if self.config.context:
            before, recent = look_back(tokens, recent, self.config.context, layout)
            x = self.embedding(tokens, before)
        else:
            x = self.embedding(tokens)
        return layout.zero(self.add_positions(x, layout)), recent

    def check_symbols(self, tokens: Int[Tensor, "b t"]) -> None:
        """Raise ValueError for tokens that the network does not know, where they are readable."""
        checks.symbols("tokens", tokens, self.config.vocabulary - (0 if self.config.start else 1))


def _embedding(config: Config) -> nn.Module:
    if config.context:
        return ContextEmbedding(config.vocabulary, config.embedded, config.context)
    embedding = TokenEmbedding if config.embed == "token" else ValueEmbedding
    return embedding(config.vocabulary, config.embedded, config.start)

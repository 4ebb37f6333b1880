"""A causal network over symbols: embedding and position, blocks, the parameters of the next symbol.

    tokens [b t] -> x [b t c] -> blocks -> norm -> params [b t p]

Trained in parallel with `forward`, an RNN with `extend`: the same weights, the same numbers.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lintra import fields
from lintra.attention import AttentionConfig, linear
from lintra.attention._base import in_layer
from lintra.nn.block import Block, NormKind, NormPlace, build_norm
from lintra.nn.distributions import LogisticMixture, Logits
from lintra.nn.embedding import TokenEmbedding, ValueEmbedding
from lintra.nn.feed import Feed, FeedKind
from lintra.nn.heads import Heads, HeadsState
from lintra.nn.position import Learned, Sinusoidal
from lintra.ops import _check
from lintra.ops.positions import token_positions

Position = Literal["sinusoidal", "concatenated", "learned", "rotary", "none"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A decoder of any mechanism that has a causal form."""

    vocabulary: int  # n, the symbols 0 .. n-1
    attention: AttentionConfig = field(default_factory=linear.Config)
    layers: int = 8
    heads: int = 8
    kv_heads: int | None = None  # None: as many as heads
    width: int = 256  # c
    feed: float = 4.0  # hidden units of the feed-forward, in widths
    feed_kind: FeedKind = "gelu"
    norm: NormPlace = "pre"
    norm_kind: NormKind = "layer"
    position: Position = "sinusoidal"  # concatenated: half of the width is the code, half the symbol
    max_length: int | None = None  # tokens, for learned positions
    embed: Literal["token", "value"] = "token"  # value: the symbols are levels on a scale
    output: Logits | LogisticMixture = field(default_factory=Logits)
    start: bool = True  # a start symbol, numbered n, stands before the first one
    dropout: float = 0.0

    def __post_init__(self):
        fields.check(self)
        for name in ("vocabulary", "layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width} and {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if not 0 < self.feed < math.inf:
            raise ValueError(f"feed must be above 0 widths and finite, got {self.feed}")
        if self.heads % (self.kv_heads or self.heads) or (self.kv_heads is not None and self.kv_heads < 1):
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if (self.position == "learned") != (self.max_length is not None):
            raise ValueError(
                f"max_length goes with position='learned', got {self.max_length} with {self.position!r}"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1 token, got {self.max_length}")
        if self.position in ("sinusoidal", "concatenated") and self.width % 4:
            raise ValueError(f"{self.position} positions need a width that 4 divides, got {self.width}")

    def build(self) -> "Decoder":
        return Decoder(self)


class DecoderState(NamedTuple):
    """seen [b]: real tokens so far; layers: the state of each block."""

    seen: Tensor
    layers: tuple[HeadsState, ...]


class Decoder(nn.Module):
    """tokens [b t] -> params [b t p] of the distribution `output` over the symbol that follows each token."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        c, n = config.width, config.vocabulary
        self.output = config.output.build(n)
        self.start_token = n if config.start else None
        self.concatenated = config.position == "concatenated"
        embedding = TokenEmbedding if config.embed == "token" else ValueEmbedding
        self.embedding = embedding(n, c // 2 if self.concatenated else c, config.start)
        self.position = _position(config)
        self.dropout = nn.Dropout(config.dropout)
        blocks = (
            Block(
                Heads(
                    c,
                    in_layer(config.attention, layer),
                    heads=config.heads,
                    kv_heads=config.kv_heads,
                    rotary=10_000.0 if config.position == "rotary" else None,
                ),
                Feed(c, multiple=config.feed, kind=config.feed_kind, dropout=config.dropout),
                width=c,
                norm=config.norm,
                norm_kind=config.norm_kind,
                dropout=config.dropout,
            )
            for layer in range(config.layers)
        )
        self.blocks = cast("list[Block]", nn.ModuleList(blocks))
        self.norm = build_norm(config.norm_kind, c) if config.norm == "pre" else nn.Identity()
        self.head = nn.Linear(c, self.output.size)

    def forward(
        self, tokens: Int[Tensor, "b t"], *, mask: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t p"]:
        """A whole sequence; params at t belong to the symbol after tokens[t]."""
        x = self._enter(tokens, tokens.new_zeros(tokens.shape[0], dtype=torch.int64), mask)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(self.norm(x))

    def shift(self, targets: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
        """What the network reads to predict `targets`: the start symbol, then all but the last of them."""
        if self.start_token is None:
            raise ValueError("shift needs a start symbol: build the decoder with start=True")
        return torch.cat((torch.full_like(targets[:, :1], self.start_token), targets[:, :-1]), 1)

    def start(self, batch: int) -> DecoderState:
        """The state before any token."""
        layers = tuple(block.start(batch) for block in self.blocks)
        return DecoderState(torch.zeros(batch, dtype=torch.int64, device=self.head.weight.device), layers)

    def extend(
        self,
        tokens: Int[Tensor, "b t"],
        state: DecoderState | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t p"], DecoderState]:
        """Any number of tokens after `state` (None: before any): a prompt in parallel, or one at a time.

        Raises ValueError for a state of another model or batch.
        """
        state = self.start(tokens.shape[0]) if state is None else state
        self._check_state(tokens, state)
        x = self._enter(tokens, state.seen, mask)
        layers = []
        for block, before in zip(self.blocks, state.layers, strict=True):
            x, after = block.extend(x, before, mask=mask)
            layers.append(after)
        new = tokens.shape[1] if mask is None else mask.sum(1)
        return self.head(self.norm(x)), DecoderState(state.seen + new, tuple(layers))

    def _enter(self, tokens: Tensor, seen: Tensor, mask: Tensor | None) -> Tensor:
        self._check_tokens(tokens, mask)
        if mask is not None:
            tokens = tokens.masked_fill(~mask, 0)
        x = self.embedding(tokens)
        if self.position is not None:
            code = self.position(token_positions(seen, tokens.shape[1], mask).clamp(min=0)).to(x.dtype)
            x = torch.cat((x, code), -1) if self.concatenated else x + code
        return self.dropout(x)

    def _check_tokens(self, tokens: Tensor, mask: Tensor | None) -> None:
        sizes: dict[str, int] = {}
        _check.shape("tokens", tokens, "b t", sizes)
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"tokens must be int64 or int32, got {tokens.dtype}")
        if mask is not None:
            _check.mask(mask, "b t", sizes, tokens.device)
        real = tokens if mask is None else tokens.masked_fill(~mask, 0)
        _check.symbols("tokens", real, self.config.vocabulary - (0 if self.config.start else 1))

    def _check_state(self, tokens: Tensor, state: DecoderState) -> None:
        if not isinstance(state, DecoderState):
            raise TypeError(f"state must be a DecoderState, got {type(state).__name__}")
        if len(state.layers) != len(self.blocks):
            raise ValueError(f"state is of {len(state.layers)} layers, the model has {len(self.blocks)}")
        if state.seen.shape[0] != tokens.shape[0]:
            raise ValueError(f"state is of {state.seen.shape[0]} sequences, tokens of {tokens.shape[0]}")


def _position(config: Config) -> nn.Module | None:
    if config.position == "learned":
        assert config.max_length is not None
        return Learned(config.max_length, config.width)
    if config.position in ("sinusoidal", "concatenated"):
        return Sinusoidal(config.width // 2 if config.position == "concatenated" else config.width)
    return None

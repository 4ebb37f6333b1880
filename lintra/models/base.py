"""Base of the networks made of blocks: configuration, positions, running blocks and recomputing them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lintra.attention import AttentionConfig, AttentionPattern, State, in_layer, linear
from lintra.config import fields
from lintra.legacy import renamed_attributes
from lintra.nn.attention_layer import AttentionLayer, QKNorm
from lintra.nn.block import Block, NormKind, NormPlace, build_norm
from lintra.nn.mlp import MLP, Activation
from lintra.nn.parameters import hooked
from lintra.nn.position import Bounded, Grid, Learned, Sinusoidal
from lintra.ops.layout import Layout

Position = Literal["sinusoidal", "concatenated", "learned", "grid", "rotary", "none"]


@renamed_attributes(feed="mlp_ratio", feed_kind="activation")
@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Blocks of one width, their mechanisms, and how positions come in."""

    # Several: one for each layer, or for the first ones, after which they repeat.
    attention: AttentionPattern = field(default_factory=linear.Config)
    layers: int = 8
    heads: int = 8
    kv_heads: int | None = None  # None: as many as heads
    width: int = 256  # c
    head_dim: int | None = None  # d, numbers of a head; None: width / heads
    mlp_ratio: float = 4.0  # hidden units of the feed-forward, in widths; 0: blocks without one
    activation: Activation = "gelu"
    norm: NormPlace = "pre"
    norm_kind: NormKind = "layer"
    norm_eps: float | None = None  # what norms add to a variance; None: 1e-5 of layer, 1e-6 of rms
    final_norm: bool | None = None  # a norm after the last block; None: only with norm="pre", which needs one
    conv: int | None = None  # q, k and v pass a causal convolution over so many tokens, then SiLU; None: none
    qk_norm: QKNorm | None = None  # l2: queries and keys of unit length
    output_gate: bool = False  # RMSNorm of each head of attention, times silu of a projection
    position: Position = "sinusoidal"  # concatenated: half of the width is the code, half the symbol
    rope_base: float = 10_000.0  # of rotary positions: no wavelength is longer than 2 pi times as many tokens
    max_length: int | None = None  # tokens, for learned positions
    grid: tuple[int, ...] = ()  # sizes of the axes, for grid positions; the last one runs fastest
    dropout: float = 0.0
    checkpoint_blocks: bool = False  # keep only what enters a block, compute the rest again in the backward

    def __post_init__(self):
        if isinstance(self.attention, list):
            object.__setattr__(self, "attention", tuple(self.attention))  # immutable, like the other fields
        fields.check(self)
        fields.at_least(self, layers=1, heads=1, width=1, head_dim=1, max_length=1, conv=1)
        if not self.mechanisms:
            raise ValueError("attention must be at least one mechanism's configuration, got ()")
        if self.layers % len(self.mechanisms):
            raise ValueError(
                f"layers must be a multiple of the mechanisms in attention, got {self.layers} layers and "
                f"{len(self.mechanisms)} mechanisms"
            )
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width} and {self.heads}")
        fields.probability(self, "dropout")
        fields.positive(self, "norm_eps")
        if not 0 <= self.mlp_ratio < math.inf:
            raise ValueError(f"mlp_ratio must be at least 0 widths and finite, got {self.mlp_ratio}")
        if self.heads % (self.kv_heads or self.heads) or (self.kv_heads is not None and self.kv_heads < 1):
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if not 1 < self.rope_base < math.inf:
            raise ValueError(f"rope_base must be above 1 and finite, got {self.rope_base}")
        if self.rope_base != 10_000 and self.position != "rotary":
            raise ValueError(
                f"rope_base goes with position='rotary', got {self.rope_base} with {self.position!r}"
            )
        if (self.position == "learned") != (self.max_length is not None):
            raise ValueError(
                f"max_length goes with position='learned', got {self.max_length} with {self.position!r}"
            )
        if (self.position == "grid") != bool(self.grid) or any(size < 1 for size in self.grid):
            raise ValueError(
                f"grid goes with position='grid', sizes of at least 1, got {self.grid} with {self.position!r}"
            )
        if self.position in ("sinusoidal", "concatenated") and self.width % 4:
            raise ValueError(f"{self.position} positions need a width that 4 divides, got {self.width}")

    @property
    def mechanisms(self) -> tuple[AttentionConfig, ...]:
        """The mechanisms of the first layers, after which they repeat."""
        return self.attention if isinstance(self.attention, tuple) else (self.attention,)

    def mechanism(self, layer: int) -> AttentionConfig:
        """Return the mechanism of a layer, with randomness of its own."""
        return in_layer(self.mechanisms[layer % len(self.mechanisms)], layer)

    @property
    def dim(self) -> int:
        """The width of a head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def embedded(self) -> int:
        """The width of an embedding, before its position comes in."""
        return self.width // 2 if self.position == "concatenated" else self.width


class TransformerBase(nn.Module):
    """Embedding, positions, blocks and the last norm of a network; a subclass adds inputs and head."""

    def __init__(self, config: Any, embedding: nn.Module, blocks: Iterable[Block]):
        super().__init__()
        self.config = config
        self.concatenated = config.position == "concatenated"
        self.embedding = embedding
        self.position = _position(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = cast("list[Block]", nn.ModuleList(blocks))
        last = config.norm == "pre" if config.final_norm is None else config.final_norm
        self.norm = build_norm(config.norm_kind, config.width, config.norm_eps) if last else nn.Identity()

    def add_positions(self, x: Tensor, layout: Layout) -> Tensor:
        """Return the embedded tokens [b t ..] with their positions, [b t c].

        Past the last position it raises ValueError where that is known without waiting for a device, else it
        gives NaN (`Bounded`)."""
        if self.position is not None:
            if layout.mask is None and not layout.packed and not torch.compiler.is_compiling():
                self.check_reach(x.shape[1])
            code = self.position(layout.positions().clamp(min=0)).to(x.dtype)
            x = torch.cat((x, code), -1) if self.concatenated else x + code
        return self.dropout(x)

    def check_reach(self, tokens: int) -> None:
        """Raise ValueError for more tokens in a sequence than there are positions."""
        if isinstance(self.position, Bounded):
            self.position.check(tokens)

    def block_runner(self) -> Callable[..., Tensor]:
        """Return how a block is called: `run(block, x, ...)`.

        Blocks that are recomputed in the backward (activation checkpointing) use the dropout of the first
        pass again."""
        if self.config.checkpoint_blocks and torch.is_grad_enabled():
            return partial(checkpoint, use_reentrant=False)
        return nn.Module.__call__

    def run_blocks(
        self, x: Tensor, layers: tuple[State, ...], layout: Layout, **extra: Tensor
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Return x after all blocks, each after its state, and the states after them."""
        states = []
        for block, before in zip(self.blocks, layers, strict=True):
            x, state = hooked(block, "extend")(x, before, layout=layout, **self.extra_of(block, extra))
            states.append(state)
        return self.norm(layout.zero(x)), tuple(states)

    def extra_of(self, block: Block, extra: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the extra inputs of a call that are for one block: inputs that only other mechanisms take
        are left out, and those that none takes stay, so that they are refused."""
        if not extra:
            return extra
        own = block.attn.attention.call_inputs
        others = {name for each in self.blocks for name in each.attn.attention.call_inputs}.difference(own)
        return {name: x for name, x in extra.items() if name not in others}

    def check_state(self, state: Any, kind: type, n: int, what: str) -> None:
        """Raise TypeError or ValueError unless state is a `kind` of this network and of the n sequences of
        `what`."""
        if not isinstance(state, kind):
            raise TypeError(f"state must be a {kind.__name__}, got {type(state).__name__}")
        if len(state.layers) != len(self.blocks):
            raise ValueError(f"state is for {len(state.layers)} layers, the model has {len(self.blocks)}")
        if state.seen.shape[0] != n:
            raise ValueError(f"state is for {state.seen.shape[0]} sequences, {what} for {n}")
        if hasattr(state, "recent") and state.recent.shape != (n, reach := self.config.look_back):
            raise ValueError(f"state must remember {reach} places, got recent of {list(state.recent.shape)}")


def build_blocks(config: TransformerConfig, *, causal: bool = True) -> Iterable[Block]:
    """Build the blocks of a configuration."""
    for layer in range(config.layers):
        yield Block(self_attention_layer(config, layer, causal), build_mlp(config), **block_options(config))


def self_attention_layer(config: TransformerConfig, layer: int, causal: bool) -> AttentionLayer:
    """Build the self-attention of one layer."""
    return AttentionLayer(
        config.width,
        config.mechanism(layer),
        heads=config.heads,
        kv_heads=config.kv_heads,
        causal=causal,
        rope_base=config.rope_base if config.position == "rotary" else None,
        conv=config.conv,
        qk_norm=config.qk_norm,
        output_gate=config.output_gate,
        head_dim=config.head_dim,
    )


def build_mlp(config: TransformerConfig) -> MLP | None:
    """Build the feed-forward of one layer; None: it has none."""
    if not config.mlp_ratio:
        return None
    return MLP(config.width, ratio=config.mlp_ratio, activation=config.activation, dropout=config.dropout)


def block_options(config: TransformerConfig) -> dict[str, Any]:
    """Return the arguments of a block other than its parts."""
    return {
        "width": config.width,
        "norm": config.norm,
        "norm_kind": config.norm_kind,
        "norm_eps": config.norm_eps,
        "dropout": config.dropout,
    }


def _position(config: TransformerConfig) -> nn.Module | None:
    if config.position == "learned":
        assert config.max_length is not None
        return Learned(config.max_length, config.width)
    if config.position == "grid":
        return Grid(config.grid, config.width)
    if config.position in ("sinusoidal", "concatenated"):
        return Sinusoidal(config.embedded)
    return None


def set_checkpoint_blocks(model: nn.Module) -> None:
    """Recompute the blocks of every network inside a module in the backward pass from now on."""
    for part in model.modules():
        if isinstance(part, TransformerBase):
            part.config = replace(part.config, checkpoint_blocks=True)

"""A decoder that reads what an encoder made of another sequence.

    source [b s] -> encoder -> hidden [b s c] -> encode_memory -> memory
    tokens [b t], memory -> blocks that also read -> params [b t p]

The memory is made once. Where both the decoder's own mechanism and the reading one have a state of constant
size, so has generation, whatever the lengths of source and target.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lintra.attention import AttentionConfig, State, in_layer, linear
from lintra.legacy import renamed_arguments, renamed_attributes
from lintra.models import decoder, encoder
from lintra.models.base import block_options, build_mlp, self_attention_layer
from lintra.models.decoder import Decoder, DecoderState
from lintra.nn.attention_layer import AttentionLayer
from lintra.nn.block import CrossBlock
from lintra.nn.mask import warn_if_inverted
from lintra.ops.layout import CuSeqlens


@renamed_arguments(feed="mlp_ratio", feed_kind="activation")
@dataclass(frozen=True, kw_only=True)
class Config(decoder.Config):
    """A decoder, the encoder whose hidden vectors it reads, and the mechanism by which it reads them.

    `conv`, `qk_norm` and `output_gate` are for the decoder's self-attention alone.
    """

    encoder: encoder.Config
    cross: AttentionConfig = field(default_factory=linear.Config)

    def __post_init__(self):
        super().__post_init__()
        if self.encoder.width != self.width:
            raise ValueError(
                f"the encoder must have the decoder's width, got {self.encoder.width} and {self.width}"
            )
        self.encoder.check_hidden()

    def build(self) -> "Seq2Seq":
        return Seq2Seq(self)


class Memory(NamedTuple):
    """length [b]: real tokens of the source; layers: what each block keeps of it."""

    length: Tensor
    layers: tuple[State, ...]


@renamed_attributes(remember="encode_memory")
class Seq2Seq(Decoder):
    """tokens [b t] and a memory -> params [b t p] over the symbol that follows each token.

    For training, `model(model.shift(targets), model.encode_memory(source, source_mask))`. For generation,
    `model.start(memory)`, then `extend`. A state holds its memory: indexing it keeps the two together. With
    `cu_seqlens` both the source and the targets may be packed; a memory is of n sequences.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.encoder = config.encoder.build()

    @staticmethod
    def build_blocks(config: Config) -> Iterable[CrossBlock]:
        for layer in range(config.layers):
            cross_attn = AttentionLayer(
                config.width,
                in_layer(config.cross, config.layers + layer),  # they draw their own features
                heads=config.heads,
                kv_heads=config.kv_heads,
                causal=False,
                head_dim=config.head_dim,
            )
            attn = self_attention_layer(config, layer, causal=True)
            yield CrossBlock(attn, cross_attn, build_mlp(config), **block_options(config))

    def encode_memory(
        self,
        source: Tensor,
        mask: Bool[Tensor, "b s"] | None = None,
        *,
        cu_seqlens: CuSeqlens | None = None,
        **extra: Tensor,
    ) -> Memory:
        """Return what the decoder keeps of symbols [b s] or features [b s i]; `extra` is for the encoder."""
        hidden, layout = self.encoder.encode(source, mask=mask, cu_seqlens=cu_seqlens, **extra)
        if layout.packed:
            padded = layout.pad_all()
            hidden, layout = padded.unpack(hidden)[0], padded.layouts[0]
        length = layout.new
        if isinstance(length, int):
            length = torch.full((layout.n,), length, device=hidden.device)
        layers = tuple(block.encode_memory(hidden, layout=layout) for block in self._cross_blocks)
        return Memory(length, layers)

    def forward(
        self,
        tokens: Int[Tensor, "b t"],
        memory: Memory,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
    ) -> Float[Tensor, "b t p"]:
        """Return params of a whole sequence; those at t are of the symbol after tokens[t]."""
        layout = self.input_layout(tokens, mask, cu_seqlens)
        warn_if_inverted(mask)
        self._check_memory(memory, layout.n)
        x, _ = self.embed(tokens, None, layout)
        run = self.block_runner()
        for block, layer in zip(self.blocks, memory.layers, strict=True):
            x = run(block, x, layer, layout=layout)
        return self.head(self.norm(layout.zero(x)))

    def start(self, memory: Memory) -> DecoderState:
        """The state before any token."""
        self._check_memory(memory)
        batch = memory.length.shape[0]
        layers = (block.start(batch, m) for block, m in zip(self._cross_blocks, memory.layers, strict=True))
        return DecoderState(*self.nothing_seen(batch), tuple(layers))

    def extend(
        self,
        tokens: Int[Tensor, "b t"],
        state: DecoderState | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
    ) -> tuple[Float[Tensor, "b t p"], DecoderState]:
        """Return params of any number of tokens after `state`, which `start` makes of a memory, and the state
        after them. Raises TypeError for None."""
        if state is None:
            raise TypeError(
                "state must be that of a memory, from model.start(model.encode_memory(source)), got None"
            )
        return super().extend(tokens, state, mask=mask, cu_seqlens=cu_seqlens)

    @property
    def _cross_blocks(self) -> Iterable[CrossBlock]:
        return cast("Iterable[CrossBlock]", self.blocks)

    def _check_memory(self, memory: Memory, batch: int | None = None) -> None:
        if not isinstance(memory, Memory):
            raise TypeError(f"memory must be a Memory, from encode_memory, got {type(memory).__name__}")
        if len(memory.layers) != len(self.blocks):
            raise ValueError(f"memory is for {len(memory.layers)} layers, the model has {len(self.blocks)}")
        if batch is not None and memory.length.shape[0] != batch:
            raise ValueError(f"memory is for {memory.length.shape[0]} sequences, tokens for {batch}")

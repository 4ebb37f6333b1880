"""From a layer's input to what a mechanism reads, and back."""

import math
import warnings
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from lintra import fields
from lintra.attention import AttentionConfig, State
from lintra.legacy import accept_old_tensors, renamed_attributes
from lintra.nn.mask import warn_if_inverted
from lintra.nn.parameters import check_dtype, has_hooks, reference_param
from lintra.ops import checks
from lintra.ops.packed import Bounds, PackedRow, count_sequences, new_tokens, packed_row
from lintra.ops.padding import zero_padding
from lintra.ops.rope import RotaryEmbedding, token_positions


class AttentionLayerState(NamedTuple):
    """seen [b]: real tokens so far; attention: the mechanism's state."""

    seen: Tensor
    attention: State


@renamed_attributes(
    inward="qkv_proj", outward="out_proj", reads="extra_proj", remember="encode_memory", read="cross_attend"
)
class AttentionLayer(nn.Module):
    """Multi-head attention by any mechanism, x [b t c] -> [b t c], for use inside any network.

    `attention` is a mechanism's `Config`. kv_heads < heads shares keys and values among groups of query heads
    (Ainslie et al. 2023, arXiv:2305.13245). `rotary` is the base of rotary positions, None for no rotation.
    What a mechanism takes at each call, such as a `global_mask`, goes through as a keyword. With cu_seqlens
    [n+1] (`lintra.ops.packed`) the row x [1 t c] holds n sequences, and states are of n.
    Raises ValueError unless width is a multiple of heads and heads of kv_heads.
    """

    def __init__(
        self,
        width: int,
        attention: AttentionConfig,
        *,
        heads: int,
        kv_heads: int | None = None,
        causal: bool = True,
        rotary: float | None = None,
        bias: bool = True,
    ):
        super().__init__()
        self.register_load_state_dict_pre_hook(accept_old_tensors)
        fields.check_one("attention", AttentionConfig, attention)
        if heads < 1 or width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        self.width, self.heads, self.kv_heads = width, heads, heads if kv_heads is None else kv_heads
        self.dim = width // heads
        if rotary is not None and (not 1 < rotary < math.inf or self.dim % 2):
            raise ValueError(
                f"rotary needs a base above 1 and an even head size, got {rotary} and {self.dim}"
            )
        self.rotary = rotary
        self.attention = attention.build(heads=heads, dim=self.dim, causal=causal, kv_heads=self.kv_heads)
        if rotary is not None and not self.attention.rope_dim:
            raise ValueError(f"{attention} {self.attention.no_rope_reason}, got rotary={rotary}")
        if rotary is not None and self.attention.rope_dim % 2:
            raise ValueError(f"rotary turns pairs, got {self.attention.rope_dim} features of {attention}")
        if rotary is not None and self.attention.rope_warning:
            warnings.warn(f"{attention} {self.attention.rope_warning}", stacklevel=2)
        # One product gives q, k, v; the mechanism reads them as strided views of it.
        keys = 0 if self.attention.shared_key else self.kv_heads * self.dim
        self.widths = [heads * self.dim, keys, self.kv_heads * self.dim]
        self.qkv_proj = nn.Linear(width, sum(self.widths), bias=bias)
        self.extra_proj = nn.ModuleDict(
            {name: nn.Linear(width, size, bias=bias) for name, size in self.attention.extra_inputs().items()}
        )
        self.attention.initialize(self.qkv_proj, self.extra_proj)
        self.out_proj = nn.Linear(heads * self.dim, width, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: Bounds | None = None,
        **given: Tensor,
    ) -> Float[Tensor, "b t c"]:
        """A whole sequence attending to itself; 0 in padded places.

        Warns where the mask looks like one that is True for padding."""
        warn_if_inverted(mask)
        row = packed_row(cu_seqlens, "x", x, mask)
        n = count_sequences(x, row)
        q, k, v, extra = self._project(x, mask)
        seen = x.new_zeros(n, dtype=torch.int64)
        rope = self._rotation(seen, x.shape[1], mask, row)
        if row is None:
            y = self.attention(q, k, v, mask=mask, rope=rope, **extra, **given)
        else:
            y = self.attention.forward_packed(q, k, v, row, rope=rope, **extra, **given)
        return zero_padding(mask, self.out_proj(y.flatten(2)))[0]

    def start(self, batch: int) -> AttentionLayerState:
        """The state before any token. ValueError for a bidirectional mechanism, which has none."""
        self.attention.check_causal()
        like = reference_param(self.qkv_proj)
        return AttentionLayerState(
            torch.zeros(batch, dtype=torch.int64, device=like.device),
            self.attention.start(batch, device=like.device, dtype=like.dtype),
        )

    def extend(
        self,
        x: Float[Tensor, "b t c"],
        state: AttentionLayerState | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: Bounds | None = None,
        **given: Tensor,
    ) -> tuple[Float[Tensor, "b t c"], AttentionLayerState]:
        """Any number of tokens after `state` (None: before any token)."""
        row = packed_row(cu_seqlens, "x", x, mask)
        n = count_sequences(x, row)
        state = self.start(n) if state is None else state
        q, k, v, extra = self._project(x, mask)
        if not isinstance(state, AttentionLayerState):
            raise TypeError(f"state must be a AttentionLayerState, got {type(state).__name__}")
        if state.seen.shape[0] != n:
            raise ValueError(f"state is of {state.seen.shape[0]} sequences, x of {n}")
        rope = self._rotation(state.seen, x.shape[1], mask, row)
        options = {"rope": rope, **extra, **given}
        if row is None:
            y, after = self.attention.extend(q, k, v, state.attention, mask=mask, **options)
        else:
            y, after = self.attention.extend_packed(q, k, v, state.attention, row, **options)
        seen = state.seen + new_tokens(x, mask, row)
        return zero_padding(mask, self.out_proj(y.flatten(2)))[0], AttentionLayerState(seen, after)

    def encode_memory(self, x: Float[Tensor, "b s c"], mask: Bool[Tensor, "b s"] | None = None) -> State:
        """What cross-attention keeps of another sequence. ValueError with rotary: two sequences share no
        positions."""
        self._check_cross()
        warn_if_inverted(mask)
        k, v = self._parts(x, mask, slice(1, 3))
        return self.attention.encode_memory(k, v, mask)

    def cross_attend(
        self, x: Float[Tensor, "b t c"], memory: State, mask: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t c"]:
        """Cross-attention: every token of x reads the memory; 0 where x is padded."""
        self._check_cross()
        (q,) = self._parts(x, mask, slice(0, 1))
        return zero_padding(mask, self.out_proj(self.attention.cross_attend(q, memory, mask).flatten(2)))[0]

    def _check_cross(self) -> None:
        if self.rotary is not None:
            raise ValueError(f"cross-attention has no positions to turn by, got rotary={self.rotary}")

    def _project(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        checks.activations(x, mask, self.width)
        check_dtype("x", x, self.qkv_proj)
        (x,) = zero_padding(mask, x)
        q, k, v = (part.unflatten(2, (-1, self.dim)) for part in self.qkv_proj(x).split(self.widths, -1))
        k = q if self.attention.shared_key else k
        return q, k, v, {name: project(x) for name, project in self.extra_proj.items()}

    def _parts(self, x: Tensor, mask: Tensor | None, which: slice) -> list[Tensor]:
        """Some of q, k and v alone, where the others would not be used."""
        checks.activations(x, mask, self.width)
        check_dtype("x", x, self.qkv_proj)
        (x,) = zero_padding(mask, x)
        if type(self.qkv_proj) is nn.Linear and not has_hooks(self.qkv_proj):
            rows = slice(sum(self.widths[: which.start]), sum(self.widths[: which.stop]))
            bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[rows]
            parts = functional.linear(x, self.qkv_proj.weight[rows], bias).split(self.widths[which], -1)
        else:
            parts = self.qkv_proj(x).split(self.widths, -1)[which]
        return [part.unflatten(2, (-1, self.dim)) for part in parts]

    def _rotation(
        self, seen: Tensor, time: int, mask: Tensor | None, row: PackedRow | None
    ) -> RotaryEmbedding | None:
        if self.rotary is None:
            return None
        return RotaryEmbedding(token_positions(seen, time, mask, row), self.rotary)

"""One layer of a transformer: a mechanism, then a feed-forward, each with a residual and a norm."""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lintra.attention import Attention, State
from lintra.legacy import accept_old_tensors, renamed_attributes
from lintra.nn.attention_layer import AttentionLayer, AttentionLayerState, check_layer_state, enter
from lintra.nn.mask import warn_if_inverted
from lintra.nn.mlp import MLP
from lintra.nn.parameters import hooked
from lintra.ops.layout import CuSeqlens, Layout

NormPlace = Literal["pre", "post"]
NormKind = Literal["layer", "rms"]


def build_norm(kind: NormKind, width: int, eps: float | None = None) -> nn.Module:
    """LayerNorm (Ba et al. 2016, arXiv:1607.06450) or RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467).

    `eps` is added to a variance; None: 1e-5 for a LayerNorm, 1e-6 for an RMSNorm."""
    if kind not in ("layer", "rms"):
        raise ValueError(f"norm_kind must be 'layer' or 'rms', got {kind!r}")
    if kind == "layer":
        return nn.LayerNorm(width, eps=1e-5 if eps is None else eps)
    return nn.RMSNorm(width, eps=1e-6 if eps is None else eps)


@renamed_attributes(mix="attn", feed="mlp", norm_mix="attn_norm", norm_feed="mlp_norm")
class Block(nn.Module):
    """x [b t c] -> [b t c] through `attn` and `mlp` (None: `attn` alone).

    norm "pre": x + attn(norm x), then x + mlp(norm x). "post": norm(x + attn x), then norm(x + mlp x), as in
    the papers before 2020. With a mask, padded places give 0; with `cu_seqlens` x [1 t c] packs n sequences
    (`lintra.ops.layout`), each by itself, and states hold n.
    """

    def __init__(
        self,
        attn: AttentionLayer,  # or another module x -> x that takes a layout
        mlp: MLP | None,  # None: attn alone
        *,
        width: int,  # c, features of a token
        norm: NormPlace = "pre",  # "pre": before attn and mlp; "post": after the sums
        norm_kind: NormKind = "layer",  # "layer": LayerNorm; "rms": RMSNorm
        norm_eps: float | None = None,  # added to a variance; None: 1e-5 for LayerNorm, 1e-6 for RMSNorm
        dropout: float = 0.0,  # of what attn and mlp add, in training
    ):
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
        if not isinstance(attn, nn.Module) or isinstance(attn, Attention):
            raise TypeError(
                f"attn must be a module x -> x, such as AttentionLayer, got {type(attn).__qualname__}"
            )
        if getattr(attn, "width", width) != width:
            raise ValueError(f"attn must be of width {width}, got {attn.width}")
        self.pre, self.width = norm == "pre", width
        self.attn, self.mlp = attn, mlp
        self.attn_norm = build_norm(norm_kind, width, norm_eps)
        self.mlp_norm = nn.Identity() if mlp is None else build_norm(norm_kind, width, norm_eps)
        self.dropout = nn.Dropout(dropout)
        self.register_load_state_dict_pre_hook(accept_old_tensors)

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        layout: Layout | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "b t c"]:
        """Return x after a whole sequence; `extra`: inputs of the mechanism, such as a `global_mask`.

        `layout` replaces mask and cu_seqlens once they have been validated, as in `AttentionLayer`."""
        if layout is None:
            layout = enter(x, self.width, mask, cu_seqlens)
            warn_if_inverted(mask)
            return layout.zero(self.forward(layout.zero(x), layout=layout, **extra))
        x = self._join(x, self.attn(self._normed(x, self.attn_norm), layout=layout, **extra), self.attn_norm)
        return self._feed_forward(x)

    def start(self, batch: int, *, device: torch.device | str | None = None) -> AttentionLayerState:
        """Return the state before any token, on a device (None: that of the weights)."""
        return self.attn.start(batch, device=device)

    def extend(
        self,
        x: Float[Tensor, "b t c"],
        state: AttentionLayerState | None = None,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        layout: Layout | None = None,
        **extra: Tensor,
    ) -> tuple[Float[Tensor, "b t c"], AttentionLayerState]:
        """Return x after any number of tokens after `state` (None: before any token), and the next state."""
        if layout is None:
            layout = enter(x, self.width, mask, cu_seqlens)
            state = self.start(layout.n, device=layout.device) if state is None else state
            check_layer_state(state, layout.n)
            x, state = self.extend(layout.zero(x), state, layout=layout.after(state.seen), **extra)
            return layout.zero(x), state
        extend = hooked(self.attn, "extend")
        y, after = extend(self._normed(x, self.attn_norm), state, layout=layout, **extra)
        x = self._join(x, y, self.attn_norm)
        return self._feed_forward(x), after

    def _feed_forward(self, x: Tensor) -> Tensor:
        """Return x after the feed-forward, where there is one."""
        if self.mlp is None:
            return x
        return self._join(x, self.mlp(self._normed(x, self.mlp_norm)), self.mlp_norm)

    def _normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return the input of attention or feed-forward."""
        return norm(x) if self.pre else x

    def _join(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        """Add the output of attention or feed-forward to its input."""
        x = x + (self.dropout(y) if self.dropout.training else y)
        return x if self.pre else norm(x)


class CrossState(NamedTuple):
    """own: the state of the sequence itself; memory: what it reads of another one."""

    own: AttentionLayerState
    memory: State


@renamed_attributes(remember="encode_memory", read="cross_attn", norm_read="cross_attn_norm")
class CrossBlock(Block):
    """A block that reads another sequence through `cross_attn`, between `attn` and `mlp`, with a residual and
    a norm of its own. The other sequence comes in as a memory, from `encode_memory`.
    """

    def __init__(
        self,
        attn: AttentionLayer,
        cross_attn: AttentionLayer,
        mlp: MLP | None,
        *,
        width: int,
        norm_kind: NormKind = "layer",
        norm_eps: float | None = None,
        **around: Any,
    ):
        super().__init__(attn, mlp, width=width, norm_kind=norm_kind, norm_eps=norm_eps, **around)
        name, can = cross_attn.attention.name, cross_attn.attention.can
        cross_attn.attention.check_cross()
        if can.joint_queries or can.placed_queries:
            raise ValueError(
                f"attention {name!r} lets the queries of one call depend on each other or on their places: "
                "reading a memory token by token would differ from reading it with all tokens at once"
            )
        self.cross_attn = cross_attn
        self.cross_attn_norm = build_norm(norm_kind, width, norm_eps)

    def encode_memory(
        self,
        source: Float[Tensor, "b s c"],
        mask: Bool[Tensor, "b s"] | None = None,
        *,
        layout: Layout | None = None,
    ) -> State:
        """Return what the block keeps of the sequence that it will read."""
        return self.cross_attn.encode_memory(source, mask, layout=layout)

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        memory: State,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        layout: Layout | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "b t c"]:
        """Return x after a whole sequence that reads a memory; packed ones each read their own."""
        if layout is None:
            layout = enter(x, self.width, mask, cu_seqlens)
            warn_if_inverted(mask)
            return layout.zero(self.forward(layout.zero(x), memory, layout=layout, **extra))
        x = self._join(x, self.attn(self._normed(x, self.attn_norm), layout=layout, **extra), self.attn_norm)
        x = self._read(x, memory, layout)
        return self._feed_forward(x)

    def start(self, batch: int, memory: State) -> CrossState:
        """Return the state before any token, on the device of the memory."""
        return CrossState(self.attn.start(batch, device=memory[0].device), memory)

    def extend(
        self,
        x: Float[Tensor, "b t c"],
        state: CrossState,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        layout: Layout | None = None,
        **extra: Tensor,
    ) -> tuple[Float[Tensor, "b t c"], CrossState]:
        """Return x after any number of tokens after `state`, and the next state."""
        if not isinstance(state, CrossState):
            raise TypeError(f"state must be a CrossState, got {type(state).__name__}")
        if layout is None:
            layout = enter(x, self.width, mask, cu_seqlens)
            check_layer_state(state.own, layout.n)
            x, state = self.extend(layout.zero(x), state, layout=layout.after(state.own.seen), **extra)
            return layout.zero(x), state
        extend = hooked(self.attn, "extend")
        y, after = extend(self._normed(x, self.attn_norm), state.own, layout=layout, **extra)
        x = self._read(self._join(x, y, self.attn_norm), state.memory, layout)
        x = self._feed_forward(x)
        return x, CrossState(after, state.memory)

    def _read(self, x: Tensor, memory: State, layout: Layout) -> Tensor:
        queries = self._normed(x, self.cross_attn_norm)
        attend = hooked(self.cross_attn, "cross_attend")
        if not layout.packed:
            found = attend(queries, memory, layout=layout)
        else:

            def read(layout: Layout, x: Tensor) -> Tensor:
                return attend(x, memory, layout=layout)

            found = layout.pad_all().each(read, x=queries)
        return self._join(x, found, self.cross_attn_norm)

"""Multi-head attention by any mechanism, for use inside any network."""

import math
import warnings
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention import AttentionConfig, State, map_state
from lintra.config import fields
from lintra.config.fields import spelled
from lintra.legacy import accept_old_tensors, renamed_arguments, renamed_attributes
from lintra.nn.context_parallel import ContextParallel
from lintra.nn.mask import warn_if_inverted
from lintra.nn.parameters import check_dtype, has_hooks, hooked, reference_param
from lintra.ops import checks
from lintra.ops.autocast import widened
from lintra.ops.conv1d import causal_conv1d, conv_impl, conv_weight
from lintra.ops.layout import CuSeqlens, Layout
from lintra.ops.norms import gated_norm, l2_norm
from lintra.ops.rope import RotaryEmbedding

QKNorm = Literal["l2"]


class AttentionLayerState(NamedTuple):
    """seen [b]: real tokens so far; attention: the mechanism's state; conv: the last inputs [b w-1 c] of
    the layer's convolution, where it has one."""

    seen: Tensor
    attention: State
    conv: tuple[Tensor, ...] = ()


def enter(x: Tensor, width: int, mask: Tensor | None, cu_seqlens: CuSeqlens | None) -> Layout:
    """Return the layout of activations that come from outside.

    Raises ValueError or TypeError unless x is [b t width], of a floating type, and mask or cu_seqlens go with
    it."""
    checks.activations(x, width)
    return Layout.of("x", x, mask, cu_seqlens)


@renamed_arguments(rotary="rope_base")
@renamed_attributes(
    inward="qkv_proj",
    outward="out_proj",
    reads="extra_proj",
    remember="encode_memory",
    read="cross_attend",
    rotary="rope_base",
)
class AttentionLayer(nn.Module):
    """Multi-head attention by any mechanism, x [b t c] -> [b t c], for use inside any network.

    kv_heads < heads shares keys and values among groups of query heads (Ainslie et al. 2023,
    arXiv:2305.13245); more value heads than key heads, each as wide as a key head, are an option of
    mechanisms, `value_heads`.
    `conv` (`lintra.ops.causal_conv1d`), `qk_norm` (with it, softmax at its usual scale is nearly even) and
    `output_gate` are what papers on recurrences add: Sun et al. 2023, arXiv:2307.08621, equation 8; Yang et
    al. 2024, arXiv:2406.06484, section 4.
    Inputs of a mechanism at each call, such as a `global_mask`, are passed on as keywords. With `cu_seqlens`
    [n+1] (`lintra.ops.layout`) x [1 t c] packs n sequences, and states hold n.
    Raises ValueError unless heads is a multiple of kv_heads and, without head_dim, width of heads; and for
    conv where causal=False.
    """

    context_parallel: ContextParallel | None = None  # of `lintra.distributed`: x is a shard of a sequence

    def __init__(
        self,
        width: int,  # c, features of a token
        attention: AttentionConfig,  # a mechanism's Config
        *,
        heads: int,  # query heads
        kv_heads: int | None = None,  # heads of keys and values, a divisor of heads; None: as many
        causal: bool = True,  # a token reads itself and those before it; False: all
        rope_base: float | None = None,  # of rotary positions, 10,000 in most papers; None: no rotation
        bias: bool = True,  # of the projections
        conv: int | None = None,  # tokens of a causal convolution of q, k and v, then SiLU; None: without
        qk_norm: QKNorm | None = None,  # "l2": queries and keys of unit length
        output_gate: bool = False,  # RMSNorm of each head times silu of a projection of x
        head_dim: int | None = None,  # features of a head; None: width / heads
    ):
        super().__init__()
        self.register_load_state_dict_pre_hook(accept_old_tensors)
        fields.check_one("attention", AttentionConfig, attention)
        fields.check_one("width", int, width)
        fields.check_one("heads", int, heads)
        if heads < 1 or (head_dim is None and width % heads):
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}")
        if head_dim is not None and head_dim < 1:
            raise ValueError(f"head_dim must be at least 1, got {head_dim}")
        self.width, self.heads, self.kv_heads = width, heads, heads if kv_heads is None else kv_heads
        self.dim = width // heads if head_dim is None else head_dim
        if rope_base is not None and (not 1 < rope_base < math.inf or self.dim % 2):
            raise ValueError(
                f"rope_base must be above 1 and needs an even head size, got {rope_base} and {self.dim}"
            )
        if conv is not None and (conv < 1 or not causal):
            raise ValueError(f"conv must be at least 1 token and needs causal=True, got {conv} and {causal}")
        if qk_norm not in (None, "l2"):
            raise ValueError(f"qk_norm must be 'l2' or None, got {qk_norm!r}")
        self.rope_base, self.conv, self.qk_norm, self.output_gate = rope_base, conv, qk_norm, output_gate
        self.attention = attention.build(heads=heads, dim=self.dim, causal=causal, kv_heads=self.kv_heads)
        if rope_base is not None and not self.attention.rope_dim:
            raise ValueError(
                f"{spelled(attention)} {self.attention.no_rope_reason}, got rope_base={rope_base}"
            )
        if rope_base is not None and self.attention.rope_dim % 2:
            raise ValueError(
                f"rope_base needs an even number of features, got {self.attention.rope_dim} in "
                f"{spelled(attention)}"
            )
        if rope_base is not None and self.attention.rope_warning:
            warnings.warn(f"{spelled(attention)} {self.attention.rope_warning}", stacklevel=2)
        # One product gives q, k, v; the mechanism reads them as strided views of it.
        keys = 0 if self.attention.shared_key else self.kv_heads * self.dim
        self.widths = [heads * self.dim, keys, self.attention.value_heads * self.dim]
        out_width = self.attention.out_heads * self.dim
        self.qkv_proj = nn.Linear(width, sum(self.widths), bias=bias)
        self.extra_proj = nn.ModuleDict(
            {name: nn.Linear(width, size, bias=bias) for name, size in self.attention.extra_inputs().items()}
        )
        self.attention.initialize(self.qkv_proj, self.extra_proj)
        if conv is not None:
            self.conv_impl = conv_impl(getattr(attention, "impl", "auto"))
            self.conv_weight = conv_weight(sum(self.widths), conv)
        if output_gate:
            self.gate_proj = nn.Linear(width, out_width, bias=bias)
            self.out_norm = nn.Parameter(torch.ones(self.dim))
        self.out_proj = nn.Linear(out_width, width, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        layout: Layout | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "b t c"]:
        """Return the output of self-attention over a whole sequence; 0 in padded places.

        Warns if the mask looks inverted, True for padding.

        `layout` replaces mask and cu_seqlens once they have been validated. The caller then guarantees finite
        x at padding; the output there is unspecified but finite."""
        if layout is None:
            layout = enter(x, self.width, mask, cu_seqlens)
            warn_if_inverted(mask)
            check_dtype("x", x, self.qkv_proj)
            return layout.zero(self.forward(layout.zero(x), layout=layout, **extra))
        if self.context_parallel is not None:
            return self._forward_shard(x, self.context_parallel, layout, extra)
        return self._forward(x, layout, extra)

    def _forward(self, x: Tensor, layout: Layout, extra: dict[str, Tensor]) -> Tensor:
        q, k, v, _ = self._qkv(x, (), layout)
        extra = self._extra(x, q, extra)
        y = self.attention(q, k, v, layout=layout, rope=self._rope(layout), **extra)
        return self._out(x, y)

    def _forward_shard(
        self, x: Tensor, context: ContextParallel, layout: Layout, extra: dict[str, Tensor]
    ) -> Tensor:
        """Return y [b t c] of a rank's shard of sequences."""
        layout = context.place_once(self, layout)

        def given(tokens: slice) -> dict[str, Tensor]:
            return {name: each[:, tokens] for name, each in extra.items() if each is not None}

        def own(layout: Layout, tokens: slice) -> Tensor:
            return self._forward(x[:, tokens], layout, given(tokens))

        def behind(state: AttentionLayerState, layout: Layout, tokens: slice) -> tuple[Tensor, State]:
            return self._extend(x[:, tokens], state, layout.after(state.seen), given(tokens))

        if context.method(self) == "relay":
            if torch._C._current_graph_task_id() != -1:
                raise ValueError(
                    f"attention {self.attention.name!r} waits for a state of the rank before, and cannot be "
                    "computed again in the backward: context_parallel needs method='scan', or no checkpoint "
                    "around the layer"
                )
            return context.relay.run(self.start, layout, behind)[0]
        return context.exchange(layout, own)

    def start(self, batch: int, *, device: torch.device | str | None = None) -> AttentionLayerState:
        """Return the state before any token, on a device (None: that of the weights).

        Raises ValueError for a bidirectional mechanism, which has none."""
        self.attention.check_causal()
        like = reference_param(self.qkv_proj)
        device = like.device if device is None else device
        inputs = () if self.conv is None else ((batch, self.conv - 1, sum(self.widths)),)
        return AttentionLayerState(
            torch.zeros(batch, dtype=torch.int64, device=device),
            self.attention.start(batch, device=device, dtype=like.dtype),
            tuple(torch.zeros(x, device=device, dtype=checks.sum_dtype(like.dtype)) for x in inputs),
        )

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
        """Return the output for any number of tokens after `state` (None: before any token), and the next
        state.

        `layout` is as in `forward`; it follows the tokens that the state has seen."""
        if layout is None:
            layout = enter(x, self.width, mask, cu_seqlens)
            check_dtype("x", x, self.qkv_proj)
            state = self.start(layout.n, device=layout.device) if state is None else state
            check_layer_state(state, layout.n)
            y, state = self.extend(layout.zero(x), state, layout=layout.after(state.seen), **extra)
            return layout.zero(y), state
        state = self.start(layout.n, device=layout.device) if state is None else state
        check_layer_state(state, layout.n)
        self._check_conv(state.conv, layout.n)
        if self.context_parallel is None or not self.context_parallel.extending:
            layout = layout.after(state.seen) if layout.seen is None else layout
            return self._extend(x, state, layout, extra)

        def own(state: AttentionLayerState, layout: Layout) -> tuple[Tensor, AttentionLayerState]:
            return self._extend(x, state, layout, extra)

        return self.context_parallel.extend(state, layout, own)

    def _extend(
        self, x: Tensor, state: AttentionLayerState, layout: Layout, extra: dict[str, Tensor]
    ) -> tuple[Tensor, AttentionLayerState]:
        q, k, v, last = self._qkv(x, state.conv, layout)
        extra = self._extra(x, q, extra)
        rope = self._rope(layout)
        extend = hooked(self.attention, "extend")
        y, after = extend(q, k, v, state.attention, layout=layout, rope=rope, **extra)
        return self._out(x, y), AttentionLayerState(layout.seen_after(), after, last)

    def _check_conv(self, inputs: tuple[Tensor, ...], n: int) -> None:
        """Raise ValueError or TypeError unless these are the last inputs of this layer's convolution."""
        if len(inputs) != (self.conv is not None):
            raise ValueError(
                f"state.conv must hold {int(self.conv is not None)} tensors for conv={self.conv}, "
                f"got {len(inputs)}"
            )
        for x in inputs:
            sizes = {"n": n, "w": self.conv_weight.shape[1] - 1, "c": sum(self.widths)}
            checks.shape("state.conv", x, "n w c", sizes)
            checks.state_dtype("state.conv", x, self.conv_weight, narrow=False)

    def encode_memory(
        self,
        x: Float[Tensor, "b s c"],
        mask: Bool[Tensor, "b s"] | None = None,
        *,
        layout: Layout | None = None,
    ) -> State:
        """Return the memory of another sequence for cross-attention to read.

        Raises ValueError with rope_base: two sequences share no positions."""
        self._check_cross()
        if layout is None:
            layout = enter(x, self.width, mask, None)
            warn_if_inverted(mask)
            check_dtype("x", x, self.qkv_proj)
            x = layout.zero(x)
        k, v = self._parts(x, slice(1, 3))
        return self.attention.encode_memory(self._normed(k), v, layout=layout)

    def cross_attend(
        self,
        x: Float[Tensor, "b t c"],
        memory: State,
        mask: Bool[Tensor, "b t"] | None = None,
        *,
        layout: Layout | None = None,
    ) -> Float[Tensor, "b t c"]:
        """Return what every token of x reads from a memory of as many sequences, or of one; 0 where
        padded."""
        self._check_cross()
        if layout is None:
            layout = enter(x, self.width, mask, None)
            check_dtype("x", x, self.qkv_proj)
            return layout.zero(self.cross_attend(layout.zero(x), memory, layout=layout))
        (q,) = self._parts(x, slice(0, 1))
        self.attention.check_memory(memory, q)
        if (n := memory[0].shape[0]) != x.shape[0]:
            if n != 1:
                raise ValueError(f"memory must be of {x.shape[0]} sequences, as x is, or of one, got {n}")
            memory = map_state(lambda part: part.expand(x.shape[0], *part.shape[1:]), memory)
        attend = hooked(self.attention, "cross_attend")
        return self._out(x, attend(self._normed(q), memory, layout=layout))

    def _check_cross(self) -> None:
        if self.rope_base is not None:
            raise ValueError(
                f"cross-attention takes no rotary positions: rope_base must be None, got {self.rope_base}"
            )

    def _qkv(
        self, x: Tensor, before: tuple[Tensor, ...], layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Return q [b t h d], k [b t g d], v [b t o d], strided views of one product, and the state of the
        convolution."""
        x = self.qkv_proj(x)
        if self.conv is not None:
            state = before[0] if before else None
            if layout.shard is not None:
                ((state,), _), layout = self._inputs_before(x, layout), layout.after(layout.seen)
            options: dict[str, Any] = {"activation": "silu", "layout": layout, "impl": self.conv_impl}
            x, last = causal_conv1d(x, self.conv_weight, state=state, **options)
            before = (last,)
        q, k, v = x.split(self.widths, -1)
        q, v = self._normed(q.unflatten(2, (-1, self.dim))), v.unflatten(2, (-1, self.dim))
        k = q if self.attention.shared_key else self._normed(k.unflatten(2, (-1, self.dim)))
        return q, k, v, before

    def _inputs_before(self, x: Tensor, layout: Layout) -> tuple[list[Tensor], Tensor]:
        """The last inputs of the convolution on earlier ranks."""
        assert layout.shard is not None
        (wide,) = widened(x)
        return layout.shard.window([wide], self.conv_weight.shape[1] - 1, layout)

    def _normed(self, x: Tensor) -> Tensor:
        """Normalise queries or keys as `qk_norm` says."""
        if self.qk_norm is None:
            return x
        (wide,) = widened(x)
        return l2_norm(wide).to(x.dtype)

    def _out(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the layer's output from its input and the outputs of the heads [b t m d]."""
        if self.output_gate:
            (wide,) = widened(y)
            y = gated_norm(wide, self.gate_proj(x), weight=self.out_norm).to(y.dtype)
        return self.out_proj(y.flatten(2))

    @property
    def additions(self) -> str | None:
        """Return what the layer has besides projections and a mechanism; None: nothing."""
        parts = {"conv": self.conv, "qk_norm": self.qk_norm, "output_gate": self.output_gate or None}
        return ", ".join(f"{name}={value!r}" for name, value in parts.items() if value is not None) or None

    def _extra(self, x: Tensor, q: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the mechanism takes besides q, k, v: projections of x, and the inputs of this call."""
        extra = {name: project(x) for name, project in self.extra_proj.items()}
        if given:
            if learned := given.keys() & extra.keys():
                raise TypeError(f"the layer projects {', '.join(sorted(learned))} itself: do not pass it")
            extra |= given
            self.attention.check_extra(q, extra)
        return extra

    def _parts(self, x: Tensor, which: slice) -> list[Tensor]:
        """Project to some of q, k and v alone, where the others would not be used."""
        if type(self.qkv_proj) is nn.Linear and not has_hooks(self.qkv_proj):
            rows = slice(sum(self.widths[: which.start]), sum(self.widths[: which.stop]))
            bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[rows]
            parts = functional.linear(x, self.qkv_proj.weight[rows], bias).split(self.widths[which], -1)
        else:
            parts = self.qkv_proj(x).split(self.widths, -1)[which]
        return [part.unflatten(2, (-1, self.dim)) for part in parts]

    def _rope(self, layout: Layout) -> RotaryEmbedding | None:
        return None if self.rope_base is None else layout.rope(self.rope_base)


def check_layer_state(state: AttentionLayerState, n: int) -> None:
    """Raise TypeError or ValueError unless this is the state of a layer, of n sequences."""
    if not isinstance(state, AttentionLayerState):
        raise TypeError(f"state must be an AttentionLayerState, got {type(state).__name__}")
    if state.seen.shape[0] != n:
        raise ValueError(f"state is for {state.seen.shape[0]} sequences, x for {n}")

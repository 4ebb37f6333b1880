"""The base of all mechanisms: the verbs a network calls, written once, around the mathematics of a paper.

A mechanism writes hooks: `start` and `_step`, the recurrence as its paper prints it, or `_forward`; where it
has them, also a fast `_extend`, `_encode_memory` and `_cross_attend`. The verbs `forward`, `extend`, `step`,
`encode_memory` and `cross_attend` are final. They check inputs, make padding zero, rotate queries and keys,
leave autocast and pad packed batches, so that no hook has to.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lintra.attention._state import check_dtypes, check_form, select
from lintra.config.fields import spelled
from lintra.ops import checks
from lintra.ops.autocast import follow_autocast, in_autocast, no_autocast
from lintra.ops.dispatch import eager
from lintra.ops.layout import CuSeqlens, Layout
from lintra.ops.padding import connected_zeros
from lintra.ops.rope import RotaryEmbedding
from lintra.ops.state import State, map_state

VERBS = ("forward", "extend", "step", "encode_memory", "cross_attend")


# What ranks that hold shards of a sequence exchange: states that compose, last places, all keys and values.
Exchange = Literal["scan", "window", "ring"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Forms and costs that a mechanism declares. What it cannot do is refused when it is built."""

    causal: bool
    bidirectional: bool
    cross: bool  # queries of one sequence, keys and values of another
    recurrent: bool  # has a step
    state: Literal["constant", "window", "grows", "none"]  # how large the state gets
    cost: str  # of a whole sequence of t tokens, per head; d is the size of a head
    # When causal, no later content reaches a token, but later tokens may decide which earlier ones it sees.
    # The recurrent form then gives the output of the last token of the sequence so far.
    lookahead: bool = False
    joint_queries: bool = False  # a query's output depends on the other queries of the call
    placed_queries: bool = False  # in cross-attention it depends on the query's place among them


@runtime_checkable
class AttentionConfig(Protocol):
    """A mechanism's configuration, such as linear.Config() of lintra.attention.linear.

    `build` takes the arguments of `Attention` after the configuration: heads, dim, causal, and kv_heads and
    value_dim if they differ from heads and dim."""

    def build(self, **shape: Any) -> "Attention": ...


AttentionPattern = AttentionConfig | tuple[AttentionConfig, ...]  # one for all layers, or several in turn


class Attention(nn.Module):
    """Base of all mechanisms. q [b t h d], k [b s g d], v [b s g e] -> y [b t m e], m = h; h a multiple of g.

    If the configuration has a field `value_heads` and sets it, v is [b s o e] with o value heads, a multiple
    of g, and y has m = max(h, o) heads, one of which is a multiple of the other.

    `forward` takes a whole sequence; `extend` any number of tokens after a state (*prefill* after an empty
    one, *decode* with one token); `step` is the recurrence of the paper, one token at a time.
    `encode_memory` and `cross_attend` are cross-attention: keys and values once, then any queries.

    Keywords: `mask` [b t] is True for real tokens; the content of padded places changes nothing, and y is 0
    there. `cu_seqlens` [n+1] packs n sequences into one row, b = 1; a state then holds n. A caller that has
    validated either passes its `layout` instead. `rope` rotates queries and keys by their positions. A
    mechanism's `extra_inputs` and `call_inputs` are given by token too, [b t ...].
    """

    paper: ClassVar[str]
    shared_key: ClassVar[bool] = False  # queries and keys are one projection: q and k are the same
    # Fields of a network's configuration as the paper's networks have them: norms, feed-forward, positions.
    paper_block: ClassVar[dict[str, Any]] = {}
    call_inputs: ClassVar[tuple[str, ...]] = ()  # optional inputs of a call, [b t ...]
    no_weight_decay: ClassVar[tuple[str, ...]] = ()  # parameters that weight decay leaves alone
    supports_bf16_state: ClassVar[bool] = False  # `kv` of a state may be bfloat16, denominators not
    reads_padded: ClassVar[bool] = False  # its hooks leave padded tokens out themselves, even NaN
    reads_packed: ClassVar[bool] = False  # its hooks take packed batches as they are
    memory: ClassVar[type]  # type of what cross-attention keeps
    grows_apart: ClassVar[tuple[str, ...]] = ()  # parts of a state that do not grow with the one before
    matrix_transition: ClassVar[bool] = False  # a shard acts on an earlier state by a matrix product
    rotates: ClassVar[bool] = False  # its hooks take `rope` and apply it themselves
    can: Capabilities  # of the class; a configuration may narrow it before this constructor runs

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if overridden := next((verb for verb in VERBS if verb in vars(cls)), None):
            raise TypeError(
                f"{cls.__name__}.{overridden} is final in Attention: write the hook _{overridden}"
            )

    def __init__(
        self,
        config: Any,  # the mechanism's Config
        *,
        heads: int,  # query heads
        dim: int,  # features per head of a query or key
        causal: bool,  # True: a query reads its own token and those before it; False: all
        kv_heads: int | None = None,  # heads of keys and values, a divisor of heads; None: as many
        value_dim: int | None = None,  # features per head of a value; None: dim
    ):
        super().__init__()
        self.config = config
        self._forms: dict[torch.dtype, State] = {}  # fresh states, by the dtype of activations
        self.name = type(self).__module__.rpartition(".")[2]
        if causal and not self.can.causal:
            raise ValueError(f"attention {self.name!r} ({self.paper}) has no causal form, got causal=True")
        if not causal and not self.can.bidirectional:
            raise ValueError(
                f"attention {self.name!r} is causal only with {spelled(config)}, got causal=False"
            )
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.dim, self.value_dim = dim, dim if value_dim is None else value_dim
        given = getattr(config, "value_heads", None)
        self.value_heads = self.kv_heads if given is None else given
        self.causal = causal
        self.rope_dim = self.dim  # the width of what `rope` is applied to; 0: `no_rope_reason` says why not
        self.no_rope_reason = "has positions of its own"
        self.rope_warning = ""  # a risk of rotating queries and keys, about which a layer warns
        for what in ("heads", "kv_heads", "value_heads", "dim", "value_dim"):
            value = getattr(self, what)
            if not isinstance(value, int):
                raise TypeError(f"{what} must be int, got {value!r}")
            if value < 1:
                raise ValueError(f"{what} must be at least 1, got {value}")
        checks.heads(self.heads, self.kv_heads, self.value_heads)
        self.group = self.heads // self.kv_heads  # query heads to a key-value head
        self.out_heads = max(self.heads, self.value_heads)  # of y
        if self.shared_key and self.heads != self.kv_heads:
            raise ValueError(
                f"attention {self.name!r} has one projection for queries and keys: kv_heads must be "
                f"heads={self.heads}, got {self.kv_heads}"
            )

    # What a mechanism declares.

    def extra_inputs(self) -> dict[str, int]:
        """Return what it takes from the layer's input beyond q, k, v, such as a gate: name -> width."""
        return {}

    def initialize(self, qkv_proj: nn.Linear, extra_proj: nn.ModuleDict) -> None:
        """Initialise a layer's projections to q, k, v and to the extra inputs; by default as PyTorch does."""

    def redraw(self, generator: torch.Generator) -> None:
        """Sample random features, hashes or blocks again; for training, between steps. Nothing by default."""

    def _register_buffers(self, **buffers: Tensor | None) -> None:
        """Register buffers on PyTorch's default device and, unless they are integers, in its default dtype.
        They are made on the CPU, where a seed gives the same ones for every device."""
        default = torch.empty(0)
        for name, x in buffers.items():
            like = default if x is not None and x.is_floating_point() else default.device
            self.register_buffer(name, None if x is None else x.to(like))

    def exchange(self) -> Exchange | None:
        """Return how `_forward` gets what precedes a rank's shard of longer sequences, `layout.shard`
        (`lintra.distributed`); None: it cannot, so that ranks wait for the state of the rank before."""
        return None

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """Return the state before any token, for `batch` sequences of activations of `dtype`."""
        raise NotImplementedError(f"attention {self.name!r} has no recurrent form")

    # The verbs.

    @final
    def forward(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b t g d"],
        v: Float[Tensor, "b t o e"],
        *,
        layout: Layout | None = None,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        rope: RotaryEmbedding | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "b t m e"]:
        """Return the output of self-attention over a whole sequence."""
        if layout is None:
            layout = self._validate(q, k, v, mask, cu_seqlens, rope, extra)
            return layout.zero(self.forward(q, k, v, layout=layout, rope=rope, **extra))
        if in_autocast(q):
            return self._out_of_autocast(self.forward, q, k, v, layout=layout, rope=rope, **extra)
        if layout.packed and not self.reads_packed:
            return self._padded_forward(q, k, v, layout, rope, extra)
        q, k, v, extra = self._prepare(q, k, v, layout, rope, extra)
        return self._forward(q, k, v, layout, **extra)

    @final
    def extend(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b t g d"],
        v: Float[Tensor, "b t o e"],
        state: State,
        *,
        layout: Layout | None = None,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: CuSeqlens | None = None,
        rope: RotaryEmbedding | None = None,
        **extra: Tensor,
    ) -> tuple[Float[Tensor, "b t m e"], State]:
        """Return the output for any number of tokens after `state`, and the state after them.

        Padded tokens leave the state as it was. With `cu_seqlens` each of n sequences has its own state."""
        if layout is None:
            layout = self._validate(q, k, v, mask, cu_seqlens, rope, extra)
            self.check_causal()
            y, state = self.extend(q, k, v, state, layout=layout, rope=rope, **extra)
            return layout.zero(y), state
        if in_autocast(q):
            return self._out_of_autocast(self.extend, q, k, v, state, layout=layout, rope=rope, **extra)
        self.check_state(state, layout.n, q)
        if layout.packed and not self.reads_packed:
            return self._padded_extend(q, k, v, state, layout, rope, extra)
        q, k, v, extra = self._prepare(q, k, v, layout, rope, extra)
        return self._extend(q, k, v, state, layout, **extra)

    @final
    def step(
        self,
        q: Float[Tensor, "b 1 h d"],
        k: Float[Tensor, "b 1 g d"],
        v: Float[Tensor, "b 1 o e"],
        state: State,
        *,
        rope: RotaryEmbedding | None = None,
        **extra: Tensor,
    ) -> tuple[Float[Tensor, "b 1 m e"], State]:
        """Return the output for one token by the recurrence as the paper prints it: the reference of
        `extend`."""
        layout = self._validate(q, k, v, None, None, rope, extra)
        self.check_causal()
        if layout.time != 1:
            raise ValueError(f"step takes one token, got t={layout.time}: more go through extend")
        if in_autocast(q):
            return self._out_of_autocast(self.step, q, k, v, state, rope=rope, **extra)
        self.check_state(state, layout.n, q, narrow=False)
        q, k, v, extra = self._prepare(q, k, v, layout, rope, extra)
        return self._step(q, k, v, state, **extra)

    @final
    def encode_memory(
        self,
        k: Float[Tensor, "b s g d"],
        v: Float[Tensor, "b s o e"],
        mask: Bool[Tensor, "b s"] | None = None,
        *,
        layout: Layout | None = None,
    ) -> State:
        """Return the memory of another sequence for cross-attention to read."""
        self.check_cross()
        if layout is None:
            checks.kv(k, v, mask, self.sizes(), self._value_axis())
            layout = Layout.of("k", k, mask)
        if in_autocast(k):
            k, v = follow_autocast(k, v)
            with no_autocast(k):
                return self.encode_memory(k, v, layout=layout)
        return self._encode_memory(layout.zero(k), layout.zero(v), layout)

    @final
    def cross_attend(
        self,
        q: Float[Tensor, "b t h d"],
        memory: State,
        mask: Bool[Tensor, "b t"] | None = None,
        *,
        layout: Layout | None = None,
    ) -> Float[Tensor, "b t m e"]:
        """Return what every query reads from a memory; `mask` is that of the queries, y is 0 where False."""
        self.check_cross()
        if in_autocast(q):
            (q,) = follow_autocast(q)
            with no_autocast(q):
                return self.cross_attend(q, memory, mask, layout=layout)
        if layout is None:
            self._validate_query(q, memory, mask)
            layout = Layout.of("q", q, mask)
            return layout.zero(self.cross_attend(q, memory, layout=layout))
        return self._cross_attend(layout.zero(q), memory, layout)

    # The hooks. q, k, v and extra inputs are checked, 0 where padded (unless `reads_padded`) and rotated
    # (unless `rotates`), and autocast is off. Where there is no token, anything finite may come out.

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **extra: Any) -> Tensor:
        """y [b t h e] of whole sequences. By default `_extend` of an empty state."""
        state = self.start(layout.n, device=q.device, dtype=q.dtype)
        return self._extend(q, k, v, state, layout, **extra)[0]

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State, layout: Layout, **extra: Any
    ) -> tuple[Tensor, State]:
        """y [b t h e] of tokens after a state, and the next state. By default `_step` of each token."""
        ys = [connected_zeros((q.shape[0], 0, self.out_heads, self.value_dim), q, k, v)]
        if not q.shape[1]:
            return ys[0], map_state(torch.clone, state)
        for i in range(q.shape[1]):
            one = slice(i, i + 1)
            token = {name: _of_tokens(x, one) for name, x in extra.items()}
            y, after = self._step(q[:, one], k[:, one], v[:, one], state, **token)
            state = after if layout.mask is None else select(layout.mask[:, i], after, state)
            ys.append(y)
        return torch.cat(ys, 1), state

    def _step(self, q: Tensor, k: Tensor, v: Tensor, state: State, **extra: Any) -> tuple[Tensor, State]:
        """y [b 1 h e] of one token, and the next state: the recurrence."""
        raise NotImplementedError(
            f"attention {self.name!r} has no recurrent form with {spelled(self.config)}"
        )

    def _encode_memory(self, k: Tensor, v: Tensor, layout: Layout) -> State:
        raise NotImplementedError(f"attention {self.name!r} declares a cross form and has no _encode_memory")

    def _cross_attend(self, q: Tensor, memory: State, layout: Layout) -> Tensor:
        raise NotImplementedError(f"attention {self.name!r} declares a cross form and has no _cross_attend")

    # What the verbs do around the hooks.

    def _prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        rope: RotaryEmbedding | None,
        extra: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Zeros where there is no token, rotation, and the extra inputs that a hook takes."""
        extra = {name: x for name, x in extra.items() if x is not None}
        if q.shape[0] != layout.rows or q.shape[1] != layout.time:
            layout.check("q", q)
        if layout.mask is not None and not self.reads_padded:
            q, v = layout.zero(q), layout.zero(v)
            k = q if self.shared_key else layout.zero(k)
            extra = {name: layout.zero(x) for name, x in extra.items()}
        if rope is not None and self.rotates:
            extra = {**extra, "rope": rope}
        elif rope is not None:
            q, k = rope(q), k if self.shared_key else rope(k)
        return q, k, v, extra

    def _out_of_autocast(self, verb: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
        """Run a verb outside of autocast, with q, k and v in autocast's dtype, as for a product of
        matrices."""
        q, k, v, *state = tensors
        q, k, v = follow_autocast(q, k, v)
        with no_autocast(q):
            return verb(q, q if self.shared_key else k, v, *state, **options)

    def _padded_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        rope: RotaryEmbedding | None,
        extra: dict[str, Any],
    ) -> Tensor:
        """A packed batch as padded batches of similar length. When causal, no token sees the padding after
        it, so that it need not be distinguished from tokens."""
        unmasked = self.causal and not self.can.lookahead

        def padded(layout: Layout, **tensors: Any) -> Tensor:
            position = tensors.pop(_POSITION, None)
            moved = None if rope is None or position is None else rope.moved(position)
            layout = Layout(layout.rows, layout.time, layout.device) if unmasked else layout
            return self.forward(layout=layout, rope=moved, **tensors)

        return layout.pad_bucketed().each(padded, q=q, k=k, v=v, **_by_token(rope, extra))

    def _padded_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        layout: Layout,
        rope: RotaryEmbedding | None,
        extra: dict[str, Any],
    ) -> tuple[Tensor, State]:
        """A packed batch as one padded batch."""
        padded = layout.pad_all()
        given = {"q": q, "k": k, "v": v, **_by_token(rope, extra)}
        tensors: dict[str, Any] = {name: padded.unpack(x)[0] for name, x in given.items()}
        position = tensors.pop(_POSITION, None)
        moved = None if rope is None or position is None else rope.moved(position)
        y, after = self.extend(**tensors, state=state, layout=padded.layouts[0], rope=moved)
        return padded.pack([y]), after

    # Checks of the verbs' inputs.

    def sizes(self, batch: int | None = None) -> dict[str, int]:
        """Return the sizes that the letters of its shapes stand for."""
        sizes = {"h": self.heads, "g": self.kv_heads, "o": self.value_heads}
        sizes |= {"d": self.dim, "e": self.value_dim}
        return sizes if batch is None else {"b": batch, **sizes}

    def _value_axis(self) -> str:
        """Return the letter of v's heads."""
        return "g" if self.value_heads == self.kv_heads else "o"

    def _validate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        cu_seqlens: CuSeqlens | None,
        rope: RotaryEmbedding | None,
        extra: dict[str, Any],
    ) -> Layout:
        """Return the layout of q, k, v and the extra inputs. Raises ValueError or TypeError unless they fit
        together and have the heads and widths this mechanism was built for."""
        remedy = "what came before goes in as `state`, another sequence through `encode_memory`"
        axis = self._value_axis()
        checks.qkv(q, k, v, mask, self.sizes(), same_length=True, remedy=remedy, value_heads=axis)
        layout = Layout.of("q", q, mask, cu_seqlens)
        if self.shared_key and k is not q and checks.readable(q, k, mask):
            same = (q == k) | q.isnan()
            if not bool(same.all() if mask is None else same[mask].all()):
                raise ValueError(f"attention {self.name!r} has one projection: k must be q")
        if rope is not None and not self.rope_dim:
            raise ValueError(f"attention {self.name!r} {self.no_rope_reason} and takes no rotation")
        if rope is not None:
            batch, time = q.shape[:2]
            rows, *places = rope.position.shape
            if places != [time] or (rows != batch and rows != 1):
                raise ValueError(
                    f"rope must have a position for each token, [b={batch} t={time}] or [1 t={time}], "
                    f"got {list(rope.position.shape)}"
                )
        self.check_extra(q, extra)
        return layout

    def _validate_query(self, q: Tensor, memory: State, mask: Tensor | None) -> None:
        self.check_memory(memory, q)
        sizes = self.sizes(memory[0].shape[0])
        checks.shape("q", q, "b t h d", sizes)
        checks.floating("q", q)
        if mask is not None:
            checks.mask(mask, "b t", sizes, q.device)

    def check_extra(self, q: Tensor, extra: dict[str, Any]) -> None:
        """Raise ValueError or TypeError unless the extra inputs are those that the mechanism takes."""
        widths = self.extra_inputs()
        for name in {**widths, **extra}:
            x = extra.get(name)
            if name in widths:
                if x is None:
                    raise TypeError(f"attention {self.name!r} takes {name} [b t {widths[name]}], got None")
                checks.shape(name, x, "b t w", {"b": q.shape[0], "t": q.shape[1], "w": widths[name]})
                checks.floating(name, x)
                if (x.dtype == torch.float64) != (q.dtype == torch.float64):
                    raise TypeError(
                        f"{name} and q must both be float64, or neither, got {x.dtype} and {q.dtype}"
                    )
            elif name not in self.call_inputs:
                raise TypeError(f"attention {self.name!r} takes no {name} with {spelled(self.config)}")
            elif x is not None and x.shape[:2] != q.shape[:2]:
                raise ValueError(
                    f"{name} must be [b={q.shape[0]} t={q.shape[1]} ...], got shape {list(x.shape)}"
                )

    def check_state(self, state: State, n: int, q: Tensor, *, narrow: bool = True) -> None:
        """Raise ValueError or TypeError unless a state is of this mechanism, of n sequences, and goes with q.

        Its sums are in the sum dtype of q, or with `narrow` kv in bfloat16 where that is supported."""
        if torch.compiler.is_compiling():
            return
        like = self._form(q.dtype)
        check_form(like, state, n, self.grows_apart, grows=self.can.state != "constant")
        check_dtypes(like, state, q, narrow=narrow and self.supports_bf16_state)

    def _form(self, dtype: torch.dtype) -> State:
        """A state of one sequence, without numbers."""
        form = self._forms.get(dtype)
        if form is None:
            form = self.start(1, device="meta", dtype=dtype)
            if eager():  # the tensors of a mode or transform do not outlive it
                self._forms[dtype] = form
        return form

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached values, which are computed again when needed."""
        return super().__getstate__() | {"_forms": {}}

    def check_memory(self, memory: State, q: Tensor) -> None:
        """Raise TypeError unless a memory is of this mechanism, and goes with q."""
        if not isinstance(memory, self.memory):
            kind = self.memory.__name__
            raise TypeError(f"memory must be a {kind}, from encode_memory, got {type(memory).__name__}")

    def check_causal(self) -> None:
        """Raise ValueError where a recurrent form is asked of a bidirectional mechanism."""
        if not self.causal:
            raise ValueError("start, extend and step need a mechanism built with causal=True")

    def check_cross(self) -> None:
        """Raise ValueError where cross-attention is asked of a mechanism without it, or of a causal one."""
        if not self.can.cross:
            raise ValueError(f"attention {self.name!r} has no cross form with {spelled(self.config)}")
        if self.causal:
            raise ValueError("encode_memory and cross_attend need a mechanism built with causal=False")

    # A state in another dtype.

    def cast_state(self, state: State, dtype: torch.dtype) -> State:
        """Return the state with kv in `dtype`, which `extend` keeps. Raises what `check_state_dtype` does."""
        self.check_state_dtype(dtype)
        return state._replace(kv=state.kv.to(dtype))

    def check_state_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError unless kv of the state may be kept in `dtype`."""
        if dtype != torch.bfloat16:
            raise ValueError(f"state_dtype must be torch.bfloat16 or None, the dtype of sums; got {dtype}")
        if not self.supports_bf16_state:
            constant = self.can.state == "constant"
            why = "has no kv apart from its denominators" if constant else "has no state of constant size"
            raise ValueError(f"state_dtype must be None: attention {self.name!r} {why}")


def in_layer(config: Any, layer: int) -> Any:
    """Return a mechanism's `Config` for one layer of a network: layers sample different random features."""
    return dataclasses.replace(config, seed=config.seed + layer) if hasattr(config, "seed") else config


_POSITION = "position of rope"  # beside extra inputs, none of which can have this name


def _by_token(rope: RotaryEmbedding | None, extra: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors given for each token beside q, k, v; of a rotation, the positions."""
    given = {name: x for name, x in extra.items() if x is not None}
    return given if rope is None else given | {_POSITION: rope.position}


def _of_tokens(x: Any, tokens: slice) -> Any:
    """An extra input [b t ...], or a rotation, of some tokens alone."""
    return x.at(tokens) if isinstance(x, RotaryEmbedding) else x[:, tokens]

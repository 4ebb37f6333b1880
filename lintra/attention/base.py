"""What every mechanism is: two verbs over queries, keys and values, and what it declares about itself."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lintra.attention._state import State, map_state, same_form, select
from lintra.ops import checks
from lintra.ops.packed import Bounds, PackedRow
from lintra.ops.padding import zero_padding
from lintra.ops.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a mechanism can do. What it cannot is refused when it is built."""

    causal: bool
    bidirectional: bool
    cross: bool  # queries of one sequence, keys and values of another
    recurrent: bool  # has a step
    state: Literal["constant", "window", "grows", "none"]  # how large the state gets
    cost: str  # of a whole sequence of t tokens, per head; d is the size of a head
    # Causal, no later content reaches a token, but later tokens may decide which earlier ones it sees. The
    # recurrent form then gives what the last token of the sequence so far gets.
    lookahead: bool = False
    joint_queries: bool = False  # what a query gets depends on the queries it comes with
    placed_queries: bool = False  # in cross-attention it depends on its place among those it comes with


@runtime_checkable
class AttentionConfig(Protocol):
    """A mechanism's configuration, such as linear.Config() of lintra.attention.linear.

    `build` takes what `Attention` does after the configuration: heads, dim, causal, and kv_heads and
    value_dim if they differ from heads and dim."""

    def build(self, **shape: Any) -> "Attention": ...


class Attention(nn.Module):
    """Base of all mechanisms. q [b t h d], k [b s g d], v [b s g e] -> y [b t h e]; h a multiple of g.

    `forward` takes a whole sequence; `extend` any number of tokens after a state; `step` is the recurrence
    as its paper prints it, one token at a time. A causal mechanism needs to define only `start` and `step`:
    the loop over them here serves until there is a fast form, and as its reference afterwards.

    `mask` [b s] is True for real tokens. What stands in a padded place changes nothing, and y is 0 there.
    `forward_packed` and `extend_packed` take sequences of different lengths without padding, in one row.
    `rope` turns queries and keys by their positions (rotary embedding).
    """

    paper: ClassVar[str]
    shared_key: ClassVar[bool] = False  # queries and keys are one projection: q and k are the same
    no_weight_decay: ClassVar[tuple[str, ...]] = ()  # parameters that weight decay leaves alone
    supports_bf16_state: ClassVar[bool] = False  # `kv` of a state may be bfloat16, denominators not
    can: Capabilities  # of the class; a configuration may narrow it before this constructor runs

    def __init__(
        self,
        config: Any,
        *,
        heads: int,
        dim: int,
        causal: bool,
        kv_heads: int | None = None,
        value_dim: int | None = None,
    ):
        super().__init__()
        self.config = config
        self.name = type(self).__module__.rpartition(".")[2]
        if causal and not self.can.causal:
            raise ValueError(f"attention {self.name!r} ({self.paper}) has no causal form, got causal=True")
        if not causal and not self.can.bidirectional:
            raise ValueError(f"attention {self.name!r} is causal only with {config}, got causal=False")
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.dim, self.value_dim = dim, dim if value_dim is None else value_dim
        self.causal = causal
        self.rope_dim = (
            self.dim
        )  # the width of what `rope` is applied to; 0: nothing is, for `no_rope_reason`
        self.no_rope_reason = "has positions of its own"
        self.rope_warning = ""  # what may go wrong where it is rotated, of which a layer warns
        for what in ("heads", "kv_heads", "dim", "value_dim"):
            value = getattr(self, what)
            if not isinstance(value, int):
                raise TypeError(f"{what} must be int, got {value!r}")
            if value < 1:
                raise ValueError(f"{what} must be at least 1, got {value}")
        checks.heads(self.heads, self.kv_heads)
        self.group = self.heads // self.kv_heads  # query heads to a key-value head
        if self.shared_key and self.heads != self.kv_heads:
            raise ValueError(
                f"attention {self.name!r} has one projection for queries and keys: kv_heads must be "
                f"heads={self.heads}, got {self.kv_heads}"
            )

    def extra_inputs(self) -> dict[str, int]:
        """What it takes from the layer's input beyond q, k, v, such as a gate: name -> width."""
        return {}

    def initialize(self, qkv_proj: nn.Linear, extra: nn.ModuleDict) -> None:
        """Starts a layer's projections, to q, k, v in one and to what it reads; as they come by default."""

    def redraw(self, generator: torch.Generator) -> None:
        """Draws random features, hashes or blocks anew; for training, between steps. Nothing by default."""

    def forward(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b t g d"],
        v: Float[Tensor, "b t g e"],
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        rope: RotaryEmbedding | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "b t h e"]:
        """A whole sequence attending to itself."""
        state = self.start(q.shape[0], device=q.device, dtype=q.dtype)
        return self.extend(q, k, v, state, mask=mask, rope=rope, **extra)[0]

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before any token, for `batch` sequences of activations of `dtype`."""
        raise NotImplementedError(f"attention {self.name!r} has no recurrent form")

    def extend(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b t g d"],
        v: Float[Tensor, "b t g e"],
        state: State,
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        rope: RotaryEmbedding | None = None,
        **extra: Tensor,
    ) -> tuple[Float[Tensor, "b t h e"], State]:
        """Any number of tokens after `state`. Padded ones leave the state as it was."""
        self.check(q, k, v, mask)
        self.check_causal()
        q, k, v = zero_padding(mask, q, k, v)
        extra = {name: zero_padding(mask, x)[0] for name, x in extra.items()}
        ys = [q.new_zeros(q.shape[0], 0, self.heads, self.value_dim)]
        for i in range(q.shape[1]):
            one = slice(i, i + 1)
            y, after = self.step(
                q[:, one],
                k[:, one],
                v[:, one],
                state,
                rope=None if rope is None else rope.at(one),
                **{name: x[:, one] for name, x in extra.items()},
            )
            if mask is not None:
                y = zero_padding(mask[:, one], y)[0]
                after = select(mask[:, i], after, state)
            ys.append(y)
            state = after
        return torch.cat(ys, 1), state

    def forward_packed(
        self,
        q: Float[Tensor, "1 t h d"],
        k: Float[Tensor, "1 t g d"],
        v: Float[Tensor, "1 t g e"],
        cu_seqlens: Bounds,
        *,
        rope: RotaryEmbedding | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "1 t h e"]:
        """Each of the sequences in a row (`lintra.ops.packed`) attending to itself.

        `rope` and `extra` go by token, [1 t ...]. Here by `forward` of the sequences padded: the law of
        masks makes that right for every mechanism."""
        row = self.check_packed(q, k, v, cu_seqlens)

        def padded(position: Tensor | None = None, **rows: Any) -> Tensor:
            return self(rope=_turned(rope, position), **rows)

        return row.alike().each(padded, q=q, k=k, v=v, **_by_token(rope, extra))

    def extend_packed(
        self,
        q: Float[Tensor, "1 t h d"],
        k: Float[Tensor, "1 t g d"],
        v: Float[Tensor, "1 t g e"],
        state: State,
        cu_seqlens: Bounds,
        *,
        rope: RotaryEmbedding | None = None,
        **extra: Tensor,
    ) -> tuple[Float[Tensor, "1 t h e"], State]:
        """Any number of tokens after the `state` of each of n sequences: n prompts in one row, say."""
        packed = self.check_packed(q, k, v, cu_seqlens).together()
        given = {"q": q, "k": k, "v": v, **_by_token(rope, extra)}
        rows: dict[str, Any] = {name: packed.unpack(x)[0] for name, x in given.items()}
        turn = _turned(rope, rows.pop("position", None))
        y, after = self.extend(**rows, state=state, mask=packed.groups[0].mask, rope=turn)
        return packed.pack([y]), after

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        *,
        rope: RotaryEmbedding | None = None,
        **extra: Tensor,
    ) -> tuple[Tensor, State]:
        """One token, q [b 1 h d]: the recurrence."""
        raise NotImplementedError(f"attention {self.name!r} has no recurrent form")

    def encode_memory(self, k: Tensor, v: Tensor, mask: Bool[Tensor, "b s"] | None = None) -> State:
        """What cross-attention keeps of another sequence, k [b s g d], v [b s g e]."""
        self.check_cross()
        raise NotImplementedError(f"attention {self.name!r} declares a cross form and has no encode_memory")

    def cross_attend(
        self, q: Float[Tensor, "b t h d"], memory: State, mask: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t h e"]:
        """Every query reads all of the memory; `mask` is that of the queries, 0 where it is False."""
        self.check_cross()
        raise NotImplementedError(f"attention {self.name!r} declares a cross form and has no read")

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rope: RotaryEmbedding | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What most mechanisms begin with: q, k, v checked, padding zeroed, rotated."""
        self.check(q, k, v, mask)
        q, k, v = zero_padding(mask, q, k, v)
        return (q, k, v) if rope is None else (rope(q), rope(k), v)

    def sizes(self, batch: int) -> dict[str, int]:
        """What the letters of its shapes stand for."""
        return {"b": batch, "h": self.heads, "g": self.kv_heads, "d": self.dim, "e": self.value_dim}

    def check(self, q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        """Raises ValueError or TypeError unless q (None: there is none), k, v, mask go together and have the
        heads and widths this mechanism was built for."""
        sizes = {"h": self.heads, "g": self.kv_heads, "d": self.dim, "e": self.value_dim}
        if q is not None:
            checks.qkv(q, k, v, mask, sizes, same_length=True)
        else:
            checks.kv(k, v, mask, sizes)
        if self.shared_key and q is not None and k is not q and checks.readable(q, k, mask):
            same = (q == k) | q.isnan()
            if not bool(same.all() if mask is None else same[mask].all()):
                raise ValueError(f"attention {self.name!r} has one projection: k must be q")

    def check_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Bounds) -> PackedRow:
        """The same for a row of sequences -> the row, checked."""
        self.check(q, k, v, None)
        return PackedRow.of(cu_seqlens, "q", q)

    def check_extra(self, q: Tensor, **given: Tensor | None) -> list[Any]:
        """What was given beside q, k, v, in its order. Raises ValueError or TypeError unless that is what
        `extra` names; None stands for what it does not name."""
        widths = self.extra_inputs()
        for name, x in given.items():
            if x is None and name in widths:
                raise TypeError(f"attention {self.name!r} takes {name} [b t {widths[name]}], got None")
            if x is not None:
                if name not in widths:
                    raise TypeError(f"attention {self.name!r} takes no {name} with {self.config}")
                checks.shape(name, x, "b t w", {"b": q.shape[0], "t": q.shape[1], "w": widths[name]})
                checks.floating(name, x)
        return list(given.values())

    def check_rope(self, rope: RotaryEmbedding | None) -> None:
        """Raises ValueError where a rotation is asked of a mechanism that takes none, with the reason."""
        if rope is not None and not self.rope_dim:
            raise ValueError(f"attention {self.name!r} {self.no_rope_reason} and takes no rotation")

    def check_step(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> None:
        """Raises ValueError or TypeError unless there is one token, a causal mechanism and a state of it."""
        self.check(q, k, v, None)
        self.check_causal()
        if q.shape[1] != 1:
            raise ValueError(f"step takes one token, got t={q.shape[1]}: more go through extend")
        like = self.start(q.shape[0], device="meta", dtype=q.dtype)
        if type(state) is not type(like):
            raise TypeError(f"state must be a {type(like).__name__}, got {type(state).__name__}")
        map_state(same_form, like, state)

    def check_sums(self, state: State, kind: type, letters: tuple[str, ...], q: Tensor, **more: int) -> None:
        """Raises ValueError or TypeError unless a state of constant size is a `kind` that goes with q: of
        these letters (`more` are their own), in the dtype of sums; kv in bfloat16 too where it may be."""
        checks.parts("state", state, kind, letters, self.sizes(q.shape[0]) | more)
        for field, x in state._asdict().items():
            if x.is_floating_point():
                checks.state_dtype(f"state.{field}", x, q, narrow=self.supports_bf16_state and field == "kv")

    def no_keys(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of no tokens, for what reads a memory through a sum that adds nothing to it."""
        sizes = q.shape[0], 0, self.kv_heads
        return q.new_zeros(*sizes, self.dim), q.new_zeros(*sizes, self.value_dim)

    def check_cross_attend(self, q: Tensor, memory: State, kind: type, mask: Tensor | None) -> None:
        """Raises ValueError or TypeError unless q and its mask can read the memory, a `kind`."""
        self.check_cross()
        if not isinstance(memory, kind):
            raise TypeError(
                f"memory must be a {kind.__name__}, from encode_memory, got {type(memory).__name__}"
            )
        sizes = self.sizes(memory[0].shape[0])
        checks.shape("q", q, "b t h d", sizes)
        checks.floating("q", q)
        if mask is not None:
            checks.mask(mask, "b t", sizes, q.device)

    def cast_state(self, state: State, dtype: torch.dtype) -> State:
        """The state with kv in `dtype`, in which `extend` leaves it. What `check_state_dtype` raises."""
        self.check_state_dtype(dtype)
        return state._replace(kv=state.kv.to(dtype))

    def check_state_dtype(self, dtype: torch.dtype) -> None:
        """Raises ValueError unless kv of the state may be kept in `dtype`."""
        if dtype != torch.bfloat16:
            raise ValueError(f"state_dtype must be torch.bfloat16 or None, the dtype of sums; got {dtype}")
        if not self.supports_bf16_state:
            constant = self.can.state == "constant"
            why = "has no kv apart from its denominators" if constant else "has no state of constant size"
            raise ValueError(f"state_dtype must be None: attention {self.name!r} {why}")

    def check_causal(self) -> None:
        """Raises ValueError where a recurrent form is asked of a bidirectional mechanism."""
        if not self.causal:
            raise ValueError("start, extend and step need a mechanism built with causal=True")

    def check_cross(self) -> None:
        """Raises ValueError where cross-attention is asked of a mechanism without it, or of a causal one."""
        if not self.can.cross:
            raise ValueError(f"attention {self.name!r} has no cross form with {self.config}")
        if self.causal:
            raise ValueError("encode_memory and read need a mechanism built with causal=False")


def in_layer(config: Any, layer: int) -> Any:
    """A mechanism's `Config` for one layer of a network: layers draw different random features."""
    return dataclasses.replace(config, seed=config.seed + layer) if hasattr(config, "seed") else config


def _by_token(rope: RotaryEmbedding | None, extra: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is given for each token beside q, k, v; of a rotation, the positions."""
    given = {name: x for name, x in extra.items() if x is not None}
    return given if rope is None else given | {"position": rope.position}


def _turned(rope: RotaryEmbedding | None, position: Tensor | None) -> RotaryEmbedding | None:
    """The rotation at these positions."""
    return None if rope is None or position is None else rope._replace(position=position)

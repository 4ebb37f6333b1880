"""Longformer: Beltagy et al. 2020, arXiv:2004.05150, section 3. A window, and a few global tokens.

With a window w to each side, a dilation D and the set G of global tokens, a token i outside of G sees

    J_i = { j : |i - j| <= w D and D divides i - j }  and  G        y_i = softmax_J(scale q_i . k_j) v_j

a set: a global token inside of the window counts once. A token of G sees every token, through projections of
its own: y_i = softmax(scale q'_i . k'_j) v'_j over all j. Causal, both see j <= i only.

`window` is one-sided, as in the authors' code; others call the two sides together the window. Every head may
have a dilation of its own. Places count real tokens.

Cost of t tokens: t (2 w + 64) (d + e) multiplications and additions a head, t (w + 64) (d + e) when causal,
2 |G| t (d + e) for the global tokens, and three further projections. The state holds the last w D keys and
values and those of the global tokens; and, for later global tokens to read, their projections of the first
`global_tokens` tokens, or of all with `global_projections`.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention._scores import ScoredAttention
from lintra.attention._state import append
from lintra.attention.base import Capabilities, Exchange
from lintra.config import fields
from lintra.config.fields import spelled
from lintra.ops import checks
from lintra.ops.banded import banded_attention
from lintra.ops.layout import Layout
from lintra.ops.padding import LeftAlign, put_last, take, zero_padding
from lintra.ops.rope import RotaryEmbedding
from lintra.ops.softmax_attention import PartialAttention, merge_lse


@dataclass(frozen=True, kw_only=True)
class Config:
    """Longformer."""

    window: int = 256  # tokens a token sees to each side; causal: before its own
    dilation: int | tuple[int, ...] = 1  # one in this many tokens of the window is seen; or per head
    global_tokens: int = 0  # this many real tokens at the front see all and are seen by all
    global_projections: bool = False  # any token may be global: each call takes a global_mask
    global_limit: int | None = None  # most global tokens of a sample when masks name them; None: all
    scale: float | None = None  # multiplies the scores; no unit; None: (size of a head) ** -0.5
    dropout: float = 0.0  # probability of dropping a weight in training

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, window=0, global_tokens=0, global_limit=1)
        if self.global_limit is not None and not self.has_globals:
            raise ValueError(
                "global_limit needs global_projections=True or global_tokens: without them none is global, "
                f"got {self.global_limit}"
            )
        if min(self.dilations, default=0) < 1:
            raise ValueError(f"dilation must be at least 1, got {self.dilation}")
        fields.finite(self, "scale")
        fields.probability(self, "dropout")

    @property
    def has_globals(self) -> bool:
        """Return whether there may be global tokens, and projections for them."""
        return self.global_projections or self.global_tokens > 0

    @property
    def dilations(self) -> tuple[int, ...]:
        """One for all heads, or one for each."""
        return self.dilation if isinstance(self.dilation, tuple) else (self.dilation,)

    def build(self, **shape) -> "LongformerAttention":
        return LongformerAttention(self, **shape)


class Tokens(NamedTuple):
    """k [b s g d] and v [b s g e] of some tokens, and which of them count [b s]."""

    k: Tensor
    v: Tensor
    seen: Tensor


class LongformerState(NamedTuple):
    """Tokens kept, as copies in the dtype of the activations.

    near: the last real tokens, the newest at the end, of which windows see those that are not global.
    columns: the global tokens, as the others see them. rows: what global tokens see, projected for them.
    count [b]: real tokens so far.
    """

    near: Tokens
    columns: Tokens
    rows: Tokens
    count: Tensor


class _QKV(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


class _Inputs(NamedTuple):
    """Tokens as they are read, real ones in front.

    q [b t h d], k [b t g d], v [b t g e] by the local and by the global projections; which tokens are real
    and which global [b t]; at [b n], where the global ones are, as far as `there` [b n].
    """

    local: _QKV
    wide: _QKV
    real: Tensor
    chosen: Tensor
    at: Tensor
    there: Tensor


class LongformerAttention(ScoredAttention):
    """Longformer. State: the last keys and values, and those of the global tokens."""

    paper = "Beltagy et al. 2020, arXiv:2004.05150"
    rotates = True
    call_inputs = ("global_mask",)
    can = Capabilities(
        causal=True, bidirectional=True, cross=False, recurrent=True, state="window", cost="O(t w d)"
    )

    def __init__(self, config: Config, **shape):
        if config.global_projections:
            self.can = replace(self.can, state="grows")
        super().__init__(config, **shape)
        if len(config.dilations) not in (1, self.heads):
            raise ValueError(
                f"dilation must be one number or one for each of {self.heads} heads, got {config.dilation}"
            )

    def extra_inputs(self) -> dict[str, int]:
        """The projections of global tokens."""
        if not self.config.has_globals:
            return {}
        keys, values = self.kv_heads * self.dim, self.kv_heads * self.value_dim
        return {"global_q": self.heads * self.dim, "global_k": keys, "global_v": values}

    @torch.no_grad()
    def initialize(self, qkv_proj: nn.Linear, extra: nn.ModuleDict) -> None:
        """The global projections begin as copies of the local ones."""
        first = 0
        for name, width in self.extra_inputs().items():
            for ours, local in zip(extra[name].parameters(), qkv_proj.parameters(), strict=True):
                ours.copy_(local[first : first + width])
            first += width

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **extra: Any) -> Tensor:
        """`global_mask` [b t] says which tokens are global, instead of the first `global_tokens`.

        Their number is read from the mask. Where it cannot be read, while a graph is made or inside
        torch.func, room is made for `global_limit` of them, and the first ones of a sample are then global;
        without a limit room is made for t, at a cost of O(t^2 d). On a GPU, too, a limit saves waiting for
        the number. Raises ValueError for more than the limit, where they can be counted at no cost."""
        state = self.start(layout.n, device=q.device, dtype=q.dtype)
        x, left = self._enter(q, k, v, state, layout, **extra)
        if layout.shard is not None:
            aligned = layout if left is None else Layout(layout.rows, layout.time, q.device, mask=left.mask)
            count = self.config.window * max(self.config.dilations)
            (near_k, near_v), real = layout.shard.window([x.local.k, x.local.v], count, aligned)
            state = state._replace(near=Tokens(near_k, near_v, real))
        y = self._attend(x, state)
        return y if left is None else left.restore(y)

    def exchange(self) -> Exchange | None:
        return None if self.extra_inputs() else "window"

    def start(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LongformerState:
        nothing = Tokens(
            *self.no_tokens(batch, device, dtype),
            torch.empty(batch, 0, device=device, dtype=torch.bool),
        )
        count = torch.zeros(batch, device=device, dtype=torch.int64)
        return LongformerState(nothing, nothing, nothing, count)

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LongformerState, layout: Layout, **extra: Any
    ) -> tuple[Tensor, LongformerState]:
        """A `global_mask` needs global_projections=True: only then does the state hold all that a later
        global token reads. `global_limit` counts the global tokens of the state too."""
        self._check_later(extra)
        x, left = self._enter(q, k, v, state, layout, **extra)
        y = self._attend(x, state)
        return y if left is None else left.restore(y), self._after(x, state)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: LongformerState, **extra: Any
    ) -> tuple[Tensor, LongformerState]:
        """One token against the window and the global tokens, weight by weight: the reference of `extend`."""
        self._check_later(extra)
        x, _ = self._enter(q, k, v, state, Layout(q.shape[0], 1, q.device), **extra)
        near = append(state.near, Tokens(x.local.k, x.local.v, ~x.chosen))
        distance = torch.arange(near.k.shape[1] - 1, -1, -1, device=q.device)
        dilation = torch.tensor(self.config.dilations, device=q.device)[:, None]
        band = (distance % dilation == 0) & (distance <= self.config.window * dilation)  # [h s] or [1 s]
        columns = append(state.columns, Tokens(x.local.k, x.local.v, x.chosen))
        everything = Tokens(*(torch.cat(pair, 1) for pair in zip(near, columns, strict=True)))
        band = functional.pad(band, (0, columns.k.shape[1]), value=True)
        y = self._weigh(x.local.q, everything, everything.seen[:, None] & band)
        if self.extra_inputs():
            rows = append(state.rows, Tokens(x.wide.k, x.wide.v, x.real))
            of_all = self._weigh(x.wide.q, rows, rows.seen[:, None])
            y = torch.where(x.chosen[..., None, None], of_all, y)
        return y, self._after(x, state)

    def _weigh(self, q: Tensor, tokens: Tokens, visible: Tensor) -> Tensor:
        """One query q [b 1 h d], visible [b h s] or [b 1 s]; it sees something."""
        return self.weigh(self.scores(q, tokens.k), visible[:, None], tokens.v).to(tokens.v.dtype)

    def _enter(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LongformerState,
        layout: Layout,
        *,
        rope: RotaryEmbedding | None = None,
        global_mask: Tensor | None = None,
        **projected: Tensor,
    ) -> tuple[_Inputs, LeftAlign | None]:
        """Rotated, real tokens in front."""
        left = layout.left_align()

        def prepare(q: Tensor, k: Tensor, v: Tensor) -> _QKV:
            rotated = (q, k, v) if rope is None else (rope(q), rope(k), v)
            return _QKV(*(rotated if left is None else map(left.gather, rotated)))

        local = prepare(q, k, v)
        # Without projections for them there are no global tokens: their placeholders are not read.
        wide = local
        if projected:
            sizes = {"global_q": self.dim, "global_k": self.dim, "global_v": self.value_dim}
            own = {name: projected[name].to(q.dtype) for name in sizes}  # as the state keeps them
            wide = prepare(*(own[name].unflatten(2, (-1, size)) for name, size in sizes.items()))
        real = layout.real(q) if left is None else left.mask
        if global_mask is None:
            place = state.count[:, None] + torch.arange(q.shape[1], device=q.device)
            chosen, n = real & (place < self.config.global_tokens), self.config.global_tokens
        else:
            chosen = global_mask if left is None else left.gather(global_mask)
            chosen, n = self._limited(chosen, state.columns.seen.sum(1))
        at = put_last(~chosen)[:, :n]
        return _Inputs(local, wide, real, chosen, at, chosen.gather(1, at)), left

    def _limited(self, chosen: Tensor, before: Tensor) -> tuple[Tensor, int]:
        """The global tokens [b t] of a mask, and how many of them a sample has at most; `before` [b] came in
        earlier calls."""
        limit = self.config.global_limit
        if limit is None:
            return chosen, _most(chosen)
        place = before[:, None] + chosen.cumsum(1)
        if not checks.readable(place):
            return chosen & (place <= limit), min(limit, chosen.shape[1])
        most = int(place.masked_fill(~chosen, 0).max()) if chosen.numel() else 0
        if most > limit:
            raise ValueError(
                f"global_limit={limit} tokens of a sample may be global, and global_mask marks number {most}"
            )
        return chosen, _most(chosen)

    def _attend(self, x: _Inputs, state: LongformerState) -> Tensor:
        """y [b t h e] of these tokens after `state`."""
        # Sets: a global token counts among the columns and not in a window.
        near = append(state.near, Tokens(x.local.k, x.local.v, x.real & ~x.chosen))
        partial = self._window(x.local.q, near)
        if not self.extra_inputs():
            return partial.o.to(x.local.v.dtype)
        columns, rows = self._columns(x, state), append(state.rows, Tokens(x.wide.k, x.wide.v, x.real))
        sees_columns, sees_rows = columns.seen[:, None], rows.seen[:, None]
        if self.causal:
            place = torch.arange(x.local.q.shape[1], device=x.local.q.device).expand(x.local.q.shape[0], -1)
            sees_columns = sees_columns & (_behind(x.at, columns)[:, None] <= place[:, :, None])
            sees_rows = sees_rows & (_behind(place, rows)[:, None] <= x.at[:, :, None])
        y = merge_lse(partial, self.partial_attention(x.local.q, columns.k, columns.v, sees_columns)).o
        of_all = self.partial_attention(take(x.wide.q, x.at), rows.k, rows.v, sees_rows).o
        of_all = torch.zeros_like(y).scatter(1, x.at[..., None, None].expand_as(of_all), of_all)
        return torch.where(x.chosen[..., None, None], of_all, y).to(x.local.v.dtype)

    def _window(self, q: Tensor, near: Tokens) -> PartialAttention:
        """Attention of the last queries to what counts within the window."""
        before, after = self.config.window, 0 if self.causal else self.config.window
        options = {"dilation": self.config.dilations, "visible": near.seen, **self.weighing()}
        return banded_attention(q, near.k, near.v, before=before, after=after, **options)

    def _columns(self, x: _Inputs, state: LongformerState) -> Tokens:
        """The global tokens, those read now after those of the state."""
        k, v = zero_padding(x.there, take(x.local.k, x.at), take(x.local.v, x.at))
        return append(state.columns, Tokens(k, v, x.there))

    def _after(self, x: _Inputs, state: LongformerState) -> LongformerState:
        near = append(state.near, Tokens(x.local.k, x.local.v, x.real & ~x.chosen))
        columns = self._columns(x, state)
        rows = append(state.rows, Tokens(x.wide.k, x.wide.v, x.real))
        kept = self.config.window * max(self.config.dilations)
        # The state has its padding in front.
        old = torch.arange(state.near.k.shape[1] - 1, -1, -1, device=x.local.q.device) < state.count[:, None]
        last = put_last(torch.cat((old, x.real), 1))[:, max(0, near.k.shape[1] - kept) :]
        if self.config.global_projections:
            n = _most(columns.seen)
        else:
            n = self.config.global_tokens
            rows = Tokens(*(take(part, put_last(~rows.seen)[:, :n]) for part in rows))
        columns = Tokens(*(take(part, put_last(~columns.seen)[:, :n]) for part in columns))
        near = Tokens(*(take(part, last) for part in near))
        return LongformerState(near, columns, rows, state.count + x.real.sum(1))

    def check_extra(self, q: Tensor, extra: dict[str, Any]) -> None:
        """Raise ValueError or TypeError unless global projections and a global_mask go with q."""
        global_mask = extra.get("global_mask")
        super().check_extra(q, extra)
        if global_mask is None:
            return
        if not self.extra_inputs():
            raise ValueError("a global_mask needs global_projections=True: there are none for global tokens")
        checks.shape("global_mask", global_mask, "b t", {"b": q.shape[0], "t": q.shape[1]})
        if global_mask.dtype != torch.bool:
            raise TypeError(f"global_mask must be boolean, True for a global token, got {global_mask.dtype}")

    def _check_later(self, extra: dict[str, Any]) -> None:
        if extra.get("global_mask") is not None and not self.config.global_projections:
            raise ValueError(
                "after a state, a global_mask needs global_projections=True: only then does the state hold "
                f"what later global tokens read, got {spelled(self.config)}"
            )


def _behind(place: Tensor, tokens: Tokens) -> Tensor:
    """Return the places [b s] of tokens, the last of which have these, the others earlier ones."""
    return functional.pad(place, (tokens.seen.shape[1] - place.shape[1], 0), value=-1)


def _most(chosen: Tensor) -> int:
    """Return how many of [b s] are True in the sample with the most of them; s where that cannot be read."""
    if not checks.has_values(chosen) or checks.transformed(chosen):
        return chosen.shape[1]
    return int(chosen.sum(1).max()) if len(chosen) else 0

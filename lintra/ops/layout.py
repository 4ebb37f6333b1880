"""Layout of the tokens of a batch: dense, masked, or packed one sequence after the other.

One `Layout` is made where tensors enter a model or a public layer, validated there, and handed down: nothing
below validates a mask again, counts positions again or looks for the longest sequence again.

In a packed batch the tokens of sequence i are those from cu_seqlens[i] up to cu_seqlens[i+1]; equal
neighbours are a sequence without tokens. Each sequence gives the output it gives alone, so no matrix product
mixes two of them: there a NaN would spread from one to all.

Letters: b rows and t places of a tensor, n sequences; b = n unless the batch is packed, where b = 1.
k sequences of a bucket and m tokens of its longest.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lintra.ops import checks
from lintra.ops.dispatch import once
from lintra.ops.padding import LeftAlign, real_tokens, zero_padding
from lintra.ops.rope import RotaryEmbedding
from lintra.ops.state import map_state

if TYPE_CHECKING:
    from lintra.ops.sequence_shard import SequenceShard

SHORT = 16  # tokens: of shorter sequences the padding costs less than a bucket of their own

_State = TypeVar("_State")


class Layout:
    """The places of real tokens in tensors [b t ...], and how many tokens each sequence has before them.

    Dense (every place holds a token), padded (`mask` [b t], True for real tokens) or packed (`cu_seqlens`
    [n+1], b = 1). `seen` [n] counts the tokens before; None: none. `Layout.of` validates; the constructor is
    for callers whose tensors are validated.
    """

    def __init__(
        self,
        rows: int,  # b
        time: int,  # t
        device: torch.device,  # of the tensors
        *,
        mask: Bool[Tensor, "b t"] | None = None,  # True: a real token; None: all are
        cu_seqlens: Int[Tensor, "bounds"] | None = None,  # where packed sequences begin, and the last ends
        seen: Int[Tensor, "n"] | None = None,  # tokens before, of each sequence; None: none
    ):
        self.rows, self.time, self.device = rows, time, device
        self.mask, self.cu_seqlens, self.seen = mask, cu_seqlens, seen
        self.packed = cu_seqlens is not None
        self.n = rows if cu_seqlens is None else len(cu_seqlens) - 1
        # Of a shard of a packed batch: its first sequence began before it, its last continues after it. None:
        # these places are no such shard.
        self.begun: bool | None = None
        self.unfinished: bool | None = None
        # These places are a rank's shard of sequences; `after` drops it.
        self.shard: SequenceShard | None = None
        self._made: dict[Any, Any] = {}  # results that depend on `seen`
        self._laid: dict[Any, Any] = {}  # results that do not: `after` shares them

    @classmethod
    def of(
        cls,
        name: str,
        x: Tensor,
        mask: Bool[Tensor, "b t"] | None = None,
        cu_seqlens: "CuSeqlens | None" = None,
    ) -> "Layout":
        """Return the layout of x [b t ...], which errors call `name`.

        Raises ValueError or TypeError unless the mask is boolean [b t]; cu_seqlens is [n+1] and goes from 0
        to t without decreasing, where that is readable, and b is 1; and at most one of the two is given.
        """
        if cu_seqlens is not None and mask is not None:
            raise ValueError("cu_seqlens and mask exclude each other: packed sequences have no padding")
        if isinstance(cu_seqlens, Layout):
            cu_seqlens.check(name, x)
            return cu_seqlens
        if cu_seqlens is not None:
            _check_cu_seqlens(cu_seqlens, name, x)
        elif mask is not None:
            checks.mask(mask, "b t", {"b": x.shape[0], "t": x.shape[1]}, x.device)
        return cls(x.shape[0], x.shape[1], x.device, mask=mask, cu_seqlens=cu_seqlens)

    def after(self, seen: Int[Tensor, "n"] | None) -> "Layout":
        """Return the same places after `seen` [n] tokens of each sequence (None: none); they are no
        rank's shard."""
        places = {"mask": self.mask, "cu_seqlens": self.cu_seqlens}
        layout = Layout(self.rows, self.time, self.device, **places, seen=seen)
        layout._laid, layout.begun, layout.unfinished = self._laid, self.begun, self.unfinished
        return layout

    def reversed(self) -> "Layout":
        """Return the layout of x.flip(1), in which each sequence is read from its end. Raises ValueError
        after tokens that were seen."""
        if self.seen is not None or self.shard is not None:
            raise ValueError("a sequence is read from its end as a whole, not behind a state or in shards")
        return once(self._laid, "reversed", self._reversed)

    def _reversed(self) -> "Layout":
        places = {
            "mask": None if self.mask is None else self.mask.flip(1),
            "cu_seqlens": None if self.cu_seqlens is None else self.time - self.cu_seqlens.flip(0),
        }
        return Layout(self.rows, self.time, self.device, **places)

    def check(self, name: str, x: Tensor) -> None:
        """Raise ValueError unless x [b t ...] has these rows, this time and this device."""
        if x.shape[:2] != (self.rows, self.time) or x.device != self.device:
            raise ValueError(
                f"the layout is for b={self.rows} and t={self.time} on {self.device}, {name} has shape "
                f"{list(x.shape)} on {x.device}"
            )

    @property
    def new(self) -> int | Int[Tensor, "n"]:
        """The number of real tokens in each sequence; one number where all have the same."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff()
        return self.time if self.mask is None else self.mask.sum(1)

    def seen_after(self) -> Int[Tensor, "n"]:
        """Return how many tokens each sequence has with these."""
        return once(self._made, "seen", lambda: self._seen + self.new)

    def zero(self, x: Tensor) -> Tensor:
        """Return x [b t ...] with zeros, and no gradient, where there is no token; NaN there is removed."""
        return x if self.mask is None else zero_padding(self.mask, x)[0]

    def real(self, x: Tensor) -> Bool[Tensor, "b t"]:
        """Return which places of x [b t ...] hold a token."""
        return real_tokens(self.mask, x)

    def positions(self) -> Int[Tensor, "b t"]:
        """Return the position of each token in its own sequence, from 0; -1 where there is none."""
        return once(self._made, "positions", self._positions)

    def _positions(self) -> Tensor:
        seen = self._seen
        if self.packed:
            sequence, place = self.locate()
            return (seen[sequence] + place)[None]
        if self.mask is None:
            return seen[:, None] + torch.arange(self.time, device=self.device)
        return torch.where(self.mask, seen[:, None] + self.mask.cumsum(1) - 1, -1)

    @property
    def _seen(self) -> Int[Tensor, "n"]:
        if self.seen is not None:
            return self.seen
        return torch.zeros(self.n, dtype=torch.int64, device=self.device)

    def rope(self, base: float) -> RotaryEmbedding:
        """Return the rotary embedding of these positions; no wavelength is longer than 2 pi base tokens."""
        return once(self._made, ("rope", base), lambda: RotaryEmbedding(self.positions(), base))

    def left_align(self) -> LeftAlign | None:
        """Return how the real tokens of a padded batch are moved to the front; None for any other."""
        mask = self.mask
        return None if mask is None else once(self._laid, "left", lambda: LeftAlign.of(mask))

    def locate(self) -> tuple[Int[Tensor, "t"], Int[Tensor, "t"]]:
        """Return the sequence of each token of a packed batch, and its place in it."""
        return once(self._laid, "locate", lambda: locate(self._bounds, self.time))

    def split_first(self) -> "tuple[Layout, Layout | None]":
        """Return the layouts of the first sequence of a packed batch, alone and dense, and of the others."""
        return once(self._laid, "split", self._split_first)

    def _split_first(self) -> "tuple[Layout, Layout | None]":
        first = int(self._bounds[1])
        alone = Layout(1, first, self.device)
        if self.n == 1:
            return alone, None
        return alone, Layout(1, self.time - first, self.device, cu_seqlens=self._bounds[1:] - first)

    def split_ends(self) -> "tuple[Layout, Layout | None, Layout | None]":
        """Return the layouts of the first sequence of a packed batch and of the last, alone and dense, and
        between them of the others; None where there are none."""
        first, others = self.split_first()
        if others is None:
            return first, None, None
        last = Layout(1, int(others._bounds[-1] - others._bounds[-2]), self.device)
        if others.n == 1:
            return first, None, last
        bounds = others._bounds[:-1]
        return first, Layout(1, int(bounds[-1]), self.device, cu_seqlens=bounds), last

    def pad_all(self) -> "Padded":
        """Return the sequences of a packed batch as one padded batch, as long as the longest."""
        return once(self._laid, "all", lambda: _pad_all(self._bounds, self.time))

    def pad_bucketed(self) -> "Padded":
        """Return the sequences of a packed batch as padded batches of similar length each."""
        return once(self._laid, "bucketed", lambda: _pad_bucketed(self._bounds, self.time))

    @property
    def _bounds(self) -> Int[Tensor, "bounds"]:
        assert self.cu_seqlens is not None, "only a packed batch has sequences to pad"
        return self.cu_seqlens


# [n+1], from 0 to t without decreasing; or a layout, validated and laid out once for many calls
CuSeqlens: TypeAlias = Int[Tensor, "bounds"] | Layout


class Padded(NamedTuple):
    """A packed batch as padded ones, and back, each way one indexing.

    sequences: those [k] of each bucket. layouts: where their tokens are in [k m ...]. The padded tokens of
    all buckets lie one after the other; `place` [t] gives the place of each packed token there.
    """

    place: Int[Tensor, "t"]
    sequences: tuple[Int[Tensor, "k"], ...]
    layouts: tuple[Layout, ...]

    def unpack(self, x: Tensor) -> list[Tensor]:
        """Return [k m ...] of each bucket of x [1 t ...], 0 where there is no token.

        Raises ValueError for another t."""
        if x.shape[:2] != (1, len(self.place)):
            raise ValueError(f"what is packed must be [1 t={len(self.place)} ...], got shape {list(x.shape)}")
        sizes = [(layout.rows, layout.time) for layout in self.layouts]
        padded = x.new_zeros(sum(k * m for k, m in sizes), *x.shape[2:]).index_copy(0, self.place, x[0])
        parts = padded.split([k * m for k, m in sizes])
        return [part.unflatten(0, size) for part, size in zip(parts, sizes, strict=True)]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [1 t ...] of [k m ...] of each bucket; padded places are dropped."""
        padded = [part.flatten(0, 1) for part in parts]
        return (padded[0] if len(padded) == 1 else torch.cat(padded)).index_select(0, self.place)[None]

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [n ...] in the order of the batch of what each bucket has for its sequences [k ...]."""
        return torch.cat(list(parts))[torch.cat(self.sequences).argsort()]

    def each(self, function: Callable[..., Tensor], **packed: Tensor) -> Tensor:
        """Return, packed again, the results of `function`, called for each bucket with a `layout` and the
        tensors by name, padded."""
        parts = {name: self.unpack(x) for name, x in packed.items()}
        return self.pack(
            [
                function(layout=layout, **{name: part[i] for name, part in parts.items()})
                for i, layout in enumerate(self.layouts)
            ]
        )

    def each_with_state(
        self, function: Callable[..., tuple[Tensor, _State]], state: _State, **packed: Tensor | None
    ) -> tuple[Tensor, _State]:
        """Return the results of `function`, called for each bucket with a `layout`, a `state` and the tensors
        by name, padded: y, packed again, and the states in the order of the batch.

        A state is a tensor [n ...] or a NamedTuple of such. A tensor that is None is passed on as None."""
        parts = {name: None if x is None else self.unpack(x) for name, x in packed.items()}
        ys, states = [], []
        for i, (sequences, layout) in enumerate(zip(self.sequences, self.layouts, strict=True)):
            tensors = {name: None if part is None else part[i] for name, part in parts.items()}
            before = map_state(lambda x, which=sequences: x[which], state)
            y, after = function(layout=layout, state=before, **tensors)
            ys.append(y)
            states.append(after)
        return self.pack(ys), map_state(lambda *x: self.in_order(x), *states)


def locate(cu_seqlens: Int[Tensor, "bounds"], time: int) -> tuple[Int[Tensor, "t"], Int[Tensor, "t"]]:
    """Return the sequence of each token of a packed batch, and its place in it."""
    places = torch.arange(time, device=cu_seqlens.device)
    ends = cu_seqlens[1:].to(torch.int64)
    sequence = torch.searchsorted(ends, places, right=True)
    return sequence, places - cu_seqlens[sequence]


def sequence_bounds(number: Int[Tensor, "b t"]) -> Int[Tensor, "bounds"]:
    """Return cu_seqlens [n+1] of rows laid end to end, given the number of each token's sequence.

    A sequence ends where its number changes, and with its row. Where values cannot be read, it is an error.
    """
    begins = torch.nn.functional.pad(number.diff(dim=1) != 0, (1, 0), value=True).flatten().nonzero()[:, 0]
    return torch.cat((begins, begins.new_full((1,), number.numel())))


def _pad_all(cu_seqlens: Tensor, time: int) -> Padded:
    """One bucket of all sequences in their order.

    Where values cannot be read, while a graph is made, the longest is taken to be the whole batch."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if checks.has_values(lengths) and len(lengths) else time
    every = torch.arange(len(lengths), device=lengths.device)
    return _pad(cu_seqlens, time, [(every, longest)])


def _pad_bucketed(cu_seqlens: Tensor, time: int) -> Padded:
    """Buckets whose longest is less than twice their shortest, or shorter than SHORT: at most as many padded
    tokens as real ones, up to SHORT a sequence, whatever the lengths."""
    lengths = cu_seqlens.diff()
    if not (len(lengths) and checks.has_values(lengths)):
        return _pad_all(cu_seqlens, time)
    octave = torch.frexp(lengths.cpu().clamp(min=SHORT - 1).double()).exponent  # not all devices have float64
    buckets = [(octave == i).nonzero()[:, 0].to(lengths.device) for i in octave.unique()]
    return _pad(cu_seqlens, time, [(bucket, int(lengths[bucket].max())) for bucket in buckets])


def _pad(cu_seqlens: Tensor, time: int, buckets: list[tuple[Tensor, int]]) -> Padded:
    lengths, start = cu_seqlens.diff(), torch.zeros_like(cu_seqlens[1:], dtype=torch.int64)
    layouts, total = [], 0
    for bucket, m in buckets:
        mask = torch.arange(m, device=bucket.device) < lengths[bucket, None]
        start[bucket] = total + m * torch.arange(len(bucket), device=bucket.device)
        dense = checks.has_values(mask) and bool(mask.all())
        layouts.append(Layout(len(bucket), m, bucket.device, mask=None if dense else mask))
        total += m * len(bucket)
    sequence, position = locate(cu_seqlens, time)
    return Padded(start[sequence] + position, tuple(bucket for bucket, _ in buckets), tuple(layouts))


def _check_cu_seqlens(cu_seqlens: Tensor, name: str, x: Tensor) -> None:
    if x.shape[0] != 1:
        raise ValueError(
            f"with cu_seqlens all sequences lie in one row: {name} must be [1 t ...], got {list(x.shape)}"
        )
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor [n+1], got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens must be [n+1] for n sequences, got shape {list(cu_seqlens.shape)}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"cu_seqlens must be on the device of {name}, {x.device}, got {cu_seqlens.device}")
    if checks.transformed(cu_seqlens):
        raise ValueError(
            "cu_seqlens must be the same for all that vmap maps over: it decides what shapes there are; "
            "a mask may differ"
        )
    if checks.readable(cu_seqlens):
        places = cu_seqlens.tolist()  # one look at the device
        if places[0] != 0:
            raise ValueError(f"cu_seqlens must begin with 0, got {places[0]}")
        if places[-1] != x.shape[1]:
            raise ValueError(
                f"cu_seqlens must end with the number of tokens, t={x.shape[1]}, got {places[-1]}"
            )
        for before, after in pairwise(places):
            if after < before:
                raise ValueError(f"cu_seqlens must not decrease, got {before} before {after}")

"""Sequences of different lengths one behind the other in one row, and the same sequences padded.

The tokens of sequence i are those of the row from cu_seqlens[i] up to cu_seqlens[i+1]. `cu_seqlens` [n+1]
goes from 0 to t without decreasing; equal neighbours are a sequence without tokens. A sequence gives what it
gives alone, so none meets another in a matrix product: there a NaN would go from one to all.

Letters: n sequences, t tokens of all together, k sequences of a group and m tokens of its longest.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lintra.ops import checks

SHORT = 16  # tokens: of shorter sequences the padding costs less than a group of their own


class Group(NamedTuple):
    """Sequences [k] of about the same length; which of their m places hold tokens, None for all."""

    sequences: Int[Tensor, "k"]
    mask: Bool[Tensor, "k m"] | None


class Packed(NamedTuple):
    """From a row to its sequences padded and back, each way one indexing.

    The padded tokens of all groups lie one behind the other; `place` [t] says where each of the row is there.
    """

    place: Int[Tensor, "t"]
    groups: tuple[Group, ...]
    sizes: tuple[tuple[int, int], ...]  # k and m of each group

    @classmethod
    def together(cls, cu_seqlens: Int[Tensor, "bounds"], time: int) -> "Packed":
        """One group of all sequences in their order, padded to the longest.

        Where values cannot be read, while a graph is made, the longest may be all of the row."""
        lengths = cu_seqlens.diff()
        longest = int(lengths.max()) if _known(lengths) and len(lengths) else time
        every = torch.arange(len(lengths), device=lengths.device)
        return cls._of(cu_seqlens, time, [(every, longest)])

    @classmethod
    def alike(cls, cu_seqlens: Int[Tensor, "bounds"], time: int) -> "Packed":
        """Groups whose longest is less than twice their shortest, or shorter than SHORT: at most as many
        padded tokens as real ones, up to SHORT a sequence, whatever the lengths."""
        lengths = cu_seqlens.diff()
        if not (len(lengths) and _known(lengths)):
            return cls.together(cu_seqlens, time)
        octave = torch.frexp(lengths.clamp(min=SHORT - 1).double()).exponent
        groups = [(octave == i).nonzero()[:, 0] for i in octave.unique()]
        return cls._of(cu_seqlens, time, [(group, int(lengths[group].max())) for group in groups])

    @classmethod
    def _of(cls, cu_seqlens: Tensor, time: int, groups: list[tuple[Tensor, int]]) -> "Packed":
        lengths, start = cu_seqlens.diff(), torch.zeros_like(cu_seqlens[1:], dtype=torch.int64)
        made, total = [], 0
        for group, m in groups:
            places = torch.arange(m, device=group.device)
            mask = places < lengths[group, None]
            start[group] = total + m * torch.arange(len(group), device=group.device)
            made.append(Group(group, None if _known(mask) and bool(mask.all()) else mask))
            total += m * len(group)
        sequence, position = locate(cu_seqlens, time)
        return cls(start[sequence] + position, tuple(made), tuple((len(group), m) for group, m in groups))

    def unpack(self, x: Tensor) -> list[Tensor]:
        """x [1 t ...] -> [k m ...] of each group, 0 where there is no token. ValueError for another t."""
        if x.shape[:2] != (1, len(self.place)):
            raise ValueError(f"what is packed must be [1 t={len(self.place)} ...], got shape {list(x.shape)}")
        sizes = [k * m for k, m in self.sizes]
        padded = x.new_zeros(sum(sizes), *x.shape[2:]).index_copy(0, self.place, x[0])
        parts = padded.split(sizes)
        return [part.unflatten(0, size) for part, size in zip(parts, self.sizes, strict=True)]

    def pack(self, parts: list[Tensor]) -> Tensor:
        """[k m ...] of each group -> the row [1 t ...]; what stands where there is no token is dropped."""
        padded = [part.flatten(0, 1) for part in parts]
        return (padded[0] if len(padded) == 1 else torch.cat(padded)).index_select(0, self.place)[None]

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """What each group has for its sequences [k ...] -> [n ...] in the order of the row."""
        return torch.cat(list(parts))[torch.cat([group.sequences for group in self.groups]).argsort()]

    def each(self, function: Callable[..., Tensor], **rows: Tensor) -> Tensor:
        """`function` of the `mask` [k m] and the rows by name, padded to [k m ...], for every group; what it
        gives, [k m ...], in a row again."""
        parts = {name: self.unpack(x) for name, x in rows.items()}
        return self.pack(
            [
                function(mask=group.mask, **{name: part[i] for name, part in parts.items()})
                for i, group in enumerate(self.groups)
            ]
        )


class PackedRow:
    """A row of n sequences, its bounds checked. A network makes one of `cu_seqlens` at its entrance and hands
    it down, so that checking and laying out, which waits for a GPU, happen once and not in every layer.
    Whatever takes `cu_seqlens` takes it too.
    """

    def __init__(self, cu_seqlens: Int[Tensor, "bounds"], time: int):
        self.cu_seqlens, self.time, self.n = cu_seqlens, time, len(cu_seqlens) - 1
        self._made: dict[str, Any] = {}

    @classmethod
    def of(cls, cu_seqlens: "Bounds", name: str, row: Tensor, mask: Tensor | None = None) -> "PackedRow":
        """The sequences of the row [1 t ...]. Raises ValueError or TypeError unless cu_seqlens is [n+1], goes
        from 0 to t without decreasing, where that is readable, and there is no mask."""
        if row.shape[0] != 1:
            raise ValueError(
                f"with cu_seqlens all sequences lie in one row: {name} must be [1 t ...], got "
                f"shape {list(row.shape)}"
            )
        if mask is not None:
            raise ValueError("cu_seqlens and mask exclude each other: packed sequences have no padding")
        if not isinstance(cu_seqlens, PackedRow):
            _check_bounds(cu_seqlens, name, row)
            return cls(cu_seqlens, row.shape[1])
        _check_device(cu_seqlens.cu_seqlens, name, row)
        if cu_seqlens.time != row.shape[1]:
            raise ValueError(f"cu_seqlens is of a row of t={cu_seqlens.time}, {name} has t={row.shape[1]}")
        return cu_seqlens

    @property
    def lengths(self) -> Int[Tensor, "n"]:
        return self.cu_seqlens.diff()

    def together(self) -> Packed:
        """As `Packed.together`."""
        return self._once("together", Packed.together)

    def alike(self) -> Packed:
        """As `Packed.alike`."""
        return self._once("alike", Packed.alike)

    def locate(self) -> tuple[Int[Tensor, "t"], Int[Tensor, "t"]]:
        """As the function of that name."""
        return self._once("locate", locate)

    def _once(self, name: str, make: Callable[[Tensor, int], Any]) -> Any:
        # A compiler sees for itself what is computed twice, and an object must not change in a block that is
        # computed again in the backward; and what inference mode makes, no backward may keep.
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return make(self.cu_seqlens, self.time)
        if name not in self._made:
            self._made[name] = make(self.cu_seqlens, self.time)
        return self._made[name]


Bounds: TypeAlias = Int[Tensor, "bounds"] | PackedRow


def locate(cu_seqlens: Int[Tensor, "bounds"], time: int) -> tuple[Int[Tensor, "t"], Int[Tensor, "t"]]:
    """For each token of the row, its sequence and its place in it."""
    places = torch.arange(time, device=cu_seqlens.device)
    ends = cu_seqlens[1:].to(torch.int64)
    sequence = torch.searchsorted(ends, places, right=True)
    return sequence, places - cu_seqlens[sequence]


def packed_row(cu_seqlens: Bounds | None, name: str, x: Tensor, mask: Tensor | None) -> PackedRow | None:
    """As `PackedRow.of`, or None where x [b t ...] is a batch."""
    return None if cu_seqlens is None else PackedRow.of(cu_seqlens, name, x, mask)


def count_sequences(x: Tensor, row: PackedRow | None) -> int:
    """How many there are in x [b t ...]: b, or those of a row."""
    return x.shape[0] if row is None else row.n


def new_tokens(x: Tensor, mask: Tensor | None, row: PackedRow | None) -> int | Tensor:
    """How many real tokens the sequences in x [b t ...] have: each its own, or all the same."""
    if row is not None:
        return row.lengths
    return x.shape[1] if mask is None else mask.sum(1)


def _check_bounds(cu_seqlens: Tensor, name: str, row: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor [n+1], got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens must be [n+1] for n sequences, got shape {list(cu_seqlens.shape)}")
    _check_device(cu_seqlens, name, row)
    if checks.transformed(cu_seqlens):
        raise ValueError(
            "cu_seqlens must be the same for all that vmap maps over: it decides what shapes there are; "
            "a mask may differ"
        )
    if checks.readable(cu_seqlens):
        places = cu_seqlens.tolist()  # one look at the device
        if places[0] != 0:
            raise ValueError(f"cu_seqlens must begin with 0, got {places[0]}")
        if places[-1] != row.shape[1]:
            raise ValueError(
                f"cu_seqlens must end with the number of tokens, t={row.shape[1]}, got {places[-1]}"
            )
        for before, after in pairwise(places):
            if after < before:
                raise ValueError(f"cu_seqlens must not decrease, got {before} before {after}")


def _check_device(cu_seqlens: Tensor, name: str, row: Tensor) -> None:
    if cu_seqlens.device != row.device:
        raise ValueError(f"cu_seqlens must be on the device of {name}, {row.device}, got {cu_seqlens.device}")


def _known(x: Tensor) -> bool:
    """Whether there are values to be read, at some cost on a GPU: sizes are worth it."""
    return x.device.type != "meta" and not torch.compiler.is_compiling()

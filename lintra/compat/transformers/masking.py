"""The mask function of lintra's attention in transformers: the keys a query sees, without a t x t mask."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as masks

from lintra.ops import checks
from lintra.ops.layout import Layout, sequence_bounds


class Visible(NamedTuple):
    """The queries are the last t of s keys; each sees those of its sequence, up to itself where causal.

    window: keys a query sees, its own included; None: all. mask [b s]: True for real keys; None: all are.
    sequence [b t]: the number of each token's packed sequence, neighbours differ; None: nothing is packed.
    size: t, s and the device, where a mask function knows them. masked: whether a mask was given; if
    `mask` is None all the same, every key was real. holes: whether there is padding between the keys of a
    sample, those before s included, which a window of transformers counts.
    """

    causal: bool
    window: int | None = None
    mask: Tensor | None = None
    sequence: Tensor | None = None
    size: tuple[int, int, Any] | None = None
    masked: bool = False
    holes: bool = False

    def __getitem__(self, index: Any) -> Any:  # pyright: ignore (a model may slice it as the tensor it is)
        return self.contiguous()[index] if isinstance(index, tuple) else tuple.__getitem__(self, index)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError that says why a model finds no tensor."""
        raise AttributeError(_reads_mask(name))

    def __add__(self, scores: Any) -> Any:
        """Raise TypeError: a model that adds the mask to scores does not call lintra's attention. (A compiled
        one gets the compiler's own error.)"""
        raise TypeError(_reads_mask("sum with scores"))

    __radd__ = __add__

    @property
    def ndim(self) -> int:
        """Return that of the tensor it stands for: transformers 5.24 reads it of a mask made beforehand."""
        return 4

    def contiguous(self) -> Tensor:
        """Return the mask [b or 1, 1, t, s]: its user, `generate` with a static cache, takes only tensors."""
        if self.sequence is not None:
            raise NotImplementedError("packed sequences have no mask as a tensor: pass them padded")
        assert self.size is not None, "only what a mask function makes has a size"
        return self.pairs(*self.size)[:, None]

    def layout(self, q: Tensor) -> Layout:
        """Return the layout of the queries [b t ...]; packed rows are one row of b * t tokens."""
        if self.sequence is not None:
            return Layout(1, self.sequence.numel(), q.device, cu_seqlens=sequence_bounds(self.sequence))
        mask = None if self.mask is None else self.mask[:, -q.shape[1] :]
        return Layout(q.shape[0], q.shape[1], q.device, mask=mask)

    def pairs(self, t: int, s: int, device: Any) -> Tensor:
        """Return which keys each query sees, [b or 1, t, s]; packed sequences are not told apart."""
        distance = torch.arange(s - t, s, device=device)[:, None] - torch.arange(s, device=device)
        near = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        near = near if self.window is None else near & (distance < self.window)
        return near[None] if self.mask is None else near & self.mask[:, None]


def _reads_mask(what: str) -> str:
    return (
        f"this model reads the attention mask (its {what}), as those with an indexer of keys do, and older "
        "ones with attention of their own: lintra's attention cannot serve it, choose another "
        "attn_implementation, such as 'sdpa' or 'eager'"
    )


def visible(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masks.causal_mask_function,
    attention_mask: Tensor | Visible | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Visible | Tensor:
    """Return `Visible` where it suffices, else a mask [b 1 t s]; the mask function of transformers."""
    if isinstance(attention_mask, Visible):  # of `generate`, which makes masks for a static cache
        return attention_mask
    window = getattr(config, "sliding_window", None)
    kinds: list[tuple[Callable[..., Any], bool, int | None]] = [
        (masks.causal_mask_function, True, None),
        (masks.bidirectional_mask_function, False, None),
    ]
    if window is not None:
        kinds.append((masks.sliding_window_causal_mask_function(window), True, window))
    at_end = bool(q_offset + q_length == kv_offset + kv_length)  # not so in a static cache
    for function, causal, width in kinds:
        if (at_end or not causal) and _alike(mask_function, function):
            real = masks.prepare_padding_mask(attention_mask, kv_length, kv_offset)
            real = None if real is None else real[:, kv_offset : kv_offset + kv_length]
            if real is not None and checks.readable(real) and bool(real.all()):
                real = None
            size = (q_length, kv_length, device)
            masked, holes = attention_mask is not None, False
            if attention_mask is not None and (width is not None or checks.readable(attention_mask)):
                holes = have_holes(attention_mask[:, : kv_offset + kv_length])
            return Visible(causal, width, real, size=size, masked=masked, holes=holes)
        packed = causal and attention_mask is None
        if packed and any(_alike(mask_function, form) for form in _packed_forms(function)):
            row = torch.arange(batch_size, device=device)[:, None]
            place = torch.arange(1, q_length, device=device)
            # A token that does not see the one before it begins a sequence.
            begins = ~mask_function(row, 0, place, place - 1)
            return Visible(True, width, sequence=torch.nn.functional.pad(begins, (1, 0)).cumsum(1))
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    given = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    mask = masks.sdpa_mask(*given, device=device, **options)
    assert mask is not None
    return mask


def _packed_forms(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return what transformers makes of a mask function where sequences are packed: 5.24 and 5.23."""
    number = torch.empty(0)  # any tensor
    same = masks.packed_sequence_mask_function(number)
    within = masks.remap_positions_for_packed_sequence(function, number)
    return [masks.and_masks(within, same), masks.and_masks(same, within)]


def have_holes(mask: Tensor) -> bool:
    """Return whether there is padding between the keys of a sample of [b s]; False where that cannot be
    read."""
    if mask.shape[1] < 3 or not checks.has_values(mask):
        return False
    real = mask.bool()
    begins = real[:, 1:] & ~real[:, :-1]
    return bool((begins.sum(1) + real[:, 0] > 1).any())


def _alike(one: Any, other: Any) -> bool:
    """Return whether two functions have one code and close over the same values; any tensors are alike."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        values = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, other)]
        return one.__code__ is other.__code__ and _alike(*values)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return (isinstance(one, Tensor) and isinstance(other, Tensor)) or one is other or one == other

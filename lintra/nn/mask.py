"""Padding masks."""

import sys
import warnings
from collections.abc import Sequence
from weakref import ref

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lintra.ops import checks

_BETWEEN = {"lintra", "torch", "jaxtyping"}  # packages whose code runs between a caller's and a warning
_usual: tuple[ref[Tensor], int] | None = None  # the mask last looked at and found so, and its version


def lengths_to_mask(lengths: Int[Tensor, "b"], time: int | None = None) -> Bool[Tensor, "b t"]:
    """Return a mask, True for the first lengths[i] tokens of sample i. `time` is the padded length, default
    the longest.

    Raises TypeError for lengths that are no tensor, ValueError for lengths that are no integers [b] or not
    between 0 and `time`.
    """
    if not isinstance(lengths, Tensor):
        raise TypeError(f"lengths must be a tensor of integers [b], got {type(lengths).__name__}")
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(f"lengths must be integers [b], got {lengths.dtype} of shape {list(lengths.shape)}")
    longest = int(lengths.max()) if lengths.numel() else 0
    time = longest if time is None else time
    if lengths.numel() and (longest > time or int(lengths.min()) < 0):
        raise ValueError(f"lengths must be between 0 and {time} tokens, got {lengths.tolist()}")
    return torch.arange(time, device=lengths.device) < lengths[:, None]


def warn_if_inverted(mask: Bool[Tensor, "b t"] | None, *, as_padding: bool = False) -> None:
    """Warn where a mask leaves a sequence without any token and all others without the first place.

    A mask of the opposite convention, True for padding as PyTorch's `key_padding_mask` is, does so for a
    batch padded at its end: the longest sequence, which fills it, then has no token, and the others begin
    with their padding. There is no warning for a batch padded at its beginning: its inverted mask is also,
    in our convention, that of a batch padded at its end to some fixed length with an empty sequence, which
    is no error and gives 0. The mask is not read where that would cost a wait or break a graph: on a GPU, in
    a compiler and inside torch.func. If several layers are given the same mask in turn, only the first reads
    it.

    as_padding: the mask was given as its opposite, a `key_padding_mask`, which the warning then names.
    """
    global _usual
    if mask is None or not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.numel():
        return
    if mask.dtype != torch.bool or not checks.readable(mask):
        return
    version = 0 if mask.is_inference() else mask._version  # which changes with every change in place
    if (known := _usual) and known[0]() is mask and known[1] == version:
        return
    if mask[:, 0].any() or mask.any(1).all():
        _usual = ref(mask), version
        return
    name, right = ("key_padding_mask", "padding") if as_padding else ("mask", "real tokens")
    remedy = (
        "a mask of lintra is True for real tokens: pass key_padding_mask=~mask"
        if as_padding
        else "PyTorch's is True for padding: pass mask=~key_padding_mask"
    )
    warnings.warn(
        f"{name} looks inverted: a sequence has no token left, and none has its first. It must be "
        f"True for {right}; {remedy}",
        stacklevel=_caller(),
    )


def _caller() -> int:
    """Return the stacklevel of the first caller outside the library, for a warning of the calling
    function."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level


def padded(sequences: Sequence[Tensor]) -> tuple[Tensor, Bool[Tensor, "b t"]]:
    """Sequences [t ...] of different lengths as a batch [b t ...], filled up with 0, and its mask."""
    lengths = torch.tensor([len(each) for each in sequences], device=sequences[0].device)
    return pad_sequence(list(sequences), batch_first=True), lengths_to_mask(lengths)

"""Padding masks."""

import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lintra.ops import _check


def lengths_to_mask(lengths: Int[Tensor, "b"], time: int | None = None) -> Bool[Tensor, "b t"]:
    """True for the first lengths[i] tokens of sample i. `time` is the padded length, default the longest.

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


def warn_if_inverted(mask: Bool[Tensor, "b t"] | None) -> None:
    """Warns where a mask leaves a sequence without any token and all others without the first or the last.

    So does one of the opposite convention, True for padding as `key_padding_mask` of PyTorch is: the longest
    sequence of a batch, which fills it, has then no token, and the others begin or end with their padding. A
    sequence without a token is no error by itself: it gives 0. Nothing is looked at where that would cost a
    wait or break a graph: on a GPU, in a compiler and inside torch.func.
    """
    if mask is None or not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.numel():
        return
    if mask.dtype != torch.bool or not _check.readable(mask):
        return
    if (mask[:, 0].any() and mask[:, -1].any()) or mask.any(1).all():
        return
    warnings.warn(
        "mask leaves a sequence without any token, and the others without the first or the last place: it "
        "must be True for real tokens. If it is True for padding, as PyTorch's is, say "
        "mask=~key_padding_mask",
        stacklevel=2,
    )


def padded(sequences: Sequence[Tensor]) -> tuple[Tensor, Bool[Tensor, "b t"]]:
    """Sequences [t ...] of different lengths as a batch [b t ...], filled up with 0, and its mask."""
    lengths = torch.tensor([len(each) for each in sequences], device=sequences[0].device)
    return pad_sequence(list(sequences), batch_first=True), lengths_to_mask(lengths)

"""Padding masks."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


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


def padded(sequences: Sequence[Tensor]) -> tuple[Tensor, Bool[Tensor, "b t"]]:
    """Sequences [t ...] of different lengths as a batch [b t ...], filled up with 0, and its mask."""
    lengths = torch.tensor([len(each) for each in sequences], device=sequences[0].device)
    return pad_sequence(list(sequences), batch_first=True), lengths_to_mask(lengths)

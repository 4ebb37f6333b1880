"""What autocast may round, and what is out of its reach."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lintra.ops.checks import sum_dtype


def follow_autocast(*tensors: Tensor) -> list[Tensor]:
    """Under autocast, what the layers around pass in is brought to autocast's dtype, as for a matmul."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.dtype in (torch.float16, torch.bfloat16, torch.float32) else x for x in tensors]


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Sums on the device of x keep their digits. Not every device knows autocast; nothing is entered where it
    is off, which costs more than the sum of a few tokens."""
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In the dtype of sums, of 32 bits at least: a norm afterwards magnifies what was rounded."""
    return tuple(x.to(sum_dtype(x.dtype)) for x in tensors)

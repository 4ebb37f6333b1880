"""The last inputs of packed sequences, from which their convolutions continue."""

import torch
from torch import Tensor

from lintra.ops import Layout, checks


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Return the last `state_len` inputs of each sequence, [n d state_len], the latest last, with zeros
    before the first.

    x [t d] holds n sequences one after the other, which cu_seqlens [n+1] bounds. Raises ValueError or
    TypeError for arguments that disagree.
    """
    checks.shape("x", x, "t d", {})
    Layout.of("x", x[None], cu_seqlens=cu_seqlens)
    if state_len < 0:
        raise ValueError(f"state_len must be at least 0 tokens, got {state_len}")
    ends = cu_seqlens[1:, None]
    places = ends - state_len + torch.arange(state_len, device=x.device)
    real = places >= cu_seqlens[:-1, None]
    states = x[places.clamp(min=0)] if len(x) else x.new_zeros(*places.shape, x.shape[1])
    return states.masked_fill(~real[..., None], 0).mT

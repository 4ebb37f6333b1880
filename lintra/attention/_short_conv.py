"""The short causal convolution before a recurrence, of projections that are split into heads."""

import torch
from torch import Tensor, nn

from lintra.ops.conv1d import ConvImpl, causal_conv1d
from lintra.ops.layout import Layout


def conv_weight(*sizes: int) -> nn.Parameter:
    """Return weights [heads d w], initialised as a convolution with one input channel in PyTorch."""
    bound = sizes[-1] ** -0.5
    return nn.Parameter(torch.empty(sizes).uniform_(-bound, bound))


def convolve_heads(
    x: Tensor, weight: Tensor, state: Tensor, layout: Layout | None, impl: ConvImpl = "auto"
) -> tuple[Tensor, Tensor]:
    """Convolve x [b t h d] with weight [h d w] after the inputs in `state` [b w-1 h d], then SiLU; and return
    the last inputs too.

    layout: that of x; None: every place holds a token."""
    layout = Layout(x.shape[0], x.shape[1], x.device) if layout is None else layout
    y, last = causal_conv1d(
        x.flatten(2),
        weight.flatten(0, 1),
        activation="silu",
        state=state.flatten(2),
        layout=layout,
        impl=impl,
    )
    return y.unflatten(2, x.shape[2:]), last.unflatten(2, x.shape[2:])

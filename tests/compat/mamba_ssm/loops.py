"""The definitions as loops over tokens, slow and in the dtype of their arguments; and what is compared."""

import torch
from torch import Tensor
from torch.nn import functional

from lintra.testing.laws import gradients


def step_sizes(dt, bias, softplus, limit):
    dt = dt if bias is None else dt + bias
    dt = functional.softplus(dt, threshold=40.0) if softplus else dt
    return dt if limit is None else dt.clamp(*limit)


def ssd(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, state=None, softplus=True, limit=None
) -> tuple[Tensor, Tensor]:
    """Mamba-2: y [b t h p] and the state [b h p n]."""
    b, t, h, p = x.shape
    B, C = (y.repeat_interleave(h // y.shape[2], 2) for y in (B, C))
    dt = step_sizes(dt, dt_bias, softplus, limit)
    state = x.new_zeros(b, h, p, B.shape[3]) if state is None else state
    ys = []
    for i in range(t):
        decay = (dt[:, i] * A).exp()[..., None, None]
        state = decay * state + (dt[:, i, :, None] * x[:, i])[..., None] * B[:, i, :, None]
        ys.append((state * C[:, i, :, None]).sum(-1))
    y = torch.stack(ys, 1)
    y = y if D is None else y + x * (D if D.dim() == 2 else D[:, None])
    return (y if z is None else y * functional.silu(z)), state


def scan(u, delta, A, B, C, D=None, z=None, bias=None, softplus=False) -> tuple[Tensor, Tensor]:
    """Mamba: y [b d t] and the state [b d n]."""
    b, d, t = u.shape
    delta = step_sizes(delta, None if bias is None else bias[:, None], softplus, None)

    def of_token(x, i):
        if x.dim() == 2:
            return x.expand(b, *x.shape)
        x = x[:, None] if x.dim() == 3 else x
        return x[..., i].repeat_interleave(d // x.shape[1], 1)

    state = u.new_zeros(b, d, A.shape[1])
    ys = []
    for i in range(t):
        state = (delta[..., i, None] * A).exp() * state + (delta * u)[..., i, None] * of_token(B, i)
        ys.append((state * of_token(C, i)).sum(-1))
    y = torch.stack(ys, -1)
    y = y if D is None else y + D[:, None] * u
    return (y if z is None else y * functional.silu(z)), state


def convolution(x, weight, bias, silu=True) -> Tensor:
    """y [b d t] of x [b d t]."""
    y = functional.conv1d(
        functional.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[1]
    )
    return functional.silu(y) if silu else y


def rms_norm(x, weight, z, eps, size, before):
    gate = functional.silu(z)
    x = x if before else x * gate
    groups = x.unflatten(-1, (-1, size))
    x = (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight
    return x * gate if before else x


def everything(outputs, inputs):
    """The outputs, and the gradients of an uneven sum over them."""
    return [*outputs, *gradients(torch.cat([x.flatten() for x in outputs]), inputs)]

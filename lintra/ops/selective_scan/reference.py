"""The selective state space model of Mamba by its definition, from a state and to a state.

    delta_t = softplus(dt_t + dt_bias)
    x_t = exp(delta_t A) x_{t-1} + delta_t u_t B_t        every channel by itself, n states each
    y_t = C_t . x_t + D u_t                               times silu(z_t)

Gu and Dao 2023, arXiv:2312.00752, section 3.2 and algorithm 2, with B discretised by Euler's rule and A by
zero-order hold, as the authors' code does.

Letters: b batch, t time, c channels, n states of a channel, g groups of neighbouring channels that share B
and C.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def step_sizes(
    dt: Float[Tensor, "b t c"], dt_bias: Float[Tensor, "c"] | None, dt_softplus: bool
) -> Float[Tensor, "b t c"]:
    """Return delta. Softplus is left out only where float64 has no digits for it."""
    dt = dt if dt_bias is None else dt + dt_bias
    return functional.softplus(dt, threshold=40.0) if dt_softplus else dt


def selective_scan_reference(
    u: Float[Tensor, "b t c"],
    dt: Float[Tensor, "b t c"],
    A: Float[Tensor, "c n"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, "c"] | None,
    z: Float[Tensor, "b t c"] | None,
    dt_bias: Float[Tensor, "c"] | None,
    dt_softplus: bool,
    state: Float[Tensor, "b c n"],
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b c n"]]:
    """The definition, token by token, in the dtype of its arguments."""
    delta = step_sizes(dt, dt_bias, dt_softplus)
    B, C = (x.repeat_interleave(u.shape[2] // x.shape[2], 2) for x in (B, C))  # [b t c n]
    ys = [torch.zeros_like(u[:, :0])]
    for i in range(u.shape[1]):
        state = (delta[:, i, :, None] * A).exp() * state + (delta[:, i] * u[:, i])[..., None] * B[:, i]
        ys.append((state * C[:, i]).sum(-1)[:, None])
    y = torch.cat(ys, 1)
    y = y if D is None else y + D * u
    return y if z is None else y * functional.silu(z), state

"""One token of Mamba or Mamba-2 with a state that is changed in place, by the name and layouts of mamba_ssm.

Letters: b batch, h heads, p width of a head (all channels of Mamba, which has no heads), g groups of heads
that share B and C, n states of a channel, r rows of states.
"""

from torch import Tensor

from lintra.compat.arguments import (
    integers,
    no_leaf,
    rows_below,
    same_dtype,
    state_before,
    tensors,
    written_in_place,
)
from lintra.native import scan
from lintra.ops import Layout, checks, selective_scan
from lintra.ops.dispatch import can_call_kernels


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Return y of one token, in the shape and dtype of x, and update `state` in place.

    Mamba: state [b p n], x, dt, z [b p], A [p n], B, C [b n], D, dt_bias [p]. Mamba-2: state [b h p n], x,
    dt, z [b h p], A [h p n], B, C [b g n] or [b n], D, dt_bias [h p]; where A, dt and dt_bias are one number
    of each head expanded (strides of 0), there is one decay for the head. The state is read and written once
    where it is contiguous and in the dtype of sums; in any other it is rounded after each token. With
    `state_batch_indices` [b] of integers the first axis of state is r and they give the row of each sequence;
    below 0 there is none, and y is 0. No row may be given twice. Gradients go through all arguments, and
    through what is written into state to the tokens before. Raises NotImplementedError for complex A and
    ValueError or TypeError for arguments that disagree; ValueError for a state that is a leaf and requires
    grad, where gradients are recorded.
    """
    heads = isinstance(state, Tensor) and state.dim() == 4
    h, r = "h " if heads else "", "b" if state_batch_indices is None else "r"
    token, group = f"b {h}p", "b g n" if heads else "b n"
    if heads:
        B, C = (y[:, None] if isinstance(y, Tensor) and y.dim() == 2 else y for y in (B, C))
    sizes = tensors(
        {
            "state": (state, f"{r} {h}p n"),
            "x": (x, token),
            "dt": (dt, token),
            "A": (A, f"{h}p n"),
            "B": (B, group),
            "C": (C, group),
            "D": (D, f"{h}p"),
            "z": (z, token),
            "dt_bias": (dt_bias, f"{h}p"),
        }
    )
    b, g, n = sizes["b"], sizes.get("g", 1), sizes["n"]
    channels = sizes["p"] * sizes.get("h", 1)
    if channels < 1 or n < 1 or g < 1 or sizes.get("h", g) % g:
        raise ValueError(
            "state must have at least 1 channel and 1 state, and the groups of B must divide its heads, got "
            f"shapes {list(state.shape)} and {list(B.shape)}"
        )
    integers("state_batch_indices", state_batch_indices, "b", sizes, x, "x")
    rows_below("state_batch_indices", state_batch_indices, state.shape[0])
    no_leaf("state", state)

    mask, before = None, state
    if state_batch_indices is not None:
        mask = (state_batch_indices >= 0)[:, None]
        before = state[state_batch_indices.clamp(min=0).long()]
    u, delta, B, C, *gate = same_dtype(x, dt, B, C, *(() if z is None else (z,)))
    total = checks.sum_dtype(u.dtype)
    alone = can_call_kernels(x, state, dt, A, B, C, D, z, dt_bias)
    tied = (
        alone and heads and _tied(A) and dt.stride(-1) == 0 and (dt_bias is None or dt_bias.stride(-1) == 0)
    )
    rates = (A[..., :1] if tied else A).reshape(channels, -1).to(total)
    D, dt_bias = (None if y is None else y.reshape(-1).to(total) for y in (D, dt_bias))
    u, delta, *gate = (y.reshape(b, 1, channels) for y in (u, delta, *gate))
    B, C = B.reshape(b, 1, g, n), C.reshape(b, 1, g, n)
    inputs = (B, C, D, gate[0] if gate else None, dt_bias)
    before = before.reshape(b, channels, n)
    if alone:
        before = before.to(total).contiguous()
        if before.data_ptr() == state.data_ptr():
            written_in_place("state", state)
        options = (dt_softplus, mask, None, False)
        y, after, _ = scan.forward(u, delta, rates, *inputs, before, *options, out=before)
        if after.data_ptr() == state.data_ptr():  # there is nothing to write back
            return y.view(x.shape).to(x.dtype)
    else:
        before = state_before(before, total, u, delta, rates, *inputs)
        layout = Layout(b, 1, x.device, mask=mask)
        y, after = selective_scan(u, delta, rates, *inputs, bool(dt_softplus), state=before, layout=layout)
    after = after.view(-1, *state.shape[1:])  # with its graph, for the gradients of earlier tokens
    if mask is not None and state_batch_indices is not None:
        real = mask[:, 0]
        state.index_copy_(0, state_batch_indices[real].long(), after[real].to(state.dtype))
    else:
        state.copy_(after)
    return y.view(x.shape).to(x.dtype)


def _tied(A: Tensor) -> bool:
    """Return whether all states of a head decay alike, as strides of 0 imply."""
    return A.stride(-1) == 0 and A.stride(-2) == 0

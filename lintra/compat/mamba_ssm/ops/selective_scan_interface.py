"""The selective scan of Mamba by the names and layouts of mamba_ssm, alone and as the inside of a whole
mixer.

Letters: b batch, d channels, t tokens, n states of a channel, g groups of channels, w width of the
convolution, r rank of the step sizes, c model width. Channels come before time; a transposed view of a
tensor [b t d] is read without a copy.
"""

from torch import Tensor
from torch.nn import functional

from lintra.compat.arguments import same_dtype, tensors
from lintra.compat.mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from lintra.ops import Layout, causal_conv1d, selective_scan


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan u by Mamba's selective state space model: y [b d t] in u's dtype and, if requested, the last state
    [b d n].

    u, delta, z [b d t]; A [d n]; B and C [d n], [b n t] or [b g n t], each for itself; D, delta_bias [d].
    delta is softplus(delta + delta_bias) with `delta_softplus`; y is multiplied by silu(z). The state is in
    the dtype of sums, and gradients go through it too. Raises NotImplementedError for complex A, B or C and
    ValueError or TypeError for arguments that disagree. Gu and Dao 2023, arXiv:2312.00752, algorithm 2;
    `lintra.ops.selective_scan`.
    """
    sizes = tensors(
        {
            "u": (u, "b d t"),
            "delta": (delta, "b d t"),
            "A": (A, "d n"),
            "B": (B, _axes(B, "g")),
            "C": (C, _axes(C, "k")),
            "D": (D, "d"),
            "z": (z, "b d t"),
            "delta_bias": (delta_bias, "d"),
        }
    )
    b, d, t, n = (sizes[letter] for letter in "bdtn")
    if d < 1 or n < 1:
        raise ValueError(f"A must be [d n] of at least 1 channel and 1 state, got shape {list(A.shape)}")
    tokens = (u, delta, B, C) if z is None else (u, delta, B, C, z)
    wide_u, delta, B, C, *gate = same_dtype(*tokens)
    B, C = _by_token("B", B, b, t, d), _by_token("C", C, b, t, d)
    if B.shape[2] != C.shape[2]:
        B, C = (x.repeat_interleave(d // x.shape[2], 2) for x in (B, C))
    y, state = selective_scan(
        wide_u.mT,
        delta.mT,
        A,
        B,
        C,
        D,
        gate[0].mT if gate else None,
        delta_bias,
        bool(delta_softplus),
        layout=Layout(b, t, u.device),
    )
    y = y.mT.to(u.dtype)
    return (y, state) if return_last_state else y


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Compute Mamba's mixer between its input projection and its output: y [b t c].

    xz [b 2d t] is the input projection, conv1d_weight [d 1 w] and conv1d_bias [d] the convolution,
    x_proj_weight [r+2n d] gives step sizes, B and C of each token, of which those of B and C count that are
    None; delta_proj_weight [d r], out_proj_weight [c d], out_proj_bias [c]; A, B, C, D, delta_bias and
    delta_softplus as in `selective_scan_fn`; B_proj_bias, C_proj_bias [n]. `b_rms_weight`, `c_rms_weight` [n]
    and `dt_rms_weight` [d] are those of norms over B, C and step sizes (None: no norm), `b_c_dt_rms_eps`
    their eps. `checkpoint_lvl`, how much is kept for the backward there, is without effect. Raises as
    `selective_scan_fn` does.
    """
    sizes = tensors(
        {
            "xz": (xz, "b e t"),
            "conv1d_weight": (conv1d_weight, "d o w"),
            "conv1d_bias": (conv1d_bias, "d"),
            "x_proj_weight": (x_proj_weight, "p d"),
            "delta_proj_weight": (delta_proj_weight, "d r"),
            "out_proj_weight": (out_proj_weight, "c d"),
            "out_proj_bias": (out_proj_bias, "c"),
            "A": (A, "d n"),
            "B_proj_bias": (B_proj_bias, "n"),
            "C_proj_bias": (C_proj_bias, "n"),
            "b_rms_weight": (b_rms_weight, "n"),
            "c_rms_weight": (c_rms_weight, "n"),
            "dt_rms_weight": (dt_rms_weight, "d"),
        }
    )
    if sizes["o"] != 1 or sizes["e"] != 2 * sizes["d"]:
        raise ValueError(
            f"xz must be [b 2d t] for conv1d_weight [d 1 w], got shapes {list(xz.shape)} and "
            f"{list(conv1d_weight.shape)}"
        )
    if checkpoint_lvl not in (0, 1):
        raise ValueError(f"checkpoint_lvl must be 0 or 1, got {checkpoint_lvl!r}")
    r, n = sizes["r"], sizes["n"]
    least = r + n * ((B is None) + (C is None))
    if sizes["p"] < least:
        raise ValueError(
            f"x_proj_weight must have at least {least} rows for the steps, B and C, got {sizes['p']}"
        )
    x, z = xz.chunk(2, 1)
    layout = Layout(sizes["b"], sizes["t"], xz.device)
    u, _ = causal_conv1d(x.mT, conv1d_weight[:, 0], conv1d_bias, activation="silu", layout=layout)  # [b t d]
    projected = functional.linear(u, x_proj_weight)
    delta = functional.linear(projected[..., :r], delta_proj_weight)
    if B is None:
        B = _biased(projected[..., r : r + n], B_proj_bias).mT
    if C is None:
        C = _biased(projected[..., projected.shape[2] - n :], C_proj_bias).mT
    if b_rms_weight is not None:
        B = _normed("B", B, b_rms_weight, b_c_dt_rms_eps)
    if c_rms_weight is not None:
        C = _normed("C", C, c_rms_weight, b_c_dt_rms_eps)
    if dt_rms_weight is not None:
        delta = rmsnorm_fn(delta, dt_rms_weight, None, eps=b_c_dt_rms_eps)
    y = selective_scan_fn(u.mT, delta.mT, A, B, C, D, z, delta_bias, delta_softplus)
    assert isinstance(y, Tensor)
    return functional.linear(y.mT, out_proj_weight, out_proj_bias)


def _axes(x: Tensor, groups: str) -> str:
    """Return the letters of B or C, with one of its own for the groups."""
    return {3: "b n t", 4: f"b {groups} n t"}.get(x.dim() if isinstance(x, Tensor) else 0, "d n")


def _by_token(name: str, x: Tensor, b: int, t: int, d: int) -> Tensor:
    """Return B or C as [b t g n]. A constant one has a group for every channel."""
    if x.dim() == 2:
        return x.expand(b, t, *x.shape)
    x = x.mT[:, :, None] if x.dim() == 3 else x.permute(0, 3, 1, 2)
    if x.shape[2] < 1 or d % x.shape[2]:
        raise ValueError(f"the groups of {name} must divide the channels, got g={x.shape[2]} and d={d}")
    return x


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)


def _normed(name: str, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of B or C over its states; there is one group of them."""
    if x.dim() == 4 and x.shape[1] == 1:
        x = x[:, 0]
    if x.dim() != 3:
        raise ValueError(f"{name} must be [b n t] or [b 1 n t] for its norm, got shape {list(x.shape)}")
    return rmsnorm_fn(x.mT, weight, None, eps=eps).mT

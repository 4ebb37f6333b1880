"""The selective scan of Mamba: one function, its state and the choice of the implementation.

`reference` has the definition and the formulas, `chunked` plain PyTorch, `native` the C++ kernels for the
CPU.
"""

from functools import partial
from typing import Literal

from torch import Tensor

from lintra.native import scan
from lintra.ops import checks, dispatch
from lintra.ops.autocast import follow_autocast, no_autocast
from lintra.ops.dispatch import can_skip_operator
from lintra.ops.layout import CuSeqlens, Layout
from lintra.ops.padding import zero_padding
from lintra.ops.selective_scan.chunked import selective_scan_chunked
from lintra.ops.selective_scan.native import selective_scan_native
from lintra.ops.selective_scan.reference import selective_scan_reference, step_sizes

__all__ = ["ScanImpl", "selective_scan", "selective_scan_reference"]

ScanImpl = Literal["auto", "reference", "torch", "native"]


def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    *,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    layout: Layout | None = None,
    chunk: int = 64,
    impl: ScanImpl = "auto",
) -> tuple[Tensor, Tensor]:
    """Selective state space model of Mamba, from a state and to a state.

        delta_t = softplus(dt_t + dt_bias)                            without dt_softplus: dt_t + dt_bias
        x_t[c, n] = exp(delta_t[c] A[c, n]) x_{t-1}[c, n] + delta_t[c] B_t[n] u_t[c]
        y_t[c] = sum_n C_t[n] x_t[c, n] + D[c] u_t[c]                 times silu(z_t[c]), where z is given

    u, dt, z [b t c] and B, C [b t n] of one dtype -> y [b t c] in that dtype, and the state [b c n] after
    the last token in float32 (float64 for float64). B and C may be [b t g n], where g divides c: channel j
    reads group j // (c / g). A [c n], finite, is a rate for each unit of delta: a state decays where it is
    negative and grows where it is positive. A, D and dt_bias [c] are of any floating dtype. `state` [b c n]
    is the state before (None: zeros) and is not changed. `mask` [b t] is True for real tokens: padded ones
    leave the state as it was, and their y is 0. `cu_seqlens` [m+1] (`lintra.ops.layout`): m sequences are
    packed one after the other, b = 1, and the states are [m c n]; each sequence has the output it has alone.
    A `layout` of u replaces both for a caller that has validated everything: nothing is checked again.
    Tensors [b t c] may have any strides: "native" reads them without a copy where channels or time are
    contiguous, and lays y out like u.
    chunk: tokens that `impl="torch"` has in memory at once, [b chunk c n]; changes speed, not the result,
    unless A is positive and the growth over half a chunk overflows.
    impl: "reference" (token by token), "torch" (every device), "native" (C++, CPU) or "auto".
    Gu and Dao 2023, arXiv:2312.00752, section 3.2 and algorithm 2.
    Raises ValueError or TypeError for arguments that disagree; RuntimeError for an `impl` that is not
    available here.
    """
    if layout is None:
        tokens = (u, dt, B, C) if z is None else (u, dt, B, C, z)
        u, dt, B, C, *gate = follow_autocast(*tokens)
        z = gate[0] if gate else None
        weights = {"D": D, "dt_bias": dt_bias}
        layout = _validate(u, dt, A, B, C, z, weights, state, mask, cu_seqlens, chunk)
    total = checks.sum_dtype(u.dtype)
    A = A.to(total)
    D, dt_bias = (None if x is None else x.to(total) for x in (D, dt_bias))
    if B.dim() == 3:
        B, C = B[:, :, None], C[:, :, None]
    if state is None:
        state = A.new_zeros(layout.n, *A.shape)
    given = [x for x in (u, dt, A, B, C, D, z, dt_bias, state) if x is not None]
    inputs = (u, dt, A, B, C, D, z, dt_bias)
    if impl in ("auto", "native") and can_skip_operator(*given):
        # Not through the operator: PyTorch's dispatcher takes longer than the arithmetic of one token.
        return scan.forward(*inputs, state, dt_softplus, layout.mask, layout.cu_seqlens, False)[:2]
    chosen = dispatch.choose("selective_scan", impl, *given)
    if chosen == "native":
        options = (dt_softplus, layout.mask, layout.cu_seqlens, checks.recorded(*given))
        return selective_scan_native(*inputs, state, *options)[:2]
    with no_autocast(u):
        y, after = _in_pytorch(*inputs, dt_softplus, state, layout, 0 if chosen == "reference" else chunk)
    # The returned state must not be the caller's, as it would be where no token came.
    return y.to(u.dtype), after.clone() if after is state else after


def _in_pytorch(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state: Tensor,
    layout: Layout,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """y in the sum dtype and the state; packed sequences as padded ones. chunk 0: the reference."""
    if layout.packed:
        options = {"A": A, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "chunk": chunk}
        same = partial(_in_pytorch, **options)
        return layout.pad_bucketed().each_with_state(same, state, u=u, dt=dt, B=B, C=C, z=z)
    u, dt, B, C = (x.to(state.dtype) for x in zero_padding(layout.mask, u, dt, B, C))
    z = None if z is None else zero_padding(layout.mask, z)[0].to(state.dtype)
    delta = zero_padding(layout.mask, step_sizes(dt, dt_bias, dt_softplus))[0]
    if chunk == 0:
        return selective_scan_reference(u, delta, A, B, C, D, z, None, False, state)
    return selective_scan_chunked(u, delta, A, B, C, D, z, state, chunk)


def _validate(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    weights: dict[str, Tensor | None],
    state: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: CuSeqlens | None,
    chunk: int,
) -> Layout:
    """Return the layout of u, or raise ValueError or TypeError for arguments that disagree."""
    sizes: dict[str, int] = {}
    checks.shape("u", u, "b t c", sizes)
    checks.floating("u", u)
    checks.shape("dt", dt, "b t c", sizes)
    checks.shape("A", A, "c n", sizes)
    letters = "b t g n" if isinstance(B, Tensor) and B.dim() == 4 else "b t n"
    for name, x in {"dt": dt, "B": B, "C": C, "z": z}.items():
        if x is not None:
            checks.shape(name, x, letters if name in "BC" else "b t c", sizes)
            checks.same_device_and_dtype(name, x, "u", u)
    for name, x in {"A": A, **weights}.items():
        if x is not None:
            checks.shape(name, x, "c n" if name == "A" else "c", sizes)
            checks.floating(name, x)
            if x.device != u.device:
                raise ValueError(f"{name} must be on the device of u, {u.device}, got {x.device}")
    c, n, g = sizes["c"], sizes["n"], sizes.get("g", 1)
    if c < 1 or n < 1:
        raise ValueError(f"u must have at least 1 channel and A at least 1 state, got c={c} and n={n}")
    if g < 1 or c % g:
        raise ValueError(f"the groups of B and C must divide the channels, got g={g} and c={c}")
    layout = Layout.of("u", u, mask, cu_seqlens)
    if state is not None:
        checks.shape("state", state, "b c n", sizes | {"b": layout.n})
        checks.state_dtype("state", state, u, narrow=False)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    return layout

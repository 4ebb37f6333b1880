"""State space duality (Mamba-2) by the names and layouts of mamba_ssm, alone and as the inside of a whole
mixer.

    state_t = exp(dt_t A) state_{t-1} + dt_t x_t B_t^T            dt: softplus, clamped, of each head
    y_t = state_t C_t + D x_t                                     times silu(z_t), where z is given

which is linear attention of queries C, keys B, values dt x and log decays dt A. Dao and Gu 2024,
arXiv:2405.21060.

Letters: b batch, t tokens, h heads, p width of a head, g groups of heads that share B and C, n states, s
sequences.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lintra.compat.arguments import refuse, state_before, tensors
from lintra.compat.mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from lintra.compat.seq_idx import Packing, flat
from lintra.ops import Layout, LinearState, causal_conv1d, checks, linear_attention
from lintra.ops.autocast import no_autocast
from lintra.ops.selective_scan.reference import step_sizes

NO_LIMIT = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Scan x by Mamba-2's state space model: y [b t h p] in x's dtype, then the requested states.

    x, z [b t h p], dt [b t h], A, dt_bias [h], B, C [b t g n], D [h] or [h p]; `dt_limit` bounds the step
    sizes after dt_bias and softplus. `initial_states` [b h p n] come before x. `return_final_states` adds the
    states [b h p n] after the last token of each row, in the dtype of sums. seq_idx [b t] of integers packs
    several sequences in a row: one ends where the number changes; initial states go to a row's first sequence
    if its number is 0, final ones come from its last. `return_varlen_states` adds the states [s h p n] of all
    sequences of one row, which cu_seqlens [s+1] must bound as seq_idx does, in C's dtype or `state_dtype`.
    Otherwise `chunk_size` and `state_dtype` are without effect. Gradients go through all of it. Raises
    NotImplementedError for a state that would grow (dt A above 0) and for complex A; ValueError or TypeError
    for arguments that disagree, and for cu_seqlens without seq_idx, without which sequences are not
    separated.
    """
    sizes = tensors(
        {
            "x": (x, "b t h p"),
            "dt": (dt, "b t h"),
            "A": (A, "h"),
            "B": (B, "b t g n"),
            "C": (C, "b t g n"),
            "D": (D, _axes(D)),
            "z": (z, "b t h p"),
            "dt_bias": (dt_bias, "h"),
            "initial_states": (initial_states, "b h p n"),
        }
    )
    b, t, h, g = (sizes[letter] for letter in "bthg")
    if g < 1 or h % g:
        raise ValueError(f"the groups of B and C must divide the heads of x, got g={g} and h={h}")
    packing = None if seq_idx is None else Packing.of(seq_idx, "x", x)
    _check_varlen(packing, cu_seqlens, return_varlen_states, b)

    total = checks.sum_dtype(torch.promote_types(torch.promote_types(x.dtype, B.dtype), C.dtype))
    with no_autocast(x):
        dt, A = _step_sizes(dt.to(total), dt_bias, dt_softplus, dt_limit), A.to(total)
        q, k, v, log_decay = C.to(total), B.to(total), x * dt[..., None], dt * A
        _check_decay(log_decay)
        before = initial_states
        if before is not None:
            before = state_before(before, total, q, k, v, log_decay).mT
        if packing is not None:
            q, k, v, log_decay = (flat(tensor) for tensor in (q, k, v, log_decay))
            before = None if before is None else _firsts(before, packing, seq_idx)
        state = None if before is None else LinearState.of(before)
        layout = Layout(b, t, x.device) if packing is None else packing.layout
        y, after = linear_attention(q, k, v, log_decay=log_decay, state=state, normalize=False, layout=layout)
        y = _finish(y.view(x.shape), x, D, z)
    results = [y]
    states = after.kv.mT
    if return_final_states:
        results.append((states if packing is None else states[packing.last]).contiguous())
    if return_varlen_states:
        results.append(states.to(C.dtype if state_dtype is None else state_dtype).contiguous())
    return results[0] if len(results) == 1 else tuple(results)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Compute Mamba-2's mixer from its input projection on: y [b t h p] with its heads side by side, [b t
    h*p].

    zxbcdt [b t 2 m + 2 h p + 2 g n + h] holds, in this order, two inputs of a gated MLP (m wide, usually 0:
    its output comes before y), z, x, B, C and dt. conv1d_weight [h p + 2 g n, w] and conv1d_bias are of the
    convolution over x, B and C, `activation` (None, "silu" or "swish") comes after it; dt_bias, A [h]; D [h
    p], or [h] with the width of a head as `headdim`. Without `rmsnorm_weight` [h p] y is gated by z; with it,
    y is gated and normed in `ngroups` groups, normed first if `norm_before_gate`. `outproj_weight` [c m + h
    p] and `outproj_bias` [c] make the result [b t c]. The rest is that of `mamba_chunk_scan_combined`, as are
    the errors.
    """
    if activation not in (None, "silu", "swish"):
        refuse("activation", f"it must be None, 'silu' or 'swish', got {activation!r}")
    sizes = tensors(
        {
            "zxbcdt": (zxbcdt, "b t i"),
            "conv1d_weight": (conv1d_weight, "k w"),
            "conv1d_bias": (conv1d_bias, "k"),
            "dt_bias": (dt_bias, "h"),
            "A": (A, "h"),
            "D": (D, _axes(D)),
        }
    )
    if D.dim() == 1:
        if headdim is None:
            raise ValueError("headdim must be given with a D of one number for each head")
        sizes["p"] = headdim
    h, wide = sizes["h"], sizes["h"] * sizes["p"]
    if ngroups < 1 or h % ngroups:
        raise ValueError(f"ngroups must divide the {h} heads, got {ngroups}")
    shared = sizes["k"] - wide  # B and C
    mlp = sizes["i"] - wide - sizes["k"] - h
    if shared < 2 * ngroups or shared % (2 * ngroups) or mlp < 0 or mlp % 2:
        raise ValueError(
            "conv1d_weight must be [h p + 2 g n, w] and zxbcdt [b t 2 m + 2 h p + 2 g n + h] for "
            f"h p = {wide}, g = {ngroups} and h = {h}, got shapes {list(conv1d_weight.shape)} and "
            f"{list(zxbcdt.shape)}"
        )
    if outproj_weight is None and outproj_bias is not None:
        raise ValueError("outproj_bias must be None without outproj_weight")
    both, z, mixed, dt = zxbcdt.split([mlp, wide, sizes["k"], h], -1)
    mixed = _convolve(mixed, conv1d_weight, conv1d_bias, seq_idx, activation is not None)
    x, B, C = mixed.split([wide, shared // 2, shared // 2], -1)
    x, B, C = x.unflatten(2, (h, -1)), B.unflatten(2, (ngroups, -1)), C.unflatten(2, (ngroups, -1))
    options = {"dt_bias": dt_bias, "initial_states": initial_states, "seq_idx": seq_idx, "dt_softplus": True}
    options |= {"dt_limit": dt_limit, "return_final_states": True, "state_dtype": state_dtype}
    gate = None if rmsnorm_weight is not None else z.unflatten(2, (h, -1))
    y, states = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, gate, **options)
    y = y.flatten(2)
    if rmsnorm_weight is not None:
        y = rmsnorm_fn(y, rmsnorm_weight, None, z, rmsnorm_eps, wide // ngroups, norm_before_gate)
    if mlp:
        gates, values = both.chunk(2, -1)
        y = torch.cat((functional.silu(gates) * values, y), -1)
    if outproj_weight is not None:
        y = functional.linear(y, outproj_weight, outproj_bias)
    return (y, states) if return_final_states else y


def _axes(D: Tensor | None) -> str:
    return "h p" if isinstance(D, Tensor) and D.dim() == 2 else "h"


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    dt = step_sizes(dt, None if bias is None else bias.to(dt.dtype), softplus)
    return dt if tuple(limit) == NO_LIMIT and softplus else dt.clamp(*limit)


def _check_decay(log_decay: Tensor) -> None:
    """Raise NotImplementedError where a state would grow, which the kernels are not made for; where
    readable."""
    if checks.readable(log_decay) and log_decay.numel():
        low, high = (x.item() for x in log_decay.detach().aminmax())
        if high > 0 or low == -math.inf:  # NaN is neither, and goes through
            worst = high if high > 0 else low
            refuse("A", f"dt A must be finite and at most 0 (a decay of at most 1), got {worst:g}")


def _check_varlen(packing: Packing | None, cu_seqlens: Tensor | None, wanted: bool, b: int) -> None:
    if cu_seqlens is None:
        if wanted:
            raise ValueError("return_varlen_states needs cu_seqlens, which says where sequences end")
        return
    if packing is None:
        raise ValueError("cu_seqlens needs seq_idx beside it: without, nothing keeps sequences apart")
    if not wanted:
        return
    if b != 1:
        raise ValueError(f"return_varlen_states needs a batch of 1 row, got b={b}")
    bounds = packing.layout.cu_seqlens
    assert bounds is not None
    if cu_seqlens.shape != bounds.shape or not torch.equal(cu_seqlens.to(bounds), bounds):
        raise ValueError(
            f"cu_seqlens must bound the sequences of seq_idx, {bounds.tolist()}, got {cu_seqlens.tolist()}"
        )


def _firsts(before: Tensor, packing: Packing, seq_idx: Tensor | None) -> Tensor:
    """The states [s h n p] before each sequence: of a row's first, if its number is 0, those of the row."""
    assert seq_idx is not None
    first = before.masked_fill((seq_idx[:, 0] != 0)[:, None, None, None], 0)
    empty = before.new_zeros(packing.layout.n, *before.shape[1:])
    return empty.index_copy(0, packing.first, first)


def _finish(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """(y + D x) silu(z) in x's dtype. Where nothing is recorded, in place: nothing else uses y."""
    recorded = torch.is_grad_enabled() or torch.compiler.is_compiling() or checks.transforming(y)
    if D is not None:
        D = D.to(y.dtype) if D.dim() == 2 else D.to(y.dtype)[:, None]
        y = y + x * D if recorded else y.addcmul_(x.to(y.dtype), D)
    if z is not None:
        gate = functional.silu(z.to(y.dtype))
        y = y * gate if recorded else y.mul_(gate)
    return y.to(x.dtype)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, silu: bool) -> Tensor:
    """The convolution over tokens x [b t k], each sequence for itself."""
    layout = (
        Layout(x.shape[0], x.shape[1], x.device)
        if seq_idx is None
        else Packing.of(seq_idx, "zxbcdt", x).layout
    )
    tokens = x if seq_idx is None else flat(x)
    y, _ = causal_conv1d(tokens, weight, bias, activation="silu" if silu else None, layout=layout)
    y = y.view(x.shape)
    return y if seq_idx is None else y.masked_fill((seq_idx < 0)[..., None], 0)

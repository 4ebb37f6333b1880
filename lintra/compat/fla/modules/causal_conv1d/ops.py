"""The short causal convolution before a recurrence, on `lintra.ops.causal_conv1d`.

States hold the last w inputs [n c w], the latest behind, in x's dtype: one more than the next output needs.

Letters: b batch, t time, c channels, w width, n sequences (b, or those of cu_seqlens).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.compat.arguments import state_before
from lintra.compat.causal_conv1d.causal_conv1d_interface import causal_conv1d_update as step
from lintra.compat.fla._arguments import known, refuse
from lintra.ops import causal_conv1d as convolve
from lintra.ops import checks
from lintra.ops.autocast import no_autocast

_ACTIVATIONS = (None, "silu", "swish")
_BACKENDS = ("triton", "cuda", "mix")


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return y [b t c], the activated convolution plus `residual`, and the state after it or None.

    x [b t c], weight [c w] (the last column for the token itself), bias [c], residual [b t c]. `activation`:
    "silu", which is "swish", or None. `backend`, `cu_seqlens_cpu` and `chunk_indices` change nothing here;
    a convolution without weights and `cp_context` are not served. Raises ValueError for arguments that
    disagree.
    """
    refuse(cp_context=cp_context)
    known("activation", activation, _ACTIVATIONS)
    known("backend", backend, _BACKENDS)
    weight = _given(weight)
    if initial_state is not None:
        n = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        _check_state("initial_state", initial_state, n, weight)
        initial_state = state_before(initial_state, initial_state.dtype, x, weight, bias)
    dtype = checks.sum_dtype(x.dtype)
    before = None if initial_state is None else initial_state[..., 1:].mT.to(dtype)
    options = {"activation": "silu" if activation else None, "state": before, "cu_seqlens": cu_seqlens}
    with no_autocast(x):
        y, _ = convolve(x, weight, bias, **options)
        y = y if residual is None else (y + residual).to(x.dtype)
    if not output_final_state:
        return y, None
    return y, _last_inputs(x, initial_state, weight.shape[1], cu_seqlens)


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y of one token a sequence, in the shape of x, and the cache [n c w], which is changed in place.

    x [n c], [n 1 c] or [1 n c]; `causal_conv1d` says what the others are.
    """
    known("activation", activation, _ACTIVATIONS)
    weight = _given(weight)
    channels = x.shape[-1]
    _check_state("cache", cache, x.numel() // channels, weight)
    if residual is None:
        return step(x.reshape(-1, channels), cache, weight, bias, activation).view(x.shape), cache
    dtype = checks.sum_dtype(x.dtype)
    with no_autocast(x):
        inputs = torch.cat((cache[..., 1:].to(dtype), x.reshape(-1, channels, 1).to(dtype)), -1)
        cache.copy_(inputs)
        y = (inputs * weight.to(dtype)).sum(-1)
        y = y if bias is None else y + bias.to(dtype)
        y = (functional.silu(y) if activation else y).view(x.shape)
        y = y + residual.view(x.shape)
    return y.to(x.dtype), cache


class ShortConvolution(nn.Conv1d):
    """`causal_conv1d` of `hidden_size` channels over `kernel_size` tokens, weights [c 1 w] as in Conv1d.

    `backend` and `use_fast_conv1d` change nothing here.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        use_fast_conv1d: bool | None = None,
    ):
        known("activation", activation, _ACTIVATIONS)
        sizes = {"groups": hidden_size, "padding": kernel_size - 1, "bias": bias}
        super().__init__(hidden_size, hidden_size, kernel_size, **sizes, device=device, dtype=dtype)
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def forward(  # pyright: ignore (other arguments than those of Conv1d)
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return y and, if asked for, the state: see `causal_conv1d`.

        `mask` [b t] is 0 where an input counts as 0. Without gradients and with one token a sequence the
        `cache` [n c w] is changed in place and returned; otherwise it is the initial state.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("mask and cu_seqlens exclude each other")
            x = x.masked_fill(mask[..., None] == 0, 0.0)
        n = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        one = x.shape[0] * x.shape[1] == n and (cu_seqlens is None or bool((cu_seqlens.diff() == 1).all()))
        if one and not torch.is_grad_enabled():
            cache = x.new_zeros(n, x.shape[2], self.kernel_size[0]) if cache is None else cache
            y, cache = causal_conv1d_update(x, cache, residual, self.weight[:, 0], self.bias, self.activation)
            return y, cache if output_final_state else None
        return causal_conv1d(
            x,
            self.weight[:, 0],
            self.bias,
            residual,
            cache,
            output_final_state,
            self.activation,
            cu_seqlens=cu_seqlens,
        )

    @property
    def state_size(self) -> int:
        """Numbers in the state of a sequence."""
        return self.hidden_size * self.kernel_size[0]


def _last_inputs(x: Tensor, before: Tensor | None, width: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return the last inputs of each sequence [n c w]: those of x, and of `before` where x has fewer."""
    b, time, channels = x.shape
    if cu_seqlens is None:
        rows = torch.arange(b, device=x.device)[:, None]
        bounds = torch.zeros_like(rows), torch.full_like(rows, time)
    else:
        rows = torch.zeros_like(cu_seqlens[1:, None])
        bounds = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    starts, stops = bounds
    places = stops - width + torch.arange(width, device=x.device)  # [n w]
    if before is None:
        before = x.new_zeros(len(starts), channels, width)
    inside = (places >= starts)[:, None]
    held = (places - starts + width).clamp(0, width - 1)[:, None].expand(-1, channels, -1)
    before = before.to(x.dtype).gather(2, held)
    if not time:
        return before
    return torch.where(inside, x[rows, places.clamp(min=0)].mT, before)


def _given(weight: Tensor | None) -> Tensor:
    """Return the weights, or raise NotImplementedError where there are none."""
    if weight is None:
        raise NotImplementedError("weight=None is not supported by lintra's stand-in for fla")
    return weight


def _check_state(name: str, state: Tensor, n: int, weight: Tensor) -> None:
    """Raise ValueError unless a state is [n c w] for weights [c w]."""
    checks.shape(name, state, "n c w", {"n": n, "c": weight.shape[0], "w": weight.shape[1]})

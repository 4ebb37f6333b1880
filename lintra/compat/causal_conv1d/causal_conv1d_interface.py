"""The short causal convolution by the names and layouts of causal-conv1d.

Letters: b batch, d channels, t tokens, w width, l inputs that a buffer holds, r rows of a buffer. Channels
come before time, and are best contiguous: x is then the transposed view of a tensor [b t d], and so is y.
"""

import torch
from torch import Tensor
from torch.nn import functional

from lintra.compat.arguments import (
    integers,
    no_leaf,
    refuse,
    rows_below,
    state_before,
    tensors,
    written_in_place,
)
from lintra.compat.seq_idx import Packing, flat
from lintra.native import conv1d as kernel
from lintra.ops import Layout, causal_conv1d, checks
from lintra.ops.autocast import no_autocast
from lintra.ops.conv1d import Activation
from lintra.ops.dispatch import can_call_kernels


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel with itself: y [b d t] in x's dtype and, if requested, the last w - 1 inputs [b d
    w-1].

    x [b d t], weight [d w], its last column for the token itself, bias [d]; `activation` is None, "silu" or
    "swish", which are the same. seq_idx [b t] of integers: tokens of other numbers are not read, and where it
    is below 0, y is 0. `initial_states` [b d w-1] are the inputs before x (None: zeros). With
    return_final_states, those are written to `final_states_out` [b d w-1], if given. Differentiable by x,
    weight, bias and initial_states; of any width. Raises NotImplementedError for another activation and
    ValueError or TypeError for arguments that disagree, including seq_idx together with states.
    """
    silu = _activation(activation)
    states = {"initial_states": (initial_states, "b d l"), "final_states_out": (final_states_out, "b d l")}
    sizes = _check(x, weight, bias, **states)
    if sizes.setdefault("l", sizes["w"] - 1) != sizes["w"] - 1:
        raise ValueError(f"states must hold the last w - 1 = {sizes['w'] - 1} inputs, got {sizes['l']}")
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise ValueError("seq_idx excludes initial_states and return_final_states, which are of one sequence")
    tokens = x.mT
    if seq_idx is not None:
        packing = Packing.of(seq_idx, "x", tokens)
        y, _ = causal_conv1d(flat(tokens), weight, bias, activation=silu, layout=packing.layout)
        y = y.reshape(tokens.shape)
        padding = seq_idx < 0
        return y.masked_fill(padding[..., None], 0).mT
    state = initial_states
    if state is not None:
        state = state_before(state.mT, checks.sum_dtype(x.dtype), x, weight, bias)
    layout = Layout(sizes["b"], sizes["t"], x.device)
    y, after = causal_conv1d(tokens, weight, bias, activation=silu, state=state, layout=layout)
    if not return_final_states:
        return y.mT
    last = after.to(x.dtype).mT
    return y.mT, last if final_states_out is None else final_states_out.copy_(last)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolve a few further tokens: y like x, and `conv_state` is updated in place.

    x [b d] or [b d t] and conv_state [b d l], l >= max(1, w - 1), each of its own dtype; weight [d w], bias
    [d]. The last w - 1 inputs in conv_state come before x, which is then appended. With `cache_seqlens` [b]
    of integers conv_state is a circular buffer instead: the first token goes to place cache_seqlens % l. With
    `conv_state_indices` [b] conv_state is [r d l] and the indices give the row of each sequence; below 0
    there is none, and y is 0. No row may be given twice. Gradients go through x, weight and bias, and through
    what is written into conv_state to earlier tokens. Raises NotImplementedError for an activation other than
    None, "silu" or "swish" and ValueError or TypeError for arguments that disagree; ValueError for a
    conv_state that is a leaf and requires grad, where gradients are recorded.
    """
    silu = _activation(activation) is not None
    one = isinstance(x, Tensor) and x.dim() == 2
    tokens = x[..., None] if one else x
    axes = "b d l" if conv_state_indices is None else "r d l"
    sizes = _check(tokens, weight, bias, conv_state=(conv_state, axes))
    no_leaf("conv_state", conv_state)
    if conv_state.dtype != x.dtype:  # as transformers' own function takes it
        wide = torch.promote_types(conv_state.dtype, x.dtype)
        buffer = conv_state.to(wide)  # itself where it is the wider one
        options = activation, cache_seqlens, conv_state_indices
        y = causal_conv1d_update(x.to(wide), buffer, weight, bias, *options).to(x.dtype)
        if buffer is not conv_state:
            conv_state.copy_(buffer)
        return y
    least = max(1, sizes["w"] - 1)
    if sizes["l"] < least:
        raise ValueError(f"conv_state must hold at least {least} inputs for w={sizes['w']}, got {sizes['l']}")
    integers("cache_seqlens", cache_seqlens, "b", sizes, x, "x")
    integers("conv_state_indices", conv_state_indices, "b", sizes, x, "x")
    rows_below("conv_state_indices", conv_state_indices, conv_state.shape[0])
    tokens = tokens.mT
    if can_call_kernels(tokens, conv_state, weight, bias):
        total = checks.sum_dtype(x.dtype)
        weight, bias = weight.to(total), None if bias is None else bias.to(total)
        written_in_place("conv_state", conv_state)
        y = kernel.step(tokens, conv_state, weight, bias, silu, conv_state_indices, cache_seqlens).mT
    else:
        y = _update(tokens.mT, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices)
    return y[..., 0] if one else y


def _update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """`causal_conv1d_update` in PyTorch alone, of x [b d t]."""
    d, t = x.shape[1:]
    (_, width), length = weight.shape, conv_state.shape[2]
    state, real = conv_state, None
    if conv_state_indices is not None:
        real = conv_state_indices >= 0
        state = conv_state[conv_state_indices.clamp(min=0).long()]
    if cache_seqlens is None:
        inputs = torch.cat((state, x), 2)
        after = inputs[..., inputs.shape[2] - length :]
        inputs = inputs[..., length - (width - 1) :]
    else:
        state = state_before(state, state.dtype, x)
        start = cache_seqlens.long()[:, None]
        places = (start - (width - 1) + torch.arange(width - 1, device=x.device)) % length
        inputs = torch.cat((state.gather(2, places[:, None].expand(-1, d, -1)), x), 2)
        kept = min(t, length)  # with more tokens than places, the last ones
        places = (start + t - kept + torch.arange(kept, device=x.device)) % length
        after = state.scatter(2, places[:, None].expand(-1, d, -1), x[..., t - kept :])
    # What is written keeps its graph, for the gradients of earlier tokens; `inputs` has memory of its own.
    if conv_state_indices is None or real is None:
        conv_state.copy_(after)
    else:
        conv_state.index_copy_(0, conv_state_indices[real].long(), after[real])
    total = checks.sum_dtype(x.dtype)
    weight, bias = weight.to(total), None if bias is None else bias.to(total)
    inputs = inputs if t else functional.pad(inputs, (0, 1))  # conv1d needs as many inputs as weights
    with no_autocast(x):  # the kernels compute in the dtype of sums too
        y = functional.conv1d(inputs.to(total), weight[:, None], bias, groups=d)[..., :t]
    y = functional.silu(y) if silu else y
    y = y if real is None else y.masked_fill(~real[:, None, None], 0)
    return y.to(x.dtype)


def _activation(activation: str | None) -> Activation | None:
    if activation not in (None, "silu", "swish"):
        refuse("activation", f"it must be None, 'silu' or 'swish', got {activation!r}")
    return None if activation is None else "silu"


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, **states: tuple[Tensor | None, str]
) -> dict[str, int]:
    """Return the sizes of all, or raise ValueError, TypeError or NotImplementedError."""
    sizes = tensors({"x": (x, "b d t"), "weight": (weight, "d w"), "bias": (bias, "d"), **states})
    if sizes["w"] < 1:
        raise ValueError("weight must be [d w] with a width of at least 1 token, got w=0")
    return sizes

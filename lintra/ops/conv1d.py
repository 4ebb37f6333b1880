"""The short causal convolution over time that linear recurrences put before their queries, keys and values.

Every channel is convolved with itself alone,

    y_t = act(bias + sum_j weight[j] x_{t-w+1+j})        j = 0 .. w - 1

so that the last weight is that of the token itself. Poli et al. 2023, arXiv:2302.10866, section 3.1; Gu and
Dao 2023, arXiv:2312.00752, section 3.4. Its state is the last w - 1 inputs.

Letters: b batch, t time, c channels, w width, n sequences.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.native import conv1d as kernel
from lintra.ops import checks, dispatch, operator
from lintra.ops.autocast import follow_autocast, no_autocast
from lintra.ops.dispatch import can_skip_operator
from lintra.ops.layout import CuSeqlens, Layout
from lintra.ops.padding import take

Activation = Literal["silu"]
ConvImpl = Literal["auto", "reference", "torch", "native"]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    layout: Layout | None = None,
    impl: ConvImpl = "auto",
) -> tuple[Tensor, Tensor]:
    """Convolution of each channel with itself over the last w tokens, from a state and to a state.

    x [b t c], weight [c w] (the last column for the token itself), bias [c] -> y [b t c] in x's dtype and the
    last w - 1 inputs [b w-1 c], float32 (float64 for float64 inputs), the latest last. `state` holds those
    before x (None: zeros). `activation="silu"` is applied to the sum. `mask` [b t] is True for real tokens:
    padded ones are no inputs, and their y is 0. With `cu_seqlens` [n+1] n sequences are packed one after the
    other, b = 1 and states are [n w-1 c]. A `layout` of x replaces both for a caller that has validated all.
    impl: "reference" (a loop over tokens), "torch" (every device, differentiable any number of times),
    "native" (C++, CPU) or "auto".
    Raises ValueError or TypeError for arguments that disagree; RuntimeError for an `impl` that is not
    available here.
    """
    if layout is None:
        (x,) = follow_autocast(x)
        layout = _validate(x, weight, bias, activation, state, mask, cu_seqlens)
    dtype = checks.sum_dtype(x.dtype)
    weight = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    silu = activation == "silu"
    given = [y for y in (x, weight, bias, state) if y is not None]
    if impl in ("auto", "native") and can_skip_operator(*given):
        # Not through the operator: PyTorch's dispatcher takes longer than the arithmetic of one token.
        return kernel.forward(x, weight, bias, state, layout.mask, layout.cu_seqlens, silu)
    chosen = dispatch.choose("causal_conv1d", impl, *given)
    if state is None:
        state = x.new_zeros(layout.n, weight.shape[1] - 1, x.shape[2], dtype=dtype)
    if chosen == "native":
        return causal_conv1d_native(x, weight, bias, state, layout.mask, layout.cu_seqlens, silu)
    with no_autocast(x):
        if layout.packed:
            options = {"weight": weight, "bias": bias, "activation": activation, "impl": chosen}
            return layout.pad_bucketed().each_with_state(partial(causal_conv1d, **options), state, x=x)
        if chosen == "reference":
            x = layout.zero(x)
            y, state = causal_conv1d_reference(x.to(dtype), weight, bias, state, layout.mask, silu)
        else:
            y, state = _shifted(x.to(dtype), weight, bias, state, layout, silu)
    return y.to(x.dtype), state


def conv_impl(impl: str) -> Any:
    """Return the implementation of a convolution beside a recurrence with that `impl`: there is none in
    Triton."""
    return "auto" if impl == "triton" else impl


def conv_weight(*sizes: int) -> nn.Parameter:
    """Return weights [... w], initialised as those of a convolution with one input channel in PyTorch."""
    bound = sizes[-1] ** -0.5
    return nn.Parameter(torch.empty(sizes).uniform_(-bound, bound))


def causal_conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, mask: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """The definition, a token at a time, as `causal_conv1d` has it; all of one dtype."""
    ys = [x[:, :0]]
    for i in range(x.shape[1]):
        inputs = torch.cat((state, x[:, i : i + 1]), 1)  # [b w c]
        y = torch.einsum("bwc,cw->bc", inputs, weight)
        y = y if bias is None else y + bias
        y, after = functional.silu(y) if silu else y, inputs[:, 1:]
        if mask is not None:
            real = mask[:, i, None]
            y = y.masked_fill(~real, 0.0)
            after = torch.where(real[..., None], after, state)
        ys.append(y[:, None])
        state = after
    return torch.cat(ys, 1), state.clone()


def _shifted(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, layout: Layout, silu: bool
) -> tuple[Tensor, Tensor]:
    """A product for each column of the weights, of all tokens at once; padding goes after real tokens."""
    left = layout.left_align()
    inputs = torch.cat((state, x if left is None else left.gather(layout.zero(x))), 1)
    width, time = weight.shape[1], x.shape[1]
    y = sum((weight[:, j] * inputs[:, j : j + time] for j in range(width)), x.new_zeros(()))
    y = y if bias is None else y + bias
    y = functional.silu(y) if silu else y
    if left is None:
        return y, inputs[:, time:].clone()  # a view would keep the whole line
    kept = left.mask.sum(1)[:, None] + torch.arange(width - 1, device=x.device)
    return left.restore(y), take(inputs, kept)


def _validate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Any,
    state: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: CuSeqlens | None,
) -> Layout:
    """Return the layout of x, or raise ValueError or TypeError for arguments that disagree."""
    sizes: dict[str, int] = {}
    checks.shape("x", x, "b t c", sizes)
    checks.floating("x", x)
    layout = Layout.of("x", x, mask, cu_seqlens)
    checks.shape("weight", weight, "c w", sizes)
    if sizes["w"] < 1:
        raise ValueError("weight must be [c w] with a width of at least 1 token, got w=0")
    if bias is not None:
        checks.shape("bias", bias, "c", sizes)
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None:
            checks.floating(name, given)
            if given.device != x.device:
                raise ValueError(f"{name} must be on the device of x, {x.device}, got {given.device}")
    if state is not None:
        last = sizes["w"] - 1
        if isinstance(state, Tensor) and state.dim() == 3 and state.shape[1] != last:
            raise ValueError(
                f"state must hold the last w - 1 = {last} inputs of a convolution {sizes['w']} wide, "
                f"got {state.shape[1]}"
            )
        checks.shape("state", state, "n l c", {"n": layout.n, "l": last, "c": sizes["c"]})
        checks.state_dtype("state", state, x, narrow=False)
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    return layout


_OPTIONS = "Tensor? mask, Tensor? cu_seqlens, bool silu"


def _fake(x, weight, bias, state, mask, cu_seqlens, silu):
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _save(ctx, inputs, output):
    *tensors, ctx.silu = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dy, dstate):
    x, weight, bias, state, mask, cu_seqlens = ctx.saved_tensors
    others = mask, cu_seqlens
    dy = torch.zeros_like(x) if dy is None else dy
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        inputs, given = (x, weight, bias, state), (dy, dstate)
        options = {"activation": "silu" if ctx.silu else None, "mask": mask, "cu_seqlens": cu_seqlens}

        def again(x, weight, bias, state):
            with no_autocast(x):
                return causal_conv1d(x, weight, bias, state=state, impl="torch", **options)

        return *operator.differentiable(again, inputs, given), None, None, None
    dx, dweight, dbias, dstate = _backward(dy, dstate, x, weight, bias, state, *others, ctx.silu)
    return dx, dweight, None if bias is None else dbias, dstate, None, None, None


def _gradients(dy, dstate, x, *others):
    return operator.empty_for_none(x, kernel.backward(dy, dstate, x, *others))


def _gradients_fake(dy, dstate, x, weight, bias, state, *others):
    given = (x, weight, bias, state)
    return operator.empty_for_none(x, (y if y is None else y.new_empty(y.shape) for y in given))


causal_conv1d_native = operator.define(
    "causal_conv1d",
    f"(Tensor x, Tensor weight, Tensor? bias, Tensor state, {_OPTIONS}) -> (Tensor y, Tensor state_out)",
    kernel.forward,
    _fake,
    _differentiate,
    _save,
    ["CPU"],
)
_backward = operator.define(
    "causal_conv1d_backward",
    f"(Tensor dy, Tensor? dstate, Tensor x, Tensor weight, Tensor? bias, Tensor state, {_OPTIONS}) -> "
    "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dstate_in)",
    _gradients,
    _gradients_fake,
    operator.refuse_double_backward("the causal convolution", "native"),
    None,
    ["CPU"],
)

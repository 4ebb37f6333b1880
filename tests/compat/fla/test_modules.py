"""The parts of FLA's layers other than the recurrences, compared with FLA's references or their formulas."""

from inspect import signature
from itertools import pairwise

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra.compat.fla import modules
from lintra.compat.fla.modules.activations import swiglu, swiglu_linear
from lintra.compat.fla.modules.causal_conv1d.ops import ShortConvolution, causal_conv1d, causal_conv1d_update
from lintra.compat.fla.modules.norm.fused_norm_gate import FusedRMSNormGated, rms_norm_gated
from lintra.compat.fla.modules.norm.l2norm import L2Norm, l2norm
from lintra.compat.fla.modules.norm.layernorm import RMSNorm, rms_norm
from lintra.compat.fla.modules.rotary import rotary_embedding
from lintra.compat.fla.ops.utils import (
    prepare_cu_seqlens_from_lens,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
)
from lintra.testing.laws import gradients
from tests.compat.fla import real

BOUNDS = [0, 2, 2, 9, 20]
SIGNATURES = [
    *((f"modules.{name}", getattr(modules, name)) for name in modules.__all__),
    *(("modules.norm.l2norm.l2norm", l2norm), ("modules.norm.layernorm.rms_norm", rms_norm)),
    *(("modules.norm.fused_norm_gate.rms_norm_gated", rms_norm_gated),),
    *(("modules.causal_conv1d.ops.causal_conv1d", causal_conv1d),),
    *(("modules.causal_conv1d.ops.causal_conv1d_update", causal_conv1d_update),),
    *(("modules.rotary.rotary_embedding", rotary_embedding),),
    *(("modules.activations.swiglu_linear", swiglu_linear),),
    *(("ops.utils.index.prepare_lens", prepare_lens),),
    *(("ops.utils.index.prepare_cu_seqlens_from_lens", prepare_cu_seqlens_from_lens),),
    *(("ops.utils.index.prepare_cu_seqlens_from_mask", prepare_cu_seqlens_from_mask),),
]


def plain(function):
    """Names and defaults of the parameters that can be passed by position or name."""
    parameters = signature(function).parameters.values()
    return [(x.name, x.default) for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD]


def draw(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("path", "ours"), SIGNATURES, ids=[x for x, _ in SIGNATURES])
def test_a_signature(path, ours):
    module, name = path.rsplit(".", 1)
    theirs = getattr(real.fla(f"fla.{module}"), name)
    pairs = [(ours, theirs)] + ([(ours.forward, theirs.forward)] if isinstance(ours, type) else [])
    for mine, their in pairs:
        found, known = (
            [
                (x.name, x.default)
                for x in signature(f).parameters.values()
                if x.kind == x.POSITIONAL_OR_KEYWORD
            ]
            for f in (mine, their)
        )
        assert found == known


def test_weights_have_the_names_they_have_there():
    theirs = real.fla("fla.modules")
    for name, arguments in (
        ("RMSNorm", {"hidden_size": 4, "bias": True}),
        ("FusedRMSNormGated", {"hidden_size": 4}),
        ("FusedRMSNormGated", {"hidden_size": 4, "elementwise_affine": False}),
        ("ShortConvolution", {"hidden_size": 6, "kernel_size": 4, "bias": True}),
    ):
        mine, their = getattr(modules, name)(**arguments), getattr(theirs, name)(**arguments)
        mine.load_state_dict(their.state_dict())
        their.load_state_dict(mine.state_dict())


def test_division_by_the_length():
    (x,) = draw((2, 3, 5))
    assert_close(l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert_close(L2Norm(eps=1.0)(x), x / (x.square().sum(-1, keepdim=True) + 1).sqrt())
    half = x.detach().bfloat16()
    assert l2norm(half).dtype == torch.bfloat16
    assert_close(l2norm(half, output_dtype=torch.float32), l2norm(half.float()))


@pytest.mark.parametrize("biased", [True, False])
def test_the_norm_of_the_mean_square(biased):
    inputs = draw((2, 3, 5), (5,), (5,), (2, 3, 5))
    x, weight, bias, residual = inputs
    bias = bias if biased else None
    reference = real.fla("fla.modules.norm.layernorm").rms_norm_ref
    for given in (None, residual):
        found = rms_norm(x, weight, bias, given, eps=0.1, prenorm=True)
        expected = reference(x, weight, bias, given, eps=0.1, prenorm=True)
        assert_close(found, expected)
        assert_close(gradients(found[0], inputs), gradients(expected[0], inputs))
    norm = RMSNorm(5, bias=biased, dtype=torch.float64)
    ones, zeros = torch.ones_like(weight), torch.zeros_like(weight)
    assert_close(norm(x), reference(x, ones, zeros))
    assert_close(RMSNorm(5, elementwise_affine=False)(x), reference(x, ones, zeros))


def test_dtypes_of_a_norm():
    """The sum with the residual has the dtype of the residual, or a wider one."""
    x, weight, residual = (y.detach() for y in draw((2, 5), (5,), (2, 5), dtype=torch.bfloat16))
    y, summed = rms_norm(x, weight, None, residual.float(), prenorm=True)
    assert (y.dtype, summed.dtype) == (torch.bfloat16, torch.float32)
    assert_close(summed, x.float() + residual.float(), rtol=0, atol=0)
    assert rms_norm(x, weight, None, residual, prenorm=True)[1].dtype == torch.bfloat16
    assert rms_norm(x, weight, None, prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_the_gated_norm(activation):
    inputs = draw((2, 3, 5), (2, 3, 5), (5,))
    x, gate, weight = inputs
    act = torch.sigmoid if activation == "sigmoid" else functional.silu
    expected = rms_norm(x, weight, None, eps=1e-6) * act(gate)
    found = rms_norm_gated(x, gate, weight, None, activation)
    assert_close(found, expected)
    assert_close(gradients(found, inputs), gradients(expected, inputs))
    module = FusedRMSNormGated(5, activation=activation, dtype=torch.float64)
    assert_close(module(x, gate, prenorm=True), (rms_norm(x, None, None) * act(gate), x))
    with pytest.raises(ValueError, match="activation"):
        FusedRMSNormGated(5, activation="relu")


def test_the_gate_of_an_mlp():
    inputs = draw((2, 3, 5), (2, 3, 5), (7, 5), (7,))
    x, y, weight, bias = inputs
    expected = x * x.sigmoid() * y
    assert_close(swiglu(x, y), expected)
    assert_close(swiglu_linear(x, y, weight, bias), expected @ weight.mT + bias)


def convolved(x, weight, bias, before):
    """With PyTorch's convolution, continuing from the earlier inputs."""
    inputs = torch.cat((before[..., 1:], x.mT), -1)
    y = functional.conv1d(inputs, weight[:, None], bias, groups=x.shape[2])
    return functional.silu(y).mT, torch.cat((before, x.mT), -1)[..., -weight.shape[1] :]


@pytest.mark.parametrize("t", [1, 2, 20])
def test_the_convolution(t):
    inputs = draw((2, t, 6), (6, 4), (6,), (2, 6, 4), (2, t, 6))
    x, weight, bias, before, residual = inputs
    given = {"initial_state": before, "output_final_state": True, "activation": "silu"}
    found = causal_conv1d(x, weight, bias, residual, **given)
    y, state = convolved(x, weight, bias, before)
    assert_close(found, (y + residual, state))
    sums = [torch.cat([z.flatten() for z in pair]) for pair in (found, (y + residual, state))]
    assert_close(*(gradients(z, inputs) for z in sums))
    nothing = causal_conv1d(x, weight, bias, output_final_state=True, activation="swish")
    assert_close(nothing, convolved(x, weight, bias, torch.zeros_like(before)))
    assert causal_conv1d(x, weight)[1] is None


def test_a_state_may_be_written_over_before_the_backward():
    inputs = draw((2, 5, 6), (6, 4), (6,), (2, 6, 4))
    x, weight, bias, before = inputs
    expected = gradients(torch.cat([z.flatten() for z in convolved(x, weight, bias, before)]), inputs)
    held = before.clone()
    y, state = causal_conv1d(x, weight, bias, None, held, True, "silu")
    held.copy_(state)
    assert_close(gradients(torch.cat((y.flatten(), held.flatten())), inputs), expected)


def test_packed_convolutions_are_as_alone():
    inputs = draw((1, 20, 6), (6, 4), (6,), (4, 6, 4))
    x, weight, bias, before = inputs
    given = {"initial_state": before, "output_final_state": True, "cu_seqlens": torch.tensor(BOUNDS)}
    y, state = causal_conv1d(x, weight, bias, activation="silu", **given)
    parts = [
        convolved(x[:, start:stop], weight, bias, before[i : i + 1])
        for i, (start, stop) in enumerate(pairwise(BOUNDS))
        if stop > start
    ]
    assert_close(y, torch.cat([part for part, _ in parts], 1))
    assert_close(state[[0, 2, 3]], torch.cat([part for _, part in parts]))
    assert_close(state[1], before[1])  # no tokens


def test_a_token_of_a_convolution_changes_its_cache():
    x, weight, bias, before, residual = (
        y.detach() for y in draw((2, 1, 6), (6, 4), (6,), (2, 6, 4), (2, 1, 6))
    )
    expected = convolved(x, weight, bias, before)
    for shape in ((2, 1, 6), (1, 2, 6), (2, 6)):
        cache = before.clone()
        y, after = causal_conv1d_update(x.view(shape), cache, residual.view(shape), weight, bias, "silu")
        assert after is cache
        assert_close((y.view(2, 1, 6), cache), (expected[0] + residual, expected[1]))


def test_the_module_of_a_convolution():
    """Token by token, with a cache, it returns the same as in one call."""
    module = ShortConvolution(6, 4, bias=True, dtype=torch.float64)
    assert module.state_size == 24
    (x,) = draw((2, 20, 6))
    y, state = module(x, output_final_state=True)
    assert_close((y, state), convolved(x, module.weight[:, 0], module.bias, x.new_zeros(2, 6, 4)))
    with torch.no_grad():
        cache, ys = None, []
        for i in range(20):
            part, cache = module(x[:, i : i + 1], cache=cache, output_final_state=True)
            ys.append(part)
    assert_close((torch.cat(ys, 1), cache), (y, state))
    mask = torch.ones(2, 20).index_fill(1, torch.tensor([0, 1]), 0)
    blank = x.detach().clone()
    blank[:, :2] = torch.nan
    assert_close(module(blank, mask=mask)[0][:, 2:], module(x[:, 2:])[0])


def test_arguments_of_a_convolution():
    x, weight = draw((2, 5, 6), (6, 4))
    for given, kind in (
        ({"activation": "relu"}, ValueError),
        ({"backend": "numpy"}, ValueError),
        ({"cp_context": object()}, NotImplementedError),
        ({"initial_state": torch.zeros(2, 6, 3)}, ValueError),
    ):
        with pytest.raises(kind, match=next(iter(given))):
            causal_conv1d(x, weight, **given)
    with pytest.raises(NotImplementedError, match="weight"):
        causal_conv1d(x)
    with pytest.raises(ValueError, match="exclude"):
        ShortConvolution(6, 4)(x, mask=torch.ones(2, 5), cu_seqlens=torch.tensor([0, 5]))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotations(interleaved):
    x, angles = draw((2, 5, 3, 8), (9, 3))
    cos, sin = angles.cos().detach(), angles.sin().detach()
    reference = real.fla("fla.modules.rotary.ops").rotary_embedding_ref
    expected = reference(x, cos[2:7], sin[2:7], interleaved)
    found = rotary_embedding(x, cos, sin, interleaved, seqlen_offsets=2)
    assert_close(found, expected)
    assert_close(gradients(found, [x]), gradients(expected, [x]))
    starts = torch.tensor([1, 4])
    each = rotary_embedding(x, cos, sin, interleaved, seqlen_offsets=starts)
    for i, start in enumerate([1, 4]):
        alone = rotary_embedding(x[i : i + 1], cos, sin, interleaved, seqlen_offsets=start)
        assert_close(each[i : i + 1], alone)
    packed = x.reshape(1, 10, 3, 8)
    bounds = torch.tensor([0, 5, 10])
    found = rotary_embedding(packed, cos, sin, interleaved, seqlen_offsets=starts, cu_seqlens=bounds)
    assert_close(found.reshape(x.shape), each)
    changed = x.detach().clone()
    assert rotary_embedding(changed, cos, sin, interleaved, True, 2) is changed
    assert_close(changed, expected.detach())
    with pytest.raises(ValueError, match="must have 10 places"):
        rotary_embedding(x, cos, sin, seqlen_offsets=5)
    ahead = rotary_embedding(x, cos, sin, seqlen_offsets=torch.full((len(x),), -2))  # of padding on the left
    assert torch.equal(ahead[:, :2], x[:, :2])
    assert_close(ahead[:, 2:], rotary_embedding(x[:, 2:], cos, sin))


def test_bounds():
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]]).bool()
    assert_close(prepare_lens_from_mask(mask), torch.tensor([2, 1, 0], dtype=torch.int32))
    bounds = prepare_cu_seqlens_from_mask(mask)
    assert_close(bounds, torch.tensor([0, 2, 3, 3], dtype=torch.int32))
    assert_close(prepare_lens(bounds), prepare_lens_from_mask(mask))
    assert_close(prepare_cu_seqlens_from_lens(torch.tensor([2, 1]), torch.int64), torch.tensor([0, 2, 3]))


def test_norms_made_without_memory_can_be_initialised():
    for kind, options in ((RMSNorm, {"bias": True}), (FusedRMSNormGated, {})):
        made = kind(8, device="meta", **options).to_empty(device="cpu")
        made.reset_parameters()
        assert_close(made.state_dict(), kind(8, **options).state_dict())
        kind(8, elementwise_affine=False).reset_parameters()

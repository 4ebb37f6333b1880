"""Retention: its dense definition, its limits, what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra import checkpoint
from lintra.attention import linear, retention
from lintra.attention.retention import Retention
from lintra.testing.laws import EXACT, TIME, Case, extend_by_steps, gradients
from tests.attention.heads import for_each_output

VARIANTS = [
    retention.Config(),
    retention.Config(impl="torch", chunk=7, fastest=0.3, slowest=0.01, normalize_heads=False),
    retention.Config(impl="reference", gate=False),
    retention.Config(decay_per="kv_head", centre_heads=True),
    retention.Config(value_heads=8),
    retention.Config(value_heads=4, decay_per="kv_head", gate=False),
]
PLAIN = retention.Config(normalize_heads=False, gate=False)


def weights(attention: Retention, q: Tensor, k: Tensor) -> Tensor:
    """Equation 5: decay^(t-s) q_t . k_s / sqrt(d) for s up to t, [b h t s]."""
    decay = attention.log_decay.exp()
    decay = decay.repeat_interleave(attention.out_heads // len(decay))
    q, k = for_each_output(attention, q, k)
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    faded = (decay[:, None, None] ** distance.clamp(min=0)).tril()
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    return scores * faded


def dense(attention: Retention, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> Tensor:
    """Equation 8, every weight."""
    y = torch.einsum("bhts,bshe->bthe", weights(attention, q, k), *for_each_output(attention, v))
    if attention.config.centre_heads:
        y = y - y.mean(-1, keepdim=True)
    if attention.config.normalize_heads:
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return y if gate is None else y * (gate * gate.sigmoid()).view(y.shape)


def test_the_decays_are_those_of_the_paper():
    decay = retention.Config().build(heads=8, dim=4, causal=True).double().log_decay.exp()
    assert_close(decay, 1 - 2.0 ** -(5.0 + torch.arange(8).double()), rtol=1e-15, atol=0)
    ends = retention.Config(fastest=1 / 32, slowest=1 / 512).build(heads=3, dim=4, causal=True).log_decay
    assert_close(-torch.expm1(ends), torch.tensor([1 / 32, 1 / 128, 1 / 512]))


def test_the_slowest_of_many_heads_still_forgets():
    """In float32 1 - 2^-25 is 1, and its logarithm 0."""
    slow = retention.Config().build(heads=32, dim=4, causal=True).log_decay
    assert_close(slow.double(), -(2.0 ** -(5.0 + torch.arange(32).double())), rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rates_in_float64_are_those_of_the_configuration(dtype):
    """Whatever dtype the model had before; rates that were changed stay as they were set."""
    attention = retention.Config().build(heads=8, dim=4, causal=True).to(dtype).double()
    exact = torch.log1p(-(2.0 ** -(5.0 + torch.arange(8).double())))
    assert_close(attention.log_decay, exact, rtol=1e-13, atol=0)
    attention.to(dtype).log_decay[0] = -0.5
    assert attention.double().log_decay[0] == -0.5


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_query_head_has_a_rate_of_its_own(kv_heads):
    """With shared keys and values too: like retention of repeated ones, with a rate for each query head."""
    case = Case("retention", retention.Config(), True, kv_heads=kv_heads)
    attention, (q, k, v, gate) = case.build(), case.draw()
    assert_close(attention.log_decay, replace(case, kv_heads=4).build().log_decay)
    k, v = (x.repeat_interleave(4 // kv_heads, 2) for x in (k, v))
    expected = replace(case, kv_heads=4).build()(q, k, v, gate=gate)
    assert_close(attention(*case.draw()[:3], gate=gate), expected, **EXACT)
    assert attention.start(2).kv.shape == (2, 4, 6, 4)


def test_a_configuration_of_before_has_a_rate_for_each_key_value_head():
    content = checkpoint.to_json(retention.Config())
    del content["decay_per"], content["centre_heads"]
    config = checkpoint.from_json(retention.Config, content, "attention")
    assert config == retention.Config(decay_per="kv_head")
    attention = config.build(heads=4, kv_heads=2, dim=4, causal=True)
    assert attention.log_decay.shape == (2,)
    assert attention.start(1).kv.shape == (1, 2, 4, 4)


def test_centred_heads_are_group_norm():
    """Equation 8 with a group for each head, as PyTorch computes it."""
    case = Case("retention", retention.Config(centre_heads=True), True)
    attention, (q, k, v, gate) = case.build(), case.draw()
    plain = Case("retention", PLAIN, True).build()(q, k, v)
    y = torch.nn.functional.group_norm(plain.flatten(0, 1).flatten(1), 4, eps=1e-6).view_as(plain)
    assert_close(attention(q, k, v, gate=gate), y * torch.nn.functional.silu(gate).view_as(y), **EXACT)


def test_without_decay_it_is_the_unnormalised_sum():
    case = Case("retention", PLAIN, True)
    attention, inputs = case.build(), case.draw()
    attention.log_decay.zero_()
    other = Case("linear", linear.Config(feature_map=linear.Identity(), normalize=False), True).build()
    q, k, v = inputs
    expected = other(q, k / q.shape[-1] ** 0.5, v)
    y = attention(*inputs)
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


def test_rotary_turns_queries_and_keys():
    case = Case("retention", VARIANTS[0], True, rotary=True)
    attention, (q, k, v, gate) = case.build(), case.draw()
    rope = case.rope(0, TIME)
    y = attention(q, k, v, rope=rope, gate=gate)
    assert_close(y, dense(attention, rope(q), rope(k), v, gate), **EXACT)


def test_the_normalisers_of_the_paper_cancel_under_the_norm():
    """Rows divided by sqrt(sum decay^(t-s)) and max(|sum of scores|, 1), section 2.1: the same heads."""
    case = Case("retention", retention.Config(gate=False), True, kv_heads=4)
    attention, (q, k, v) = case.build(), case.draw()
    v = 1e6 * v  # the eps of the mean square then vanishes
    scores = weights(attention, q, k)
    distance = torch.arange(TIME)[:, None] - torch.arange(TIME)
    rows = (attention.log_decay.exp()[:, None, None] ** distance.clamp(min=0)).tril().sum(-1, keepdim=True)
    scores = scores / rows.sqrt()
    scores = scores / scores.sum(-1, keepdim=True).abs().clamp(min=1)
    y = torch.einsum("bhts,bshe->bthe", scores, v)
    y = y / y.square().mean(-1, keepdim=True).sqrt()
    assert_close(attention(q, k, v), y, **EXACT)


def test_the_order_of_keys_matters():
    """With decay, swapping two pairs changes the output of the last query; without decay it does not."""
    case = Case("retention", PLAIN, True)
    attention, (q, k, v) = case.build(), case.draw()
    order = torch.arange(TIME)
    order[[2, 9]] = order[[9, 2]]
    last = attention(q, k, v)[:, -1]
    assert (attention(q, k[:, order], v[:, order])[:, -1] - last).abs().max() > 0.01
    attention.log_decay.zero_()
    last = attention(q, k, v)[:, -1]
    assert_close(attention(q, k[:, order], v[:, order])[:, -1], last, **EXACT)


def test_constant_values_do_not_come_back():
    """An unnormalised recurrence: the declared exception to the law of constant values."""
    q, k, v = Case("retention", PLAIN, True).draw()
    y = Case("retention", PLAIN, True).build()(q, k, torch.full_like(v, 3.0))
    assert (y - 3.0).abs().max() > 1


def test_zero_rows_and_one_token():
    """A query or a key of zeros, and a sequence of one token: finite, with finite gradients."""
    case = Case("retention", VARIANTS[0], True)
    attention = case.build()
    for time in (1, 5):
        inputs = [x.detach() for x in case.draw(time)]
        inputs[0][:, 0], inputs[1][:, -1] = 0, 0
        inputs = [x.requires_grad_() for x in inputs]
        y = attention(*inputs[:3], gate=inputs[3])
        assert (y[:, 0] == 0).all()
        for g in gradients(y, inputs):
            assert g.isfinite().all()


def test_defect_15_the_norm_of_a_step_is_that_of_the_whole():
    """Tiny heads, where the eps added to the mean square dominates: every form gives the same."""
    case = Case("retention", VARIANTS[0], True)
    attention, (q, k, v, gate) = case.build(), case.draw()
    v = 1e-3 * v
    whole = attention(q, k, v, gate=gate)
    state = attention.start(2, dtype=torch.float64)
    stepped, _ = extend_by_steps(attention, q, k, v, state, gate=gate)
    assert_close(stepped, whole, **EXACT)


def test_defect_17_old_tokens_fade_without_overflow():
    """A head keeps a millionth of its state at each token: exp of the negated elapsed decay is inf."""
    case = Case("retention", retention.Config(fastest=1 - 1e-6, impl="torch", gate=False), True, heads=2)
    attention = case.build().float()
    inputs = [x.detach().float().requires_grad_() for x in case.draw(256)]
    y = attention(*inputs)
    assert_close(y.double(), dense(attention.double(), *(x.double() for x in inputs)), rtol=1e-4, atol=1e-4)
    for g in gradients(y, inputs):
        assert g.isfinite().all()


def test_defect_25_the_norm_sees_what_16_bits_would_round():
    """Sums of 1e-5 have a digit or two in fp16, and the norm magnifies their rounding a thousandfold."""
    case = Case("retention", retention.Config(gate=False), True)
    inputs = [(0.02 * x.detach()).half() for x in case.draw()]
    attention = case.build().half()
    y, rates = attention(*inputs), attention.log_decay
    attention.double().log_decay.copy_(rates)
    expected = attention(*(x.double() for x in inputs))
    assert expected.abs().mean() > 1e-3
    assert_close(y.double(), expected, rtol=1e-3, atol=1e-7)  # the rounding of y alone


def test_what_it_reads_is_checked():
    attention = Case("retention", VARIANTS[0], True).build()
    q, k, v, gate = Case("retention", VARIANTS[0], True).draw()
    with pytest.raises(TypeError, match=r"'retention' takes gate \[b t 16\], got None"):
        attention(q, k, v)
    with pytest.raises(ValueError, match=r"gate must be \[b=2 t=19 w=16\], got shape \[2, 19, 15\]"):
        attention(q, k, v, gate=gate[..., 1:])
    with pytest.raises(TypeError, match=r"'retention' takes no gate with .*Config"):
        Case("retention", PLAIN, True).build()(q, k, v, gate=gate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fastest": 0.0}, "fastest must be above 0 and below 1, got 0"),
        ({"fastest": 1.0}, "fastest must be above 0 and below 1, got 1"),
        ({"slowest": 0.0}, r"slowest must be above 0 and at most 0\.03125, got 0"),
        ({"slowest": 0.5}, r"slowest must be above 0 and at most 0\.03125, got 0\.5"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        (
            {"centre_heads": True, "normalize_heads": False},
            "centre_heads needs normalize_heads=True, got True",
        ),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        retention.Config(**options)


def test_a_head_of_one_number_is_not_centred():
    with pytest.raises(ValueError, match="centre_heads needs a value_dim of at least 2, got 1"):
        retention.Config(centre_heads=True).build(heads=2, dim=4, value_dim=1, causal=True)


def test_it_is_causal_only():
    with pytest.raises(ValueError, match=r"'retention' is causal only with .*Config.* got causal=False"):
        retention.Config().build(heads=2, dim=4, causal=False)
    attention = retention.Config().build(heads=2, dim=4, causal=True)
    q = torch.zeros(1, 3, 2, 4)
    with pytest.raises(ValueError, match="'retention' has no cross form"):
        attention.encode_memory(q, q)
    with pytest.raises(ValueError, match="'retention' has no cross form"):
        attention.cross_attend(q, None)

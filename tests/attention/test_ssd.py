"""State space duality, the layer of Mamba-2: its dense definition, its limits, what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from lintra.attention import retention, ssd
from lintra.attention.ssd import StateSpaceDuality
from lintra.testing.laws import EXACT, Case, gradients
from tests.attention.heads import for_each_output

VARIANTS = [
    ssd.Config(),
    ssd.Config(conv=2, skip=False, gate=False, chunk=7),
    ssd.Config(conv=None),
    ssd.Config(value_heads=8),
]


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each token from itself and those before it, channel by channel, then SiLU."""
    rows, c = [], weight.shape[-1]
    for t in range(x.shape[1]):
        seen = range(max(0, t - c + 1), t + 1)
        rows.append(bias + sum(weight[..., c - 1 - (t - s)] * x[:, s] for s in seen))
    y = torch.stack(rows, 1)
    return y * y.sigmoid()


def dense(attention: StateSpaceDuality, q: Tensor, k: Tensor, v: Tensor, dt: Tensor, *gate: Tensor) -> Tensor:
    """The paper's quadratic form (section 5.2): C B^T, masked by the decays from s to t, times dt x."""
    if attention.config.conv is not None:
        q, k, v = (
            convolved(x, getattr(attention, f"conv_{name}"), getattr(attention, f"bias_{name}"))
            for name, x in (("q", q), ("k", k), ("v", v))
        )
    step = (1 + (dt + attention.dt_bias).exp()).log()
    elapsed = (-attention.A_log.exp() * step).cumsum(1)
    q, k, v, step, elapsed = for_each_output(attention, q, k, v, step, elapsed)
    scores = torch.einsum("bthd,bshd->bhts", q, k)
    left = elapsed.mT[..., :, None] - elapsed.mT[..., None, :]  # b h t s
    weights = (scores * left.tril().exp()).tril()
    y = torch.einsum("bhts,bshe->bthe", weights, step[..., None] * v)
    y = y + attention.D[:, None] * v if attention.config.skip else y
    flat = y.flatten(2) * functional.silu(gate[0]) if gate else y.flatten(2)
    return (attention.norm * flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt()).view(y.shape)


def test_steps_of_one_size_are_retention():
    """The same dt for all tokens: decays at fixed rates, of a product without a feature map."""
    case = Case("ssd", ssd.Config(conv=None, skip=False, gate=False), True, heads=2, kv_heads=2)
    attention, (q, k, v, dt) = case.build(), case.draw()
    config = retention.Config(normalize_heads=False, gate=False)
    other = retention.Retention(config, heads=2, dim=q.shape[-1], value_dim=v.shape[-1], causal=True).double()
    dt = torch.zeros_like(dt)
    step = functional.softplus(attention.dt_bias)
    with torch.no_grad():
        other.log_decay.copy_(-attention.A_log.exp() * step)
    y = other(q, k * q.shape[-1] ** 0.5, step[:, None] * v).flatten(2)
    expected = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(attention(q, k, v, dt=dt).flatten(2), expected, **EXACT)


def test_a_token_with_a_step_of_zero_is_passed_over():
    """dt -> -inf: the state neither forgets nor takes in."""
    case = Case("ssd", ssd.Config(conv=None), True)
    attention, (q, k, v, dt, gate) = case.build(), case.draw()
    without = [torch.cat((x[:, :5], x[:, 6:]), 1) for x in (q, k, v, dt, gate)]
    dt = dt.detach().index_fill(1, torch.tensor([5]), -1e4)
    y = attention(q, k, v, dt=dt, gate=gate)
    expected = attention(*without[:3], dt=without[3], gate=without[4])
    assert_close(torch.cat((y[:, :5], y[:, 6:]), 1), expected, **EXACT)


def test_a_token_with_a_large_step_empties_the_state():
    case = Case("ssd", ssd.Config(conv=None, skip=False, gate=False), True)
    attention, (q, k, v, dt) = case.build(), case.draw()
    dt = dt.detach().index_fill(1, torch.tensor([5]), 1e4)
    later = attention(q[:, 5:], k[:, 5:], v[:, 5:], dt=dt[:, 5:])
    assert_close(attention(q, k, v, dt=dt)[:, 5:], later, rtol=1e-9, atol=1e-9)


def test_the_norm_is_of_all_heads():
    """A head that is larger than the others stays larger."""
    case = Case("ssd", ssd.Config(conv=None, gate=False), True, heads=4, kv_heads=4)
    attention, (q, k, v, dt) = case.build(), case.draw()
    with torch.no_grad():
        attention.norm.fill_(1)
    v = torch.cat((v[:, :, :1] * 100, v[:, :, 1:]), 2)
    y = attention(q, k, v, dt=dt)
    assert_close(y.flatten(2).square().mean(-1), torch.ones_like(y[..., 0, 0]), rtol=1e-3, atol=1e-3)
    assert (y[:, :, 0].square().mean(-1) > y[:, :, 1:].square().mean(-1).amax(-1)).all()


def test_constant_values_do_not_come_back():
    """An unnormalised recurrence: the declared exception to the law of constant values."""
    case = Case("ssd", ssd.Config(conv=None, gate=False), True)
    q, k, v, dt = case.draw()
    y = case.build()(q, k, torch.full_like(v, 3.0), dt=dt)
    assert (y - 3.0).abs().max() > 1


def test_gradients_reach_every_parameter():
    case = Case("ssd", ssd.Config(), True)
    attention, (q, k, v, dt, gate) = case.build(), case.draw()
    y = attention(q, k, v, dt=dt, gate=gate)
    for name, gradient in zip(
        dict(attention.named_parameters()), gradients(y, list(attention.parameters())), strict=True
    ):
        assert gradient.abs().max() > 0, name


def test_refuses():
    for options in ({"conv": 0}, {"chunk": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            ssd.Config(**options)
    with pytest.raises(ValueError, match="causal"):
        ssd.Config().build(heads=2, dim=6, causal=False)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_step_size_of_another_precision_is_refused(dtypes):
    """The kernel reads all operands in one dtype."""
    q, dt = torch.randn(1, 5, 2, 8, dtype=dtypes[0]), torch.randn(1, 5, 2, dtype=dtypes[1])
    attention = ssd.Config(gate=False).build(heads=2, dim=8, causal=True).to(dtypes[0])
    with pytest.raises(TypeError, match="dt and q must both be float64, or neither"):
        attention(q, q, q, dt=dt)

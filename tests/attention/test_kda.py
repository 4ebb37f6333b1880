"""Kimi Delta Attention: its dense definition, its limits, what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from lintra.attention import delta, kda
from lintra.attention.kda import KimiDeltaAttention
from lintra.testing.laws import EXACT, Case, gradients
from tests.attention.heads import for_each_output
from tests.attention.test_delta import convolved, unit

VARIANTS = [
    kda.Config(),
    kda.Config(rank=3, negative_eigenvalues=True, conv=2, gate=False, chunk=7),
    kda.Config(conv=None),
    kda.Config(value_heads=8),
]


def weights(attention: KimiDeltaAttention, q: Tensor, k: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """[b h t s]: beta_s k_s . (D_{s+1} (I - beta k k^T)_{s+1} ... D_t (I - beta k k^T)_t q_t) for s up to t.

    The queries are carried back in time, from the last key to the first."""
    q, k, beta = unit(q) / q.shape[-1] ** 0.5, unit(k), beta.sigmoid()
    beta = 2 * beta if attention.config.negative_eigenvalues else beta
    rates = (decay[:, :, None, None] * attention.decay_weight).sum(-1) + attention.dt_bias
    left = (-attention.A_log.exp()[:, None] * functional.softplus(rates)).exp()
    q, k, beta, left = for_each_output(attention, q, k, beta, left)
    columns, carried = [], q[:, :0]
    for s in range(k.shape[1] - 1, -1, -1):
        carried = torch.cat((q[:, s : s + 1], carried), 1)  # queries from s on
        seen = torch.einsum("bthd,bhd->bth", carried, k[:, s]) * beta[:, s, None]
        columns.append(functional.pad(seen, (0, 0, s, 0)))
        carried = (carried - seen[..., None] * k[:, s, None]) * left[:, s, None]
    return torch.stack(columns[::-1], -1).movedim(1, 2)


def dense(attention: KimiDeltaAttention, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
    """The recurrence unrolled into every weight, the norm of each head, the gate."""
    beta, decay, *gate = others
    if attention.config.conv is not None:
        kinds = (attention.conv_q, attention.conv_k, attention.conv_v)
        q, k, v = (convolved(x, weight) for x, weight in zip((q, k, v), kinds, strict=True))
    (v,) = for_each_output(attention, v)
    y = torch.einsum("bhts,bshe->bthe", weights(attention, q, k, beta, decay), v)
    y = attention.norm * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    if not gate:
        return y
    return y * torch.sigmoid(gate[0] @ attention.gate_weight.mT + attention.gate_bias).view(y.shape)


def test_equal_rates_are_the_gated_delta_rule():
    """Where the decays of a head's features agree, it is `delta` with that decay."""
    case = Case("kda", kda.Config(gate=False), True)
    attention, (q, k, v, beta, low) = case.build(), case.draw()
    other = Case("delta", delta.Config(gate=False), True).build()
    with torch.no_grad():
        attention.decay_weight.copy_(attention.decay_weight[:, :1].expand_as(attention.decay_weight))
        attention.dt_bias.copy_(attention.dt_bias[:, :1].expand_as(attention.dt_bias))
        for name, x in other.named_parameters():
            mine = attention.get_parameter(name)
            x.copy_(mine[:, 0] if name == "dt_bias" else mine)
    decay = torch.einsum("btr,gr->btg", low, attention.decay_weight[:, 0])
    y, expected = attention(q, k, v, beta=beta, decay=low), other(q, k, v, beta=beta, decay=decay)
    inputs = [q, k, v, beta, low]
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


def test_the_order_of_keys_matters():
    case = Case("kda", kda.Config(conv=None, gate=False), True)
    attention, (q, k, v, beta, decay) = case.build(), case.draw()
    order = torch.arange(k.shape[1])
    order[[15, 17]] = order[[17, 15]]
    last = attention(q, k, v, beta=beta, decay=decay)[:, -1]
    other = attention(q, k[:, order], v[:, order], beta=beta, decay=decay)[:, -1]
    assert (other - last).abs().max() > 1e-4


def test_constant_values_do_not_come_back():
    """An unnormalised recurrence: the declared exception to the law of constant values."""
    case = Case("kda", kda.Config(conv=None, gate=False), True)
    q, k, v, beta, decay = case.draw()
    y = case.build()(q, k, torch.full_like(v, 3.0), beta=beta, decay=decay)
    assert (y - 3.0).abs().max() > 1


def test_the_rank_is_the_width_of_a_head_unless_it_is_given():
    built = kda.Config().build(heads=2, dim=6, causal=True)
    assert built.extra_inputs() == {"beta": 2, "decay": 6, "gate": 6}
    built = kda.Config(rank=3, gate=False).build(heads=2, dim=6, causal=True)
    assert built.extra_inputs() == {"beta": 2, "decay": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"conv": 0}, "conv must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"impl": "cuda"}, "impl must be"),
    ],
)
def test_refuses(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kda.Config(**options)


def test_refuses_what_it_is_not():
    with pytest.raises(ValueError, match="causal"):
        kda.Config().build(heads=2, dim=6, causal=False)

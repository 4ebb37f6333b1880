"""Gated linear attention: its dense definition, its limits, what it refuses."""

import platform

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import gated, linear, retention
from lintra.attention.gated import GatedLinearAttention
from lintra.bench.memory import peak_of
from lintra.testing.laws import EXACT, TIME, Case, gradients, padding_alone_keeps_the_state
from tests.attention.heads import for_each_output

VARIANTS = [gated.Config(), gated.Config(rank=2, temperature=0.5, chunk=7), gated.Config(value_heads=8)]
CASE = Case("gated", VARIANTS[1], True)


def weights(attention: GatedLinearAttention, q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Each query against each key up to its own, each feature decayed by the tokens in between, [b h t s]."""
    rates = torch.einsum("btr,gdr->btgd", decay, attention.weight) + attention.bias
    left = rates.sigmoid() ** (1 / attention.config.temperature)
    q, k, left = for_each_output(attention, q, k, left)
    rows = []
    for t in range(q.shape[1]):
        faded, row = q[:, t] / q.shape[-1] ** 0.5, [torch.zeros_like(q[:, 0, :, 0])] * q.shape[1]
        for s in range(t, -1, -1):
            row[s] = (faded * k[:, s]).sum(-1)
            faded = faded * left[:, s]
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, 2)


def dense(
    attention: GatedLinearAttention, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, gate: Tensor
) -> Tensor:
    """Section 4: every weight, the norm of each head, the gate."""
    (v,) = for_each_output(attention, v)
    y = torch.einsum("bhts,bshe->bthe", weights(attention, q, k, decay), v)
    y = attention.norm * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return y * (gate * gate.sigmoid()).view(y.shape)


def same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    assert_close(found, expected, **EXACT)
    assert_close(gradients(found, inputs), gradients(expected, inputs), **EXACT)


def test_equal_decays_of_all_features_are_retention():
    """With W2 = 0 the decays are sigmoid(b)^(1 / temperature), here equal to those of retention."""
    attention, inputs = CASE.build(), CASE.draw()
    other = Case("retention", retention.Config(decay_per="kv_head"), True).build()
    with torch.no_grad():
        attention.weight.zero_()
        one = (other.log_decay * attention.config.temperature).exp()
        attention.bias.copy_((one / (1 - one)).log()[:, None].expand_as(attention.bias))
    q, k, v, decay, gate = inputs
    same(attention(q, k, v, decay=decay, gate=gate), other(q, k, v, gate=gate), [q, k, v, gate])


def test_without_decay_it_is_the_unnormalised_sum():
    attention, (q, k, v, decay, gate) = CASE.build(), CASE.draw()
    with torch.no_grad():
        attention.weight.zero_()
        attention.bias.fill_(60.0)  # sigmoid(60) is 1 in float64
    other = Case("linear", linear.Config(feature_map=linear.Identity(), normalize=False), True).build()
    y = other(q, k, v) / q.shape[-1] ** 0.5
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = y * (gate * gate.sigmoid()).view(y.shape)
    same(attention(q, k, v, decay=decay, gate=gate), expected, [q, k, v, gate])


def test_a_token_may_forget_everything_before_it():
    attention, (q, k, v, decay, gate) = CASE.build(), [x.detach() for x in CASE.draw()]
    with torch.no_grad():
        attention.weight.fill_(1.0)
        decay[:, 7] = -1e4
    y = attention(q, k, v, decay=decay, gate=gate)
    alone = attention(*(x[:, 7:] for x in (q, k, v)), decay=decay[:, 7:], gate=gate[:, 7:])
    assert_close(y[:, 7:], alone, **EXACT)
    assert (y[:, 7:] - attention(q, k, v, decay=0 * decay, gate=gate)[:, 7:]).abs().max() > 0.01


def test_rotary_turns_queries_and_keys():
    attention, (q, k, v, decay, gate) = CASE.build(), CASE.draw()
    rope = Case("gated", VARIANTS[1], True, rotary=True).rope(0, TIME)
    y = attention(q, k, v, rope=rope, decay=decay, gate=gate)
    assert_close(y, dense(attention, rope(q), rope(k), v, decay, gate), **EXACT)


def test_the_order_of_keys_matters():
    attention, (q, k, v, decay, gate) = CASE.build(), CASE.draw()
    order = torch.arange(TIME)
    order[[15, 17]] = order[[17, 15]]
    last = attention(q, k, v, decay=decay, gate=gate)[:, -1]
    swapped = attention(q, k[:, order], v[:, order], decay=decay, gate=gate)[:, -1]
    assert (swapped - last).abs().max() > 0.01


def test_constant_values_do_not_come_back():
    """An unnormalised recurrence: the declared exception to the law of constant values."""
    attention, (q, k, v, decay, gate) = CASE.build(), CASE.draw()
    y = attention(q, k, torch.full_like(v, 3.0), decay=decay, gate=torch.full_like(gate, 50.0)) / 50
    assert (y - 3.0).abs().max() > 1


def test_zero_rows_and_one_token():
    attention = CASE.build()
    for time in (1, 5):
        inputs = [x.detach() for x in CASE.draw(time)]
        inputs[0][:, 0], inputs[1][:, -1] = 0, 0
        inputs = [x.requires_grad_() for x in inputs]
        y = attention(*inputs[:3], decay=inputs[3], gate=inputs[4])
        assert (y[:, 0] == 0).all()
        for g in gradients(y, inputs):
            assert g.isfinite().all()


def test_defect_17_fast_features_do_not_overflow():
    """The exponential of the negated elapsed decay would be exp(6000) here."""
    attention, inputs = CASE.build().float(), [x.detach().float() for x in CASE.draw(64)]
    inputs[3] *= 100
    inputs = [x.requires_grad_() for x in inputs]
    y = attention(*inputs[:3], decay=inputs[3], gate=inputs[4])
    exact = dense(attention.double(), *(x.double() for x in inputs))
    assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)  # float32 under the norm of a head
    for g in gradients(y, inputs):
        assert g.isfinite().all()


def test_defect_18_padding_neither_decays_nor_writes():
    padding_alone_keeps_the_state(CASE)


def test_defect_25_decays_of_16_bits_are_not_summed_in_them():
    """1024 decays of 0.999 in bf16 are 1 or 0.996 each; as logarithms in float32 they keep their product."""
    attention = gated.Config(rank=1, temperature=1.0).build(heads=1, dim=2, causal=True).bfloat16()
    with torch.no_grad():
        attention.weight.zero_()
        attention.bias.fill_(6.9)
    q, k, v = torch.zeros(3, 1, 1024, 1, 2, dtype=torch.bfloat16)
    k[:, 0], v[:, 0] = 1.0, 1.0
    reads = {"decay": torch.zeros(1, 1024, 1).bfloat16(), "gate": torch.zeros(1, 1024, 2).bfloat16()}
    _, state = attention.extend(q, k, v, attention.start(1, dtype=torch.bfloat16), **reads)
    expected = attention.bias.double().sigmoid().min() ** 1023
    assert_close(state.kv.double(), expected.expand(1, 1, 2, 2), rtol=1e-4, atol=0)


@pytest.mark.slow  # starts its own processes
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc can be told to map each block by itself"
)
def test_the_memory_of_training_is_linear(monkeypatch):
    """Four times the tokens need four times the peak memory for forward and backward. Measured while the
    allocator returns freed memory at once: otherwise gaps in the heap make up more than half of what a
    process holds, and their number depends on the sizes of the tensors."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    few, many = (peak_of(_TRAINING.format(time=time)) for time in (2048, 8192))
    assert many < 4.5 * few  # blocks are whole pages, and a few fit into free space in the heap


_TRAINING = """
import torch
from lintra.attention import gated
attention = gated.Config().build(causal=True, heads=2, dim=64)

def train(time):
    q, k, v = torch.ones(3, 1, time, 2, 64, requires_grad=True)
    reads = {{name: torch.ones(1, time, width) for name, width in attention.extra_inputs().items()}}
    attention(q, k, v, **reads).sum().backward()

train(64)
forget_peak()
before = peak()
train({time})
print(peak() - before)
"""


def test_what_it_reads_is_checked():
    attention, (q, k, v, decay, gate) = CASE.build(), CASE.draw()
    with pytest.raises(TypeError, match=r"'gated' takes decay \[b t 2\], got None"):
        attention(q, k, v, gate=gate)
    with pytest.raises(ValueError, match=r"decay must be \[b=2 t=19 w=2\], got shape \[2, 19, 1\]"):
        attention(q, k, v, decay=decay[..., 1:], gate=gate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"temperature": 0.0}, "temperature must be above 0 and finite, got 0"),
        ({"temperature": float("inf")}, "temperature must be above 0 and finite, got inf"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        gated.Config(**options)


def test_it_is_causal_only():
    with pytest.raises(ValueError, match=r"'gated' is causal only with gated\.Config.* got causal=False"):
        gated.Config().build(heads=2, dim=4, causal=False)
    with pytest.raises(ValueError, match="'gated' has no cross form"):
        CASE.build().encode_memory(*CASE.draw()[1:3])

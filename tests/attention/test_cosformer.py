"""cosFormer: its dense definition, its positions, the length it must not exceed."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import cosformer, linear
from lintra.attention.cosformer import Cosformer
from lintra.nn import AttentionLayer
from lintra.testing.laws import EXACT, Case, Largest, gradients

VARIANTS = [
    # A row of relu features may be all zero, and its sum is then divided by eps alone: 1e-3 keeps the
    # rounding errors of two ways to compute it below the tolerance of the laws.
    cosformer.Config(max_length=64, eps=1e-3, impl="reference"),
    cosformer.Config(max_length=65_536, eps=1e-3),
    cosformer.Config(max_length=65_536, eps=1e-3, impl="torch", chunk=7),
]


def dense(attention: Cosformer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every weight, with the future masked out."""
    group = attention.heads // attention.kv_heads
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    fall = torch.cos(math.pi * distance.double() / (2 * attention.config.max_length)).to(q.dtype)
    weights = torch.einsum("bthd,bshd->bhts", q.relu(), k.relu()) * fall
    if attention.causal:
        weights = weights.tril()
    y = torch.einsum("bhts,bshe->bthe", weights, v)
    return y / (weights.sum(-1).mT[..., None] + attention.config.eps)


def drawn(time: int = 19) -> list[Tensor]:
    return [x.detach() for x in Case("cosformer", VARIANTS[0], True).draw(time)]


def built(causal: bool = True, **options) -> Cosformer:
    return Case("cosformer", cosformer.Config(**options), causal).build()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("time", [1, 18, 19])
def test_short_lengths_weigh_by_the_definition(time, causal):
    """L near the length of the sequence, where the cosines go down to 0."""
    inputs = [x.requires_grad_() for x in drawn(time)]
    attention = built(causal, max_length=19, eps=1e-3)
    y, expected = attention(*inputs), dense(attention, *inputs)
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@pytest.mark.parametrize("causal", [True, False])
def test_an_endless_length_is_linear_attention(causal):
    inputs = [x.requires_grad_() for x in drawn()]
    y = built(causal, max_length=10**9)(*inputs)
    plain = linear.Config(feature_map=linear.Relu())
    expected = Case("linear", plain, causal).build()(*inputs)
    assert_close(y, expected, **EXACT)  # the cosines are 1 up to (19 / 1e9)^2
    # Gradients of rows with tiny sums: 1 - cos, 1e-16, over eps.
    assert_close(gradients(y, inputs), gradients(expected, inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_constant_values_come_back(causal):
    q, k, v = (x.abs() for x in drawn())
    y = built(causal, eps=0.0)(q, k, torch.full_like(v, 3.0))
    assert_close(y, torch.full_like(y, 3.0), **EXACT)


@pytest.mark.parametrize("causal", [True, False])
def test_order_matters(causal):
    q, k, v = drawn()
    order = torch.randperm(19, generator=torch.Generator().manual_seed(0))
    attention = built(causal, max_length=19)
    y, moved = attention(q, k, v), attention(q, k[:, order], v[:, order])
    assert not torch.allclose(y[:, -1], moved[:, -1])  # the last query sees all keys in both forms


def test_edges():
    """Rows of zero features, equal keys, one valid key and large numbers."""
    q, k, v = drawn()
    for causal in (True, False):
        attention = built(causal, eps=0.0)
        inputs = [(-q.abs()).requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()]
        y = attention(*inputs)
        assert (y == 0).all()
        assert all(g.isfinite().all() for g in gradients(y, inputs))
        one = torch.zeros(2, 19, dtype=torch.bool)
        one[:, 7] = True
        y = attention(q.abs(), k.abs(), v, mask=one)
        assert_close(y[:, 7], v.repeat_interleave(2, 2)[:, 7], **EXACT)
        large = attention(1e4 * q, 1e4 * k, v)
        assert_close(large, attention(q, k, v), **EXACT)


def test_defect_01_padded_keys_are_not_in_the_denominator():
    q, k, v = (x.abs() for x in drawn())
    mask = torch.arange(19) < torch.tensor([[19], [4]])
    y = built(causal=False, eps=0.0)(q, k, torch.ones_like(v), mask=mask)
    assert_close(y[mask], torch.ones_like(y[mask]), **EXACT)


def test_defect_14_outputs_do_not_depend_on_the_length_at_hand():
    """A prefix, a padded batch and a short memory have the same weights as in the whole sequence."""
    q, k, v = drawn()
    attention = built(max_length=30)
    whole = attention(q, k, v)
    assert_close(attention(q[:, :8], k[:, :8], v[:, :8]), whole[:, :8], **EXACT)
    longer = [torch.cat((x, x[:, :9]), 1) for x in (q, k, v)]
    mask = (torch.arange(28) < 19).expand(2, -1)
    assert_close(attention(*longer, mask=mask)[:, :19], whole, **EXACT)
    both = built(causal=False, max_length=30)
    assert_close(both(*longer, mask=mask)[:, :19], both(q, k, v), **EXACT)
    assert not torch.allclose(built(max_length=19)(q, k, v), whole)


def test_queries_of_cross_attention_stand_at_their_own_places():
    q, k, v = drawn()
    attention = built(causal=False, max_length=30, eps=1e-3)
    memory = attention.encode_memory(k[:, :11], v[:, :11])
    assert_close(attention.cross_attend(q, memory), dense(attention, q, k[:, :11], v[:, :11]), **EXACT)


@pytest.mark.parametrize("config", VARIANTS[:2], ids=str)
def test_defect_18_padding_neither_counts_nor_writes(config):
    q, k, v = drawn()
    attention = Case("cosformer", config, True).build()
    _, state = attention.extend(q, k, v, attention.start(2, dtype=torch.float64))
    nobody = torch.zeros(2, 19, dtype=torch.bool)
    y, after = attention.extend(q, k, v, state, mask=nobody)
    assert (y == 0).all()
    for a, b in zip(after, state, strict=True):
        assert_close(a, b, rtol=0, atol=0)


def test_defect_22_no_state_for_every_token():
    """Forward and backward over 1,024 tokens keep features and states between chunks, not t f e numbers."""
    attention = cosformer.Config(impl="torch").build(heads=1, dim=64, causal=True)
    inputs = [torch.randn(1, 1024, 1, 64, requires_grad=True) for _ in range(3)]
    with Largest() as largest:
        attention(*inputs).sum().backward()
    assert largest.numbers <= 2 * 1024 * 128


def test_no_more_tokens_than_max_length():
    q, k, v = drawn()
    causal, both = built(max_length=18), built(causal=False, max_length=18)
    message = "a sequence may have max_length=18 tokens, got 19"
    with pytest.raises(ValueError, match=message):
        causal(q, k, v)
    with pytest.raises(ValueError, match=message):
        both.encode_memory(k, v)
    with pytest.raises(ValueError, match=message):
        both.cross_attend(q, both.encode_memory(k[:, :3], v[:, :3]))
    few = (torch.arange(19) > 0).expand(2, -1)
    y, state = causal.extend(q, k, v, causal.start(2, dtype=torch.float64), mask=few)
    assert_close(y[:, 1:], causal(q[:, 1:], k[:, 1:], v[:, 1:]), **EXACT)
    assert state.seen.tolist() == [18, 18]
    one = [x[:, :1] for x in (q, k, v)]
    for more in (causal.extend, causal.step):
        with pytest.raises(ValueError, match=message):
            more(*one, state)


def test_past_max_length_is_nan_where_nobody_looks(monkeypatch):
    monkeypatch.setattr(cosformer.checks, "readable", lambda *x: False)
    q, k, v = drawn()
    everyone = torch.ones(2, 19, dtype=torch.bool)
    causal, both = built(max_length=18), built(causal=False, max_length=18)
    state = causal.start(2, dtype=torch.float64)._replace(seen=torch.tensor([0, 5]))
    y, state = causal.extend(q, k, v, state, mask=everyone)
    assert y.isfinite().flatten(2).all(2).sum(1).tolist() == [18, 13]
    for more in (causal.extend, causal.step):
        assert more(q[:, :1], k[:, :1], v[:, :1], state)[0].isnan().all()
    few = both.encode_memory(k[:, :3], v[:, :3])
    assert both.cross_attend(q, few, everyone).isfinite().flatten(2).all(2).sum(1).tolist() == [18, 18]
    assert both.cross_attend(q, both.encode_memory(k, v, everyone), everyone).isnan().all()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_length", 0, "max_length must be at least 1, got 0"),
        ("eps", -1.0, "eps must be at least 0 and finite, got -1"),
        ("chunk", 0, "chunk must be at least 1, got 0"),
    ],
)
def test_config_refuses(field, value, message):
    with pytest.raises(ValueError, match=message):
        cosformer.Config(**{field: value})


def test_what_is_not_there_is_refused():
    q, k, v = drawn()
    with pytest.raises(ValueError, match="'cosformer' has positions of its own and takes no rotation"):
        built()(q, k, v, rope=Case("linear", linear.Config(), True, rotary=True).rope(0, 19))
    with pytest.raises(ValueError, match=r"positions of its own, got rope_base=100\.0"):
        AttentionLayer(12, cosformer.Config(), heads=2, rope_base=100.0)
    with pytest.raises(TypeError, match="state must be a CosformerState, got NoneType"):
        built().extend(q, k, v, None)
    state = built().start(2)
    with pytest.raises(ValueError, match=r"state\.z must be"):
        built().extend(q, k, v, state._replace(z=state.z[..., :-1]))
    with pytest.raises(TypeError, match="memory must be a CosformerState, from encode_memory, got tuple"):
        built(causal=False).cross_attend(q, (k, v))

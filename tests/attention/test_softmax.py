"""Softmax attention: its dense definition, its window, what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import softmax
from lintra.attention.softmax import SoftmaxAttention
from lintra.nn import AttentionLayer
from lintra.testing.laws import BATCH, EXACT, TIME, Case, gradients, some_masks

VARIANTS = [softmax.Config(), softmax.Config(window=5), softmax.Config(scale=0.3)]


def dense(attention: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 1, every score; the future and what lies beyond the window are masked out."""
    group = attention.heads // attention.kv_heads
    scale = q.shape[-1] ** -0.5 if attention.config.scale is None else attention.config.scale
    scores = scale * torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(group, 2))
    if attention.causal:
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
        hidden = (distance < 0) | (distance >= (attention.config.window or q.shape[1]))
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v.repeat_interleave(group, 2))


def test_a_window_over_everything_is_no_window():
    q, k, v = Case("softmax", softmax.Config(), True).draw()
    whole = Case("softmax", softmax.Config(), True).build()(q, k, v)
    for window in (q.shape[1], 10 * q.shape[1]):
        assert_close(Case("softmax", softmax.Config(window=window), True).build()(q, k, v), whole, **EXACT)


def test_a_window_of_one_returns_the_values():
    q, k, v = Case("softmax", softmax.Config(), True).draw()
    y = Case("softmax", softmax.Config(window=1), True).build()(q, k, v)
    assert_close(y, v.repeat_interleave(2, 2), **EXACT)


@pytest.mark.parametrize("window", [3, 20, 70])
def test_a_window_over_many_blocks(window):
    """Padded, whole and in pieces: the real tokens alone, by the definition."""
    attention = Case("softmax", softmax.Config(window=window), True).build()
    inputs = Case("softmax", softmax.Config(), True).draw(300)
    mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) > 0.3
    y = attention(*inputs, mask=mask)
    for i in range(2):
        alone = dense(attention, *(x[i : i + 1, mask[i]] for x in inputs))[0]
        assert_close(y[i, mask[i]], alone, **EXACT)
        assert_close(gradients(y[i, mask[i]], inputs), gradients(alone, inputs), **EXACT)
    state, ys = attention.start(2, dtype=torch.float64), []
    for part in torch.arange(300).split((90, 1, 130, 79)):
        piece, state = attention.extend(*(x[:, part] for x in inputs), state, mask=mask[:, part])
        ys.append(piece)
    assert_close(torch.cat(ys, 1), y, **EXACT)
    assert_close(gradients(torch.cat(ys, 1), inputs), gradients(y, inputs), **EXACT)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 19, dtype=torch.bool)], ids=["none", "all"])
def test_defect_24_the_future_is_hidden_without_another_mask(mask):
    q, k, v = Case("softmax", softmax.Config(), True).draw()
    attention = Case("softmax", softmax.Config(), True).build()
    y = attention(q, k, v, mask=mask)
    assert_close(y, dense(attention, q, k, v), **EXACT)
    for g in gradients(y[:, :7], [q, k, v]):
        assert (g[:, 7:] == 0).all()


@pytest.mark.parametrize("window", [None, 5])
def test_defect_24_tokens_after_a_cache_stand_at_its_end(window):
    """A causal mask aligned to the other corner would let the first of them see only the first key."""
    inputs = Case("softmax", softmax.Config(), True).draw()
    attention = Case("softmax", softmax.Config(window=window), True).build()
    _, state = attention.extend(*(x[:, :12] for x in inputs), attention.start(2, dtype=torch.float64))
    y, _ = attention.extend(*(x[:, 12:] for x in inputs), state)
    assert_close(y, dense(attention, *inputs)[:, 12:], **EXACT)


def test_the_cache_of_a_window_stops_growing():
    attention = Case("softmax", softmax.Config(window=5), True).build()
    q, k, v = Case("softmax", softmax.Config(), True).draw()
    _, state = attention.extend(q, k, v, attention.start(2, dtype=torch.float64))
    assert state.k.shape[1] == 4


def test_order_matters_only_to_the_causal_form():
    """Keys, values and their mask are permuted."""
    q, k, v = Case("softmax", softmax.Config(), True).draw()
    mixed = torch.randperm(TIME, generator=torch.Generator().manual_seed(0))
    attention = Case("softmax", softmax.Config(), False).build()
    assert_close(attention(q, k[:, mixed], v[:, mixed]), attention(q, k, v), **EXACT)
    for mask in some_masks():
        y = attention.cross_attend(q, attention.encode_memory(k[:, mixed], v[:, mixed], mask[:, mixed]))
        assert_close(y, attention.cross_attend(q, attention.encode_memory(k, v, mask)), **EXACT)
    for config in VARIANTS[:2]:
        attention = Case("softmax", config, True).build()
        assert not torch.allclose(attention(q, k[:, mixed], v[:, mixed]), attention(q, k, v))


def test_edges():
    """Length 1, one valid key, equal keys and zero rows: the mean of the values that are seen."""
    q, k, v = Case("softmax", softmax.Config(), True).draw()
    seen = v.repeat_interleave(2, 2)
    one = torch.zeros(BATCH, TIME, dtype=torch.bool)
    one[:, 7] = True
    for causal in (True, False):
        attention = Case("softmax", softmax.Config(), causal).build()
        assert_close(attention(q[:, :1], k[:, :1], v[:, :1]), seen[:, :1], **EXACT)
        assert_close(attention(q, k, v, mask=one)[:, 7], seen[:, 7], **EXACT)
        for same in (k[:, :1].expand_as(k), torch.zeros_like(k)):
            assert_close(attention(q, same, v)[:, -1], seen.mean(1), **EXACT)
    windowed = Case("softmax", VARIANTS[1], True).build()
    assert_close(windowed(q, k, v, mask=one)[:, 7], seen[:, 7], **EXACT)
    assert_close(windowed(q, k[:, :1].expand_as(k), v)[:, -1], seen[:, -5:].mean(1), **EXACT)
    both = Case("softmax", softmax.Config(), False).build()
    everyone = both.cross_attend(q, both.encode_memory(k, v, one))
    assert_close(everyone, seen[:, 7:8].expand_as(everyone), **EXACT)


def test_constant_values_come_back():
    q, k, v = Case("softmax", softmax.Config(), True).draw()
    y = Case("softmax", softmax.Config(), True).build()(q, k, torch.full_like(v, 3.0))
    assert_close(y, torch.full_like(y, 3.0), **EXACT)


@pytest.mark.parametrize(
    ("field", "value"),
    [("window", 0), ("window", -3), ("dropout", 1.0), ("dropout", -0.1), ("scale", float("nan"))],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        softmax.Config(**{field: value})


def test_a_window_needs_causal():
    with pytest.raises(ValueError, match=r"causal only with softmax\.Config\(window=3.* got causal=False"):
        softmax.Config(window=3).build(heads=2, dim=4, causal=False)
    assert softmax.Config(window=3).build(heads=2, dim=4, causal=True).can.state == "window"


@pytest.mark.parametrize("window", [None, 3])
def test_a_cache_follows_autocast(window):
    """Tokens of 16 bits make a cache of 16 bits, and later tokens fit it."""
    heads = AttentionLayer(8, softmax.Config(window=window), heads=2)
    x = torch.randn(1, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected, state, ys = heads(x), None, []
        for part in x.split((3, 1, 2), 1):
            y, state = heads.extend(part, state)
            ys.append(y)
    assert state.attention.k.dtype == torch.bfloat16
    assert_close(torch.cat(ys, 1), expected, rtol=0.05, atol=0.02)  # two ways of rounding to 8 bits


def test_dropout_acts_in_training_only():
    q, k, v = Case("softmax", softmax.Config(), True).draw()
    attention = Case("softmax", softmax.Config(dropout=0.5), True).build()
    whole = Case("softmax", softmax.Config(), True).build()(q, k, v)
    assert not torch.allclose(attention(q, k, v), whole)
    assert_close(attention.eval()(q, k, v), whole, **EXACT)

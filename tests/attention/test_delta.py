"""Gated DeltaNet: its dense definition, what it recalls, its limits, what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from lintra.attention import delta
from lintra.attention.delta import DeltaNet
from lintra.nn import AttentionLayer
from lintra.testing.laws import EXACT, TIME, Case, extend_by_steps, gradients, some_masks
from tests.attention.heads import for_each_output

VARIANTS = [
    delta.Config(),
    delta.Config(decay=False, negative_eigenvalues=True, conv=2, gate=False, chunk=7),
    delta.Config(conv=None),
    delta.Config(value_heads=8),
]
PLAIN = delta.Config(decay=False, conv=None, gate=False)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """Each token from itself and those before it, channel by channel, then SiLU."""
    rows, c = [], weight.shape[-1]
    for t in range(x.shape[1]):
        seen = range(max(0, t - c + 1), t + 1)
        rows.append(sum(weight[..., c - 1 - (t - s)] * x[:, s] for s in seen))
    y = torch.stack(rows, 1)
    return y * y.sigmoid()


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def weights(attention: DeltaNet, q: Tensor, k: Tensor, beta: Tensor, decay: Tensor | None) -> Tensor:
    """[b h t s]: beta_s k_s . (a_{s+1} (I - beta k k^T)_{s+1} ... a_t (I - beta k k^T)_t q_t) for s up to t.

    The queries are carried back in time, from the last key to the first."""
    q, k, beta = unit(q) / q.shape[-1] ** 0.5, unit(k), beta.sigmoid()
    beta = 2 * beta if attention.config.negative_eigenvalues else beta
    left = torch.ones_like(beta)
    if decay is not None:
        rate = attention.A_log.exp() * (1 + (decay + attention.dt_bias).exp()).log()
        left = (-rate).exp()
    q, k, beta, left = for_each_output(attention, q, k, beta, left)
    columns, carried = [], q[:, :0]
    for s in range(k.shape[1] - 1, -1, -1):
        carried = torch.cat((q[:, s : s + 1], carried), 1)  # queries from s on
        seen = torch.einsum("bthd,bhd->bth", carried, k[:, s]) * beta[:, s, None]
        columns.append(functional.pad(seen, (0, 0, s, 0)))
        carried = (carried - seen[..., None] * k[:, s, None]) * left[:, s, None, :, None]
    return torch.stack(columns[::-1], -1).movedim(1, 2)


def dense(attention: DeltaNet, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *others: Tensor) -> Tensor:
    """The recurrence unrolled into every weight, the norm of each head, the gate."""
    config, others = attention.config, list(others)
    decay = others.pop(0) if config.decay else None
    if config.conv is not None:
        kinds = (attention.conv_q, attention.conv_k, attention.conv_v)
        q, k, v = (convolved(x, weight) for x, weight in zip((q, k, v), kinds, strict=True))
    (v,) = for_each_output(attention, v)
    y = torch.einsum("bhts,bshe->bthe", weights(attention, q, k, beta, decay), v)
    y = attention.norm * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return y * (others[0] * others[0].sigmoid()).view(y.shape) if config.gate else y


def normed(y: Tensor) -> Tensor:
    return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def test_a_decay_of_one_is_deltanet():
    case = Case("delta", delta.Config(), True)
    attention, (q, k, v, beta, decay, gate) = case.build(), case.draw()
    other = Case("delta", delta.Config(decay=False), True).build()
    other.load_state_dict({n: x for n, x in attention.state_dict().items() if n not in ("A_log", "dt_bias")})
    with torch.no_grad():
        attention.A_log.fill_(-80.0)
    y = attention(q, k, v, beta=beta, decay=decay, gate=gate)
    expected = other(q, k, v, beta=beta, gate=gate)
    inputs = [q, k, v, beta, gate]
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


def test_orthonormal_keys_are_recalled_and_repeated_ones_overwritten():
    """beta = 1: a query with a stored key returns the last value written to it."""
    attention = PLAIN.build(heads=1, dim=6, value_dim=4, causal=True).double()
    v = Case("delta", PLAIN, True, heads=1, kv_heads=1).draw(8)[2].detach()
    k = torch.eye(6).double()[[0, 1, 2, 3, 4, 5, 2, 0]].expand(2, 1, 8, 6).movedim(1, 2)
    beta = torch.full((2, 8, 1), 50.0).double()
    _, state = attention.extend(k, k, v, attention.start(2, dtype=torch.float64), beta=beta)
    for key, last in ((0, 7), (1, 1), (2, 6), (3, 3), (4, 4), (5, 5)):
        y, _ = attention.extend(k[:, key : key + 1], k[:, :1], v[:, :1], state, beta=beta[:, :1] - 100)
        # 1e-6 is added to the square of a length and of a head: keys are short of unit length by half that.
        assert_close(y, normed(v[:, last : last + 1]), rtol=1e-4, atol=1e-4)


def test_keys_that_never_meet_leave_the_gated_sum():
    """Without the k k^T terms this is decayed linear attention with inputs beta k."""
    case = Case("delta", delta.Config(conv=None, gate=False), True, heads=2)
    attention, (q, _, v, beta, decay) = case.build(), case.draw(6)
    k = torch.eye(6).double()[None, :, None].expand(2, 6, 2, 6)
    y = attention(q, k, v, beta=beta, decay=decay)
    left = torch.exp(-attention.A_log.exp() * functional.softplus(decay + attention.dt_bias))
    state, rows = torch.zeros(2, 2, 6, 4).double(), []
    for t in range(6):
        written = torch.einsum("bg,bgd,bge->bgde", beta[:, t].sigmoid(), unit(k[:, t]), v[:, t])
        state = left[:, t, :, None, None] * state + written
        rows.append(torch.einsum("bgd,bgde->bge", unit(q[:, t]) / 6**0.5, state))
    expected = normed(torch.stack(rows, 1))
    inputs = [q, v, beta, decay]
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


def test_rotary_turns_unit_queries_and_keys():
    case = Case("delta", PLAIN, True, rotary=True)
    attention, (q, k, v, beta) = case.build(), case.draw()
    rope = case.rope(0, TIME)
    y = attention(q, k, v, rope=rope, beta=beta)
    assert_close(y, dense(attention, rope(q), rope(k), v, beta), **EXACT)


def test_the_order_of_keys_matters():
    case = Case("delta", PLAIN, True)
    attention, (q, k, v, beta) = case.build(), case.draw()
    order = torch.arange(TIME)
    order[[15, 17]] = order[[17, 15]]
    last = attention(q, k, v, beta=beta)[:, -1]
    assert (attention(q, k[:, order], v[:, order], beta=beta)[:, -1] - last).abs().max() > 0.01


def test_constant_values_do_not_come_back():
    """An unnormalised recurrence: the declared exception to the law of constant values."""
    case = Case("delta", PLAIN, True)
    q, k, v, beta = case.draw()
    assert (case.build()(q, k, torch.full_like(v, 3.0), beta=beta) - 3.0).abs().max() > 1


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_equal_keys_of_any_length_stay_bounded(size):
    """All keys are equal and beta is doubled: keys are scaled to unit length before they meet the state."""
    case = Case("delta", delta.Config(decay=False, negative_eigenvalues=True, conv=None, gate=False), True)
    attention, (q, k, v, beta) = case.build(), case.draw(500)
    k = size * k[:, :1].expand_as(k)
    _, state = attention.extend(q, k, v, attention.start(2, dtype=torch.float64), beta=beta + 5)
    # One direction holds a value of the last few tokens, each written with beta below 2.
    assert state.kv.abs().max() < 50 * v.abs().max()


def test_zero_rows_and_one_token():
    case = Case("delta", delta.Config(conv=None), True)
    attention = case.build()
    for time in (1, 5):
        inputs = [x.detach() for x in case.draw(time)]
        inputs[0][:, 0], inputs[1][:, -1] = 0, 0
        inputs = [x.requires_grad_() for x in inputs]
        y = attention(*inputs[:3], beta=inputs[3], decay=inputs[4], gate=inputs[5])
        assert (y[:, 0] == 0).all()
        for g in gradients(y, inputs):
            assert g.isfinite().all()


def test_defect_07_a_state_serves_two_continuations():
    """The same holds for the inputs kept for the convolution."""
    case = Case("delta", delta.Config(), True)
    attention, inputs = case.build(), case.draw()
    names = ("beta", "decay", "gate")

    def call(rows, state):
        reads = {n: x[:, rows] for n, x in zip(names, inputs[3:], strict=True)}
        return attention.extend(*(x[:, rows] for x in inputs[:3]), state, **reads)

    _, state = call(slice(0, 9), attention.start(2, dtype=torch.float64))
    kept = [x.clone() for x in state]
    first, _ = call(slice(9, 12), state)
    call(slice(12, 19), state)
    assert_close(list(state), kept, rtol=0, atol=0)
    assert torch.equal(call(slice(9, 12), state)[0], first)


def test_defect_17_decays_of_any_size_do_not_overflow():
    """A rate of 16 and steps of 30: exp of minus the elapsed decay is inf after a token."""
    case = Case("delta", delta.Config(conv=None), True)
    attention, inputs = case.build().float(), [x.detach().float() for x in case.draw(64)]
    with torch.no_grad():
        attention.A_log.fill_(2.77)
    inputs[4] *= 30
    inputs = [x.requires_grad_() for x in inputs]
    y = attention(*inputs[:3], beta=inputs[3], decay=inputs[4], gate=inputs[5])
    assert y.isfinite().all()
    for g in gradients(y, inputs):
        assert g.isfinite().all()


def test_defect_18_padding_does_not_enter_the_convolution():
    """Zeros in the window would be wrong too: the real tokens on either side of a hole are neighbours."""
    case = Case("delta", delta.Config(), True)
    attention, inputs = case.build(), case.draw()
    reads = dict(zip(("beta", "decay", "gate"), inputs[3:], strict=True))
    mask = some_masks()[2]
    y, state = attention.extend(*inputs[:3], attention.start(2, dtype=torch.float64), mask=mask, **reads)
    for i in range(2):
        q, k, v = (x[i : i + 1, mask[i]] for x in inputs[:3])
        real = {name: x[i : i + 1, mask[i]] for name, x in reads.items()}
        alone, after = attention.extend(q, k, v, attention.start(1, dtype=torch.float64), **real)
        assert_close(y[i, mask[i]], alone[0], **EXACT)
        assert_close(state.k[i], k[0, -3:], **EXACT)
        assert_close([x[i] for x in state], [x[0] for x in after], **EXACT)
    zeroed = [x * mask.reshape(2, TIME, *[1] * (x.dim() - 2)) for x in inputs]
    hidden = dict(zip(reads, zeroed[3:], strict=True))
    assert (attention(*zeroed[:3], **hidden)[mask] - y[mask]).abs().max() > 0.01


def test_defect_25_gradients_of_the_layer():
    """Finite differences through convolution, norms, decay and gate; finite gradients under autocast."""
    attention = delta.Config(chunk=2).build(heads=2, kv_heads=1, dim=2, causal=True).double()
    shapes = [(1, 4, 2, 2), (1, 4, 1, 2), (1, 4, 1, 2), (1, 4, 1), (1, 4, 1), (1, 4, 4)]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    call = lambda *x: attention(*x[:3], beta=x[3], decay=x[4], gate=x[5])  # noqa: E731
    assert torch.autograd.gradcheck(call, tuple(inputs), atol=1e-6, eps=1e-6)
    heads, x = AttentionLayer(8, delta.Config(), heads=2), torch.randn(1, 6, 8, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        y = heads(x)
        first, state = heads.extend(x[:, :4])
        second, _ = heads.extend(x[:, 4:], state)
    assert state.attention.kv.dtype == torch.float32
    assert_close(torch.cat((first, second), 1), y, rtol=0.05, atol=0.02)  # two ways of rounding to 8 bits


def test_a_compiled_layer_trains_as_it_does_otherwise():
    """AOTAutograd plans the backward pass by the strides it expects of each gradient."""
    torch.manual_seed(0)
    layer, x = (
        AttentionLayer(8, delta.Config(conv=None, gate=False), heads=2).double(),
        torch.randn(2, 9, 8).double(),
    )
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = [gradients(call(x), list(layer.parameters())) for call in (compiled, layer)]
    assert_close(*found, **EXACT)


def test_the_decays_begin_where_the_authors_begin():
    attention = delta.Config().build(heads=256, dim=2, causal=True)
    rate, step = attention.A_log.exp(), functional.softplus(attention.dt_bias)
    assert rate.min() > 0
    assert rate.max() <= 16 * (1 + 1e-6)
    assert 0.9e-3 < step.min() < step.max() < 1.1e-1
    assert abs(step.log().mean() - torch.tensor(1e-2).log()) < 0.4  # uniform in the logarithm; 4 sigma


def test_the_loop_over_steps_goes_with_a_mask():
    case = Case("delta", delta.Config(), True)
    attention, inputs = case.build(), case.draw()
    reads = dict(zip(("beta", "decay", "gate"), inputs[3:], strict=True))
    mask = some_masks()[2]
    start = attention.start(2, dtype=torch.float64)
    y, state = attention.extend(*inputs[:3], start, mask=mask, **reads)
    stepped, after = extend_by_steps(attention, *inputs[:3], start, mask=mask, **reads)
    assert_close(stepped, y, **EXACT)
    assert_close(after, state, **EXACT)


def test_what_it_reads_is_checked():
    case = Case("delta", delta.Config(decay=False), True)
    attention, (q, k, v, beta, gate) = case.build(), case.draw()
    with pytest.raises(TypeError, match=r"'delta' takes beta \[b t 2\], got None"):
        attention(q, k, v, gate=gate)
    with pytest.raises(TypeError, match=r"'delta' takes no decay with .*Config"):
        attention(q, k, v, beta=beta, decay=beta, gate=gate)
    with pytest.raises(TypeError, match=r"beta must be float16, .* got torch\.int64"):
        attention(q, k, v, beta=beta.long(), gate=gate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv": 0}, "conv must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        delta.Config(**options)


def test_it_is_causal_only():
    with pytest.raises(ValueError, match=r"'delta' is causal only with delta\.Config.* got causal=False"):
        delta.Config().build(heads=2, dim=4, causal=False)
    case = Case("delta", PLAIN, True)
    with pytest.raises(ValueError, match="'delta' has no cross form"):
        case.build().encode_memory(*case.draw()[1:3])


def test_a_state_of_another_convolution_is_refused():
    """One without a convolution keeps no inputs, and cannot have grown any."""
    q, extra = torch.randn(1, 5, 2, 4), {"beta": torch.randn(1, 5, 2), "decay": torch.randn(1, 5, 2)}
    extra["gate"] = torch.randn(1, 5, 8)
    state = delta.Config().build(heads=2, dim=4, causal=True).start(1)
    for options in ({"conv": None}, {"conv": 1}):
        other = delta.Config(**options, impl="torch").build(heads=2, dim=4, causal=True)
        with pytest.raises(ValueError, match=r"state\.q must be \[1, 0, 2, 4\]"):
            other.extend(q, q, q, state, **extra)

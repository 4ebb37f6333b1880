"""Performer: its dense definition, the softmax it estimates, what padding and strong keys may not do."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import performer
from lintra.attention.performer import Performer, PerformerState
from lintra.testing.laws import EXACT, Case, Largest, gradients
from tests.attention.redraws import resamples_only_on_redraw

VARIANTS = [
    performer.Config(features=7),
    performer.Config(features=5, kernel="hyperbolic", orthogonal=False, per_head=True, impl="torch", chunk=7),
    performer.Config(
        kernel="generalized", activation="elu+1", kernel_eps=0.1, row_norms="constant", impl="reference"
    ),
    performer.Config(kernel="generalized", kernel_eps=0.1, kernel_eps_scaled=True, features=7, impl="torch"),
]


def features(attention: Performer, x: Tensor) -> Tensor:
    """phi(x) as section 2.3 writes it, row by row, with nothing taken from the exponents."""
    config, weight = attention.config, attention.weight
    weight = weight.repeat_interleave(x.shape[2] // weight.shape[0], 0)
    x = x * x.shape[-1] ** -0.25
    projection = torch.einsum("bthd,hmd->bthm", x, weight)
    m = weight.shape[1]
    if config.kernel == "generalized":
        g = {"relu": torch.relu, "squared_relu": lambda y: torch.relu(y) ** 2}
        g["elu+1"] = lambda y: torch.where(y > 0, y + 1, y.exp())
        if config.kernel_eps_scaled:
            return m**-0.5 * (g[config.activation](projection) + config.kernel_eps)  # equation 5
        return m**-0.5 * g[config.activation](projection) + config.kernel_eps
    both = [projection, -projection] if config.kernel == "hyperbolic" else [projection]
    square = (x**2).sum(-1, keepdim=True) / 2
    return torch.cat([(each - square).exp() for each in both], -1) * (m * len(both)) ** -0.5


def dense(attention: Performer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every weight phi(q) . phi(k), with the future masked out."""
    group = attention.heads // attention.kv_heads
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    weights = torch.einsum("bthf,bshf->bhts", features(attention, q), features(attention, k))
    if attention.causal:
        weights = weights.tril()
    y = torch.einsum("bhts,bshe->bthe", weights, v)
    return y / weights.sum(-1).mT[..., None]


def softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v)


def drawn(time: int = 19, size: float = 1.0, seed: int = 0) -> list[Tensor]:
    return [size * x.detach() for x in Case("performer", VARIANTS[0], True).draw(time, seed)]


def built(causal: bool = True, **options) -> Performer:
    return Case("performer", performer.Config(**options), causal).build()


def small(time: int = 12) -> list[Tensor]:
    """One head with q and k of length 1, where random features are precise."""
    q, k, v = (x[:1, :, :1] for x in drawn(time))
    return [q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["positive", "hyperbolic"])
def test_many_features_are_softmax(kernel, causal):
    q, k, v = (x.requires_grad_() for x in small())
    config = performer.Config(features=60_000, kernel=kernel, impl="reference")
    attention = config.build(heads=1, dim=6, value_dim=4, causal=causal).double()
    y, expected = attention(q, k, v), softmax(q, k, v, causal)
    # 60,000^-1/2 = 0.004 is the relative error of a weight.
    assert_close(y, expected, rtol=0, atol=0.02)
    assert_close(gradients(y, [q, k, v]), gradients(expected, [q, k, v]), rtol=0, atol=0.05)


def test_the_error_falls_as_the_root_of_the_features():
    q, k, v = small()
    expected, errors = softmax(q, k, v, True), []
    for features in (16, 256):
        config = performer.Config(features=features, per_head=True, impl="reference")
        attention = config.build(heads=40, dim=6, value_dim=4, causal=True).double()
        y = attention(*(x.expand(-1, -1, 40, -1) for x in (q, k, v)))
        errors.append((y - expected).abs().mean())
    slope = math.log(errors[1] / errors[0]) / math.log(256 / 16)
    assert abs(slope + 0.5) < 0.1  # each mean of 40 draws is right to about 5 %


def test_features_are_d_ln_d_by_default():
    attention = performer.Config().build(heads=2, dim=64, causal=True)
    assert attention.weight.shape == (1, 266, 64)
    assert performer.Config().build(heads=2, dim=1, causal=True).weight.shape == (1, 1, 1)
    assert built(features=9, per_head=True).weight.shape == (2, 9, 6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_constant_values_come_back(config, causal):
    q, k, v = drawn()
    y = Case("performer", config, causal).build()(q, k, torch.full_like(v, 3.0))
    assert_close(y, torch.full_like(y, 3.0), **EXACT)


def test_order_matters_only_to_the_causal_form():
    q, k, v = drawn()
    order = torch.randperm(19, generator=torch.Generator().manual_seed(0))
    attention = built(causal=False)
    assert_close(attention(q, k[:, order], v[:, order]), attention(q, k, v), **EXACT)
    attention = built(causal=True)
    assert not torch.allclose(attention(q, k[:, order], v[:, order]), attention(q, k, v))


@pytest.mark.parametrize("causal", [True, False])
def test_rotary_estimates_softmax_of_turned_vectors(causal):
    case = Case("performer", performer.Config(), causal, rotary=True)
    attention, (q, k, v) = case.build(), case.draw()
    rope = case.rope(0, 19)
    assert_close(attention(q, k, v, rope=rope), attention(rope(q), rope(k), v), **EXACT)


def test_a_strong_key_leaves_earlier_outputs_and_wins_later_ones():
    q, k, v = drawn()
    strong = k.clone()
    strong[:, 10] *= 20
    attention = built()
    assert_close(attention(q, strong, v)[:, :10], attention(q, k, v)[:, :10], **EXACT)
    assert attention(q, strong, v).isfinite().all()


def test_weak_keys_are_not_lost():
    """Keys with weights far below 1e-38, the smallest number of float32, are still compared."""
    q, k, v = (x.float() for x in drawn())
    k = k + 40.0  # |k|^2 / 2 sqrt(d) is about 2,000
    for causal in (True, False):
        y = built(causal).float()(q, k, v)
        exact = built(causal)(q.double(), k.double(), v.double())
        assert y.isfinite().all()
        # The exponents, about 2,000, have float32 errors of 1e-4; that is the relative error of a weight.
        assert_close(y.double(), exact, rtol=0, atol=5e-3)
        assert (y != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_vectors_without_a_row_in_common_give_zero(dtype):
    """The best row for the key -q is the worst for q: the product that is left is less than eps."""
    q, _, v = (x[:, :, :2].to(dtype) for x in drawn())
    inputs = [x.detach().requires_grad_() for x in (60 * q, -60 * q, v)]
    attention = performer.Config().build(heads=2, dim=6, value_dim=4, causal=True).to(dtype)
    y = attention(*inputs)
    assert (y[:, 0].abs() < 1e-6).all()
    assert all(x.isfinite().all() for x in [y, *gradients(y, inputs)])


def test_denominators_far_below_1_keep_their_digits():
    """Queries and keys of six standard deviations, of 64 numbers: outputs and gradients without eps."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 128, 1, 64, generator=generator).double() for _ in range(3))
    found = []
    for dtype, config in ((torch.float64, performer.Config(eps=0.0)), (torch.float32, performer.Config())):
        attention = config.build(heads=1, dim=64, causal=True).to(dtype)
        inputs = [x.to(dtype).requires_grad_() for x in (6 * q, 6 * k, v)]
        y = attention(*inputs)
        found.append([x.double() for x in (y, *gradients(y, inputs))])
    for exact, x in zip(*found, strict=True):
        assert (x - exact).norm() < 1e-4 * exact.norm()


def test_edges():
    """Length 1, one valid key, equal keys and zero rows: the mean of the values that are seen."""
    q, k, v = drawn()
    for causal in (True, False):
        attention = built(causal)
        seen = v.repeat_interleave(2, 2)
        assert_close(attention(q[:, :1], k[:, :1], v[:, :1]), seen[:, :1], **EXACT)
        one = torch.zeros(2, 19, dtype=torch.bool)
        one[:, 7] = True
        y = attention(q, k, v, mask=one)
        assert_close(y[:, 7], seen[:, 7], **EXACT)
        for same in (torch.ones_like(k), torch.zeros_like(k)):
            y = attention(q, same, v)
            assert_close(y[:, -1], seen.mean(1), **EXACT)


def test_defect_01_padded_keys_are_not_in_the_normaliser():
    q, k, v = drawn()
    mask = torch.arange(19) < torch.tensor([[19], [4]])
    y = built(causal=False)(q, k, torch.ones_like(v), mask=mask)
    assert_close(y[mask], torch.ones_like(y[mask]), **EXACT)


@pytest.mark.parametrize("causal", [True, False])
def test_defect_04_padded_and_later_keys_raise_no_maximum(causal):
    """The first keys have weights of about exp(-2000), the others of about 1: with one maximum over all of
    them, the first would be 0 in float32."""
    q, k, v = (x.float() for x in drawn())
    k[:, :10] += 40.0
    mask = torch.arange(19) < 10
    attention = built(causal).float()
    expected = attention(q[:, :10], k[:, :10], v[:, :10])
    assert (expected != 0).all()
    assert_close(attention(q, k, v, mask=mask.expand(2, -1))[:, :10], expected, rtol=1e-5, atol=1e-5)
    if causal:
        assert_close(attention(q, k, v)[:, :10], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_before_weak_keys_has_no_part_in_their_maximum(causal):
    """A zero at a padded place has an exponent 2,000 above the others: it neither counts nor overflows."""
    inputs = [x.float() for x in drawn()]
    inputs[1] += 40.0
    mask = (torch.arange(19) >= 9).expand(2, -1)
    attention = built(causal).float()
    padded, real = (
        [x.clone().requires_grad_() for x in each] for each in (inputs, [x[:, 9:] for x in inputs])
    )
    y, expected = attention(*padded, mask=mask)[:, 9:], attention(*real)
    assert_close(y, expected, rtol=1e-5, atol=1e-5)
    found = [g[:, 9:] for g in gradients(y, padded)]
    assert_close(found, gradients(expected, real), rtol=1e-4, atol=1e-4)  # exponents are about 2,000


def test_defect_07_a_state_may_be_used_twice():
    q, k, v = drawn()
    attention = built()
    _, state = attention.extend(q, k, v, attention.start(2, dtype=torch.float64))
    kept = [x.clone() for x in state]
    first, _ = attention.step(q[:, :1], 5 * k[:, :1], v[:, :1], state)
    second, _ = attention.step(q[:, :1], 5 * k[:, :1], v[:, :1], state)
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))


def test_many_states_under_vmap_may_take_the_same_tokens():
    q, k, v = drawn()
    attention = built()
    tokens = q[:, :2], k[:, :2], v[:, :2]
    _, state = attention.extend(q, k, v, attention.start(2, dtype=torch.float64))
    states = PerformerState(*(torch.stack((x, x - 1)) for x in state))
    found = torch.vmap(lambda *state: attention.extend(*tokens, PerformerState(*state))[0])(*states)
    alone = [attention.extend(*tokens, PerformerState(*(x[i] for x in states)))[0] for i in range(2)]
    assert_close(found, torch.stack(alone), **EXACT)


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_defect_08_gradients_survive_a_decay_of_everything(impl):
    """What came before an overwhelming key cannot be recovered by subtraction: float32 has lost it."""
    inputs = drawn()
    inputs[1][:, :12] *= 8  # long keys have little weight, about exp(-60) of that of later keys
    exact = [x.clone().requires_grad_() for x in inputs]
    single = [x.float().requires_grad_() for x in inputs]
    expected = gradients(built(impl=impl, chunk=4)(*exact), exact)
    found = gradients(built(impl=impl, chunk=4).float()(*single), single)
    for a, b in zip(found, expected, strict=True):
        assert_close(a.double(), b, rtol=1e-3, atol=1e-3)  # float32, exponents up to about 100


def test_defect_21_features_are_drawn_when_asked_only():
    resamples_only_on_redraw(built, drawn())


def test_defect_22_no_state_for_every_token():
    """Forward and backward over 1,024 tokens keep features and states between chunks, not t f e numbers."""
    attention = performer.Config(features=64, impl="torch").build(heads=1, dim=64, causal=True)
    inputs = [torch.randn(1, 1024, 1, 64, requires_grad=True) for _ in range(3)]
    with Largest() as largest:
        attention(*inputs).sum().backward()
    assert largest.numbers <= 2 * 1024 * 64


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("features", 0, "features must be at least 1, got 0"),
        ("redraw_every", 0, "redraw_every must be at least 1, got 0"),
        ("kernel_eps", -1.0, "kernel_eps must be at least 0 and finite, got -1"),
        ("eps", float("inf"), "eps must be at least 0 and finite, got inf"),
        ("chunk", 0, "chunk must be at least 1, got 0"),
        ("activation", "elu+1", "activation needs kernel='generalized', got 'elu.1' with kernel='positive'"),
        ("kernel_eps", 0.1, "kernel_eps needs kernel='generalized', got 0.1"),
        ("kernel_eps_scaled", True, "kernel_eps_scaled needs kernel='generalized', got True"),
    ],
)
def test_config_refuses(field, value, message):
    with pytest.raises(ValueError, match=message):
        performer.Config(**{field: value})


def test_what_is_not_there_is_refused():
    with pytest.raises(TypeError, match=r"kernel must be 'positive' or .*, got 'trig'"):
        performer.Config(kernel="trig")
    q, k, v = drawn()
    with pytest.raises(TypeError, match="state must be a PerformerState, got NoneType"):
        built().extend(q, k, v, None)
    with pytest.raises(TypeError, match="memory must be a PerformerState, from encode_memory, got tuple"):
        built(causal=False).cross_attend(q, (k, v))

"""Random feature attention: its dense definition, the kernels it estimates, its gate and its denominator."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import rfa
from lintra.attention.rfa import RandomFeatureAttention
from lintra.nn import AttentionLayer
from lintra.testing.laws import EXACT, Case, Largest, gradients
from tests.attention.redraws import resamples_only_on_redraw

VARIANTS = [
    rfa.Config(features=12),
    rfa.Config(features=5, gate=True, gate_bias=1.0, orthogonal=True, den_eps=0.3, impl="torch", chunk=7),
    rfa.Config(features=9, kernel="arccos", tau=0.7, learn_sigma=False, impl="reference"),
]
GATED = VARIANTS[1]


def features(attention: RandomFeatureAttention, x: Tensor) -> Tensor:
    config = attention.config
    weight = attention.rows / config.tau
    if config.learn_sigma:
        weight = weight * attention.sigma[:, None]
    weight = weight.repeat_interleave(x.shape[2] // weight.shape[0], 0)
    x = x / x.norm(dim=-1, keepdim=True)
    angle = torch.einsum("bthd,hmd->bthm", x, weight)
    both = [angle.relu()] if config.kernel == "arccos" else [angle.sin(), angle.cos()]
    return torch.cat(both, -1) * config.features**-0.5


def key_weights(attention: RandomFeatureAttention, k: Tensor, gate: Tensor | None) -> Tensor:
    """How much key s counts at query t [b t s h]: 1, or (1 - g_s) times every g after it."""
    time = k.shape[1]
    if gate is None:
        seen = k.new_ones(time, time).tril() if attention.causal else k.new_ones(time, time)
        return seen[None, :, :, None].expand(k.shape[0], -1, -1, attention.heads)
    g = torch.sigmoid(gate + attention.gate_bias)
    rows = []
    for t in range(time):
        row = [(1 - g[:, s]) * g[:, s + 1 : t + 1].prod(1) if s <= t else 0 * g[:, s] for s in range(time)]
        rows.append(torch.stack(row, 1))
    return torch.stack(rows, 1).repeat_interleave(attention.heads // attention.kv_heads, 3)


def dense(
    attention: RandomFeatureAttention, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None
) -> Tensor:
    """Every weight; the denominator is at least den_eps times the sum of the key counts."""
    group = attention.heads // attention.kv_heads
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    counts = key_weights(attention, k, gate)
    weights = torch.einsum("bthf,bshf->btsh", features(attention, q), features(attention, k)) * counts
    total = weights.sum(2)
    if attention.config.kernel == "trig":
        total = torch.maximum(total, attention.den_eps * counts.sum(2))
    y = torch.einsum("btsh,bshe->bthe", weights, v)
    return y / total[..., None].masked_fill(total[..., None] == 0, 1.0)


def drawn(time: int = 19, gate: bool = False) -> list[Tensor]:
    return [x.detach() for x in Case("rfa", GATED if gate else VARIANTS[0], True).draw(time)]


def built(causal: bool = True, **options) -> RandomFeatureAttention:
    return Case("rfa", rfa.Config(**options), causal).build()


def kernel(name: str, q: Tensor, k: Tensor, tau: float) -> Tensor:
    """The kernel that the features estimate, for one head [t s]."""
    cosine = torch.einsum("td,sd->ts", *(x[0, :, 0] / x[0, :, 0].norm(dim=-1, keepdim=True) for x in (q, k)))
    if name == "trig":
        return (cosine / tau**2).exp()  # up to a constant factor
    angle = cosine.clamp(-1, 1).acos()
    return (angle.sin() + (math.pi - angle) * angle.cos()) / math.tau


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "tau"), [("trig", 1.0), ("trig", 0.8), ("arccos", 1.0)])
def test_many_features_are_the_kernel(name, tau, causal):
    """trig: softmax of cosines over tau^2."""
    q, k, v = (x[:1, :, :1] for x in drawn(12))
    config = rfa.Config(features=60_000, kernel=name, tau=tau, impl="reference")
    attention = config.build(heads=1, dim=6, value_dim=4, causal=causal).double()
    weights = kernel(name, q, k, tau)
    weights = weights.tril() if causal else weights
    expected = torch.einsum("ts,bsge->btge", weights / weights.sum(1, keepdim=True), v)
    # 60,000^-1/2 = 0.004 is the error of a weight; the smallest weights are about a tenth of the largest.
    assert_close(attention(q, k, v), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["trig", "arccos"])
def test_the_error_falls_as_the_root_of_the_features(name):
    q, k, v = (x[:1, :, :1] for x in drawn(12))
    weights = kernel(name, q, k, 1.0)
    expected = torch.einsum("ts,bsge->btge", weights / weights.sum(1, keepdim=True), v)
    errors = []
    for features_ in (64, 1024):
        config = rfa.Config(features=features_, kernel=name, impl="reference")
        attention = config.build(heads=40, dim=6, value_dim=4, causal=False).double()
        y = attention(*(x.expand(-1, -1, 40, -1) for x in (q, k, v)))
        errors.append((y - expected).abs().mean().detach())
    slope = math.log(errors[1] / errors[0]) / math.log(1024 / 64)
    assert abs(slope + 0.5) < 0.1  # each mean of 40 draws is right to about 5 %


def test_lengths_of_queries_and_keys_do_not_matter():
    q, k, v = drawn()
    attention = built()
    assert_close(attention(5 * q, k * torch.rand(2, 19, 1, 1).double(), v), attention(q, k, v), **EXACT)
    assert attention(0 * q, 0 * k, v).isfinite().all()


@pytest.mark.parametrize("config", VARIANTS[::2], ids=str)
def test_constant_values_come_back(config):
    q, k, v = drawn()
    for causal in (True, False):
        low = {"den_eps": 1e-3} if config.kernel == "trig" else {}
        attention = Case("rfa", replace(config, **low), causal).build()
        y = attention(q, k, torch.full_like(v, 3.0))
        # Where a denominator is bounded, or no feature is shared, y is less.
        free = (y - 3).abs() < 1e-9
        assert free.double().mean() > 0.9
        assert y.max() < 3 + 1e-9


def test_constant_values_come_back_through_the_gate():
    q, k, v, gate = drawn(gate=True)
    y = built(features=64, gate=True)(q, k, torch.full_like(v, 3.0), gate=gate)
    free = (y - 3).abs() < 1e-9
    assert free.double().mean() > 0.9


def test_order_matters_only_to_causal_forms():
    q, k, v = drawn()
    order = torch.randperm(19, generator=torch.Generator().manual_seed(0))
    attention = built(causal=False)
    assert_close(attention(q, k[:, order], v[:, order]), attention(q, k, v), **EXACT)
    attention = built()
    assert not torch.allclose(attention(q, k[:, order], v[:, order]), attention(q, k, v))


def test_order_matters_to_a_gate():
    """It matters to the last query too, which sees every key."""
    q, k, v, gate = drawn(gate=True)
    order = torch.randperm(19, generator=torch.Generator().manual_seed(0))
    mixed, attention = [x[:, order] for x in (k, v)], built(gate=True)
    last = attention(q, k, v, gate=gate)[:, -1]
    for moved in (gate, gate[:, order]):
        assert not torch.allclose(attention(q, *mixed, gate=moved)[:, -1], last)
    ungated = built()
    assert_close(ungated(q, *mixed)[:, -1], ungated(q, k, v)[:, -1], **EXACT)


@pytest.mark.parametrize("name", ["trig", "arccos"])
def test_an_equal_gate_discounts(name):
    q, k, v, gate = drawn(gate=True)
    attention = built(kernel=name, gate=True, features=64)
    g = 0.8
    y = attention(q, k, v, gate=torch.full_like(gate, math.log(g / (1 - g))))
    distance = (torch.arange(19)[:, None] - torch.arange(19)).double()
    discount = torch.where(distance >= 0, (1 - g) * g ** distance.clamp(min=0), 0.0)
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    weights = torch.einsum("bthf,bshf,ts->bths", features(attention, q), features(attention, k), discount)
    total = weights.sum(-1)
    if name == "trig":
        total = torch.maximum(total, attention.den_eps * discount.sum(1)[:, None])
    total = total[..., None].masked_fill(total[..., None] == 0, 1.0)
    assert_close(y, torch.einsum("bths,bshe->bthe", weights, v) / total, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_closed_gate_returns_the_values(dtype):
    """g -> 0: only the token itself counts. Queries equal keys, so that its weight is 1."""
    case = Case("rfa", rfa.Config(gate=True), True, kv_heads=4)
    q, _, v, gate = (x.detach().to(dtype).requires_grad_() for x in case.draw())
    y = case.build().to(dtype)(q, q, v, gate=torch.full_like(gate, -1e4))
    assert_close(y, v, rtol=1e-5, atol=1e-5)  # float32
    for g in gradients(y, [q, v]):
        assert g.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_open_gate_keeps_the_state(dtype):
    """g -> 1 after some tokens: their output stays; from the empty state, it is ungated attention."""
    q, k, v, gate = (x.to(dtype) for x in drawn(gate=True))
    attention = built(features=64, gate=True).to(dtype)
    always = torch.full_like(gate, 1e4).requires_grad_()
    _, state = attention.extend(q, k, v, attention.start(2, dtype=dtype), gate=gate)
    same = q[:, :1].expand(-1, 19, -1, -1)
    y, after = attention.extend(same, 3 + k, v, state, gate=always)
    assert_close(y, y[:, :1].expand_as(y), rtol=1e-5, atol=1e-5)
    assert_close(after.kv, state.kv, rtol=1e-5, atol=1e-5)
    from_nothing = attention(q, k, v, gate=always)
    ungated = built(features=64).to(dtype)
    ungated.load_state_dict(attention.state_dict(), strict=False)
    if dtype == torch.float64:
        assert_close(from_nothing, ungated(q, k, v), **EXACT)
    (found,) = gradients(from_nothing.sum() + y.sum(), [always])
    assert found.isfinite().all()


@pytest.mark.parametrize("size", [1e-6, 1 - 1e-6, None])
def test_defect_17_gates_near_0_and_1(size):
    """Chunks, steps and the definition agree where the inverse of a decay would overflow; gradients too."""
    inputs = drawn(40, gate=True)
    inputs[3] = inputs[3] * 20 if size is None else torch.full_like(inputs[3], math.log(size / (1 - size)))
    inputs = [x.requires_grad_() for x in inputs]
    attention = Case("rfa", rfa.Config(features=32, gate=True, impl="torch", chunk=16), True).build()
    q, k, v, gate = inputs
    y = attention(q, k, v, gate=gate)
    expected = dense(attention, q, k, v, gate)
    assert_close(y, expected, rtol=1e-6, atol=1e-8)  # 1 - g of the definition has lost up to 9 digits
    assert_close(gradients(y, inputs), gradients(expected, inputs), rtol=1e-5, atol=1e-6)
    single = [x.detach().float().requires_grad_() for x in inputs]
    for g in gradients(attention.float()(*single[:3], gate=single[3]), single):
        assert g.isfinite().all()


@pytest.mark.parametrize("kernel", ["trig", "arccos"])
@pytest.mark.parametrize("size", [50.0, 60.0])
def test_gradients_where_next_to_nothing_is_written(kernel, size):
    """Gates with a sigmoid near 1: the denominator is tiny, and its square is below the range of float32."""
    config = rfa.Config(kernel=kernel, features=32, gate=True)
    inputs = drawn(9, gate=True)
    inputs[3] = torch.full_like(inputs[3], size)
    attention = Case("rfa", config, True).build()
    exact = [x.requires_grad_() for x in inputs]
    expected = gradients(attention(*exact[:3], gate=exact[3]), exact[:3])
    single = [x.detach().float().requires_grad_() for x in inputs]
    found = gradients(attention.float()(*single[:3], gate=single[3]), single[:3])
    for g, e in zip(found, expected, strict=True):
        assert_close(g.double(), e, rtol=0, atol=1e-4 * float(e.abs().max()))


def test_gradients_are_those_of_finite_differences():
    """Gradients of every learned parameter and of the state that came before."""
    case = Case("rfa", rfa.Config(features=8, gate=True, impl="torch"), True, heads=1, kv_heads=1)
    attention = case.build()
    q, k, v, gate = (x.detach()[:1, :4].requires_grad_() for x in case.draw())
    kv = torch.rand(1, 1, 16, 5, dtype=torch.float64, requires_grad=True)
    n = torch.rand(1, 1, dtype=torch.float64, requires_grad=True)
    learned = list(attention.parameters())
    assert len(learned) == 2  # sigma and the gate's bias, which are moved in place

    def function(q, k, v, gate, kv, n, *_):
        y, after = attention.extend(q, k, v, rfa.RfaState(kv, n), gate=gate)
        return y, *after

    assert torch.autograd.gradcheck(function, (q, k, v, gate, kv, n, *learned))


def test_a_fresh_gate_forgets_as_its_bias_says():
    heads = AttentionLayer(12, rfa.Config(gate=True, gate_bias=3.0), heads=2)
    assert heads.extra_proj["gate"].weight.shape == (2, 12)
    assert torch.equal(heads.attention.gate_bias, torch.full((2,), 3.0))


def test_edges():
    """Length 1, one valid key and zero rows."""
    q, k, v = drawn()
    for causal in (True, False):
        attention = built(causal, features=200)
        seen = v.repeat_interleave(2, 2)
        assert_close(attention(q[:, :1], k[:, :1], v[:, :1]), seen[:, :1], **EXACT)
        one = torch.zeros(2, 19, dtype=torch.bool)
        one[:, 7] = True
        assert_close(attention(q, k, v, mask=one)[:, 7], seen[:, 7], **EXACT)
        y = attention(q, torch.zeros_like(k), v)
        assert_close(y[:, -1], seen.mean(1), **EXACT)
        assert built(causal, kernel="arccos")(q, torch.zeros_like(k), v).eq(0).all()


def test_defect_01_padded_keys_are_not_in_the_denominator():
    q, k, v = drawn()
    mask = torch.arange(19) < torch.tensor([[19], [4]])
    attention = built(causal=False, features=200)
    y = attention(q, k, torch.ones_like(v), mask=mask)
    assert_close(y[mask], torch.ones_like(y[mask]), **EXACT)


def test_a_denominator_is_no_smaller_than_its_noise():
    """In sharp attention by few rows many denominators are noise, which must magnify nothing: no output
    exceeds the largest value so far times (2 features)^(1/2), and hardly any exceeds twice that value."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 256, 8, 64, generator=generator) for _ in range(3))
    attention = rfa.Config(tau=0.5, learn_sigma=False).build(heads=8, dim=64, causal=True)
    y, largest = attention(q, k, v), v.abs().amax(-1).cummax(1).values
    size = y.abs().amax(-1) / largest
    assert (size <= 128**0.5 + 1e-3).all()
    assert (size > 2).float().mean() < 0.01
    few = rfa.Config(tau=0.5, learn_sigma=False, den_eps=1e-3).build(heads=8, dim=64, causal=True)
    assert ((few(q, k, v).abs().amax(-1) / largest) > 2).float().mean() > 0.1  # the bound prevents this


def test_the_default_bound_is_below_what_is_estimated():
    """At tau = 1 no exact weight is below exp(-2): the bound affects noise alone."""
    assert built().den_eps < math.exp(-2)
    assert built(features=8).den_eps == 0.25
    assert built(den_eps=0.01).den_eps == 0.01


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float16, False), (torch.float32, True)])
def test_sharp_attention_keeps_its_gradients_in_16_bits(dtype, autocast):
    """A layer in float16, or in float32 under bfloat16 autocast, is within a few roundings of float64. Noise
    in the denominator would magnify these to a third of a gradient."""
    torch.manual_seed(0)
    layer = AttentionLayer(256, rfa.Config(tau=0.5), heads=4).double()
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(2, 128, 256, generator=generator, dtype=torch.float64) for _ in range(2))

    def found(x: Tensor, autocast: bool = False) -> list[Tensor]:
        x = x.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x)
        loss = (y.to(torch.promote_types(y.dtype, torch.float32)) * g.to(x.dtype)).sum()
        return [y.double(), *(z.double() for z in torch.autograd.grad(loss, [x, layer.qkv_proj.weight]))]

    expected = found(x)
    layer.to(dtype)
    for a, e in zip(found(x.to(dtype), autocast), expected, strict=True):
        assert (a - e).norm() < (0.05 if autocast else 0.01) * e.norm()


def test_defect_15_one_rule_for_every_denominator():
    """Whole, masked, step by step and cross: the same bound applies, and it affects many of these rows."""
    config = rfa.Config(features=2, den_eps=0.5)
    q, k, v = drawn()
    for causal in (True, False):
        attention = Case("rfa", config, causal).build()
        y = attention(q, k, v)
        free = Case("rfa", rfa.Config(features=2, den_eps=1e-9), causal).build()(q, k, v)
        assert 0.1 < ((y - free).abs() > 1e-9).double().mean() < 0.9
        junk = [torch.cat((x, 9 * x[:, :5]), 1) for x in (q, k, v)]
        mask = (torch.arange(24) < 19).expand(2, -1)
        assert_close(attention(*junk, mask=mask)[:, :19], y, **EXACT)
        assert_close(dense(attention, q, k, v), y, **EXACT)
        if not causal:
            assert_close(
                attention.cross_attend(q, attention.encode_memory(junk[1], junk[2], mask)), y, **EXACT
            )
            continue
        state = attention.start(2, dtype=torch.float64)
        for t in range(19):
            one, state = attention.step(*(x[:, t : t + 1] for x in (q, k, v)), state)
            assert_close(one, y[:, t : t + 1], **EXACT)


def test_defect_21_rows_are_drawn_when_asked_only():
    resamples_only_on_redraw(built, drawn())


def test_defect_22_no_state_for_every_token():
    """Forward and backward over 1,024 tokens keep features and states between chunks, not t f e numbers."""
    attention = rfa.Config(features=32, gate=True, impl="torch").build(heads=1, dim=64, causal=True)
    inputs = [torch.randn(1, 1024, 1, 64, requires_grad=True) for _ in range(3)]
    gate = torch.randn(1, 1024, 1, requires_grad=True)
    with Largest() as largest:
        attention(*inputs, gate=gate).sum().backward()
    assert largest.numbers <= 2 * 1024 * 65


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, "features must be at least 1, got 0"),
        ({"tau": 0.0}, "tau must be above 0 and finite, got 0"),
        ({"den_eps": 0.0}, "den_eps must be above 0 and finite, got 0"),
        ({"gate": True, "gate_bias": math.inf}, "gate_bias must be finite, got inf"),
        ({"gate_bias": 1.0}, "gate_bias needs gate=True, got 1"),
        ({"kernel": "arccos", "den_eps": 0.1}, "den_eps needs kernel='trig', got 0.1 with kernel='arccos'"),
        ({"redraw_every": 0}, "redraw_every must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        rfa.Config(**options)


def test_a_gate_needs_an_order_of_time():
    with pytest.raises(ValueError, match=r"causal only with rfa\.Config\(gate=True.* got causal=False"):
        rfa.Config(gate=True).build(heads=2, dim=4, causal=False)
    gated = rfa.Config(gate=True).build(heads=2, dim=4, causal=True)
    assert not gated.can.bidirectional
    assert not gated.can.cross
    assert gated.extra_inputs() == {"gate": 2}


def test_what_is_not_there_is_refused():
    q, k, v, gate = drawn(gate=True)
    with pytest.raises(TypeError, match=r"'rfa' takes gate \[b t 2\], got None"):
        built(gate=True)(q, k, v)
    for causal in (True, False):
        with pytest.raises(TypeError, match=r"'rfa' takes no gate with .*Config"):
            built(causal=causal)(q, k, v, gate=gate)
    with pytest.raises(ValueError, match=r"gate must be \[b=2 t=19 w=2\], got shape \[2, 19, 1\]"):
        built(gate=True)(q, k, v, gate=gate[..., :1])
    with pytest.raises(TypeError, match="state must be a RfaState, got NoneType"):
        built().extend(q, k, v, None)
    state = built().start(2)
    with pytest.raises(ValueError, match=r"state\.kv must be"):
        built().extend(q, k, v, state._replace(kv=state.kv[..., :-1]))
    with pytest.raises(TypeError, match="memory must be a RfaState, from encode_memory, got tuple"):
        built(causal=False).cross_attend(q, (k, v))

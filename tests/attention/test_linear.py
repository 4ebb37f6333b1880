"""Linear attention: its dense definition, its feature maps, what it refuses."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra import checkpoint, native
from lintra.attention import linear
from lintra.attention.linear import LinearAttention
from lintra.models import decoder
from lintra.nn import AttentionLayer
from lintra.ops.rope import RotaryEmbedding
from lintra.testing.laws import BATCH, EXACT, TIME, Case, extend_by_steps, gradients, some_masks

SPARSE = [linear.Relu(), linear.SquaredRelu(), linear.Dpfp(nu=2), linear.T2R(width=6)]  # may all be 0
MAPS = [
    linear.EluPlusOne(),
    linear.Relu(),
    linear.SquaredRelu(),
    linear.Dpfp(nu=2),
    linear.Taylor2(),
    linear.Hedgehog(),
    linear.Hedgehog(kind="exp"),
    linear.T2R(width=6),
]
VARIANTS = [
    # A row of relu features may be all zero, and its sum is then divided by eps alone: 1e-3 keeps the
    # rounding errors of the two ways below the tolerance of the laws.
    *(
        linear.Config(
            feature_map=each,
            impl="torch",
            chunk=7,
            eps=1e-3,
            rotary="inputs" if each in SPARSE else "features",
        )
        for each in MAPS
    ),
    linear.Config(feature_map=linear.Identity(), normalize=False, impl="torch", chunk=7),
    linear.Config(impl="reference"),
    linear.Config(eps=0.0),
    linear.Config(rotary="inputs"),
]
IMPLEMENTATIONS = ["torch", "reference"]
if native.available():
    IMPLEMENTATIONS += ["native"]
    VARIANTS += [
        linear.Config(feature_map=MAPS[0], impl="native", eps=1e-3),
        linear.Config(feature_map=MAPS[1], impl="native", eps=1e-3, rotary="inputs"),
        linear.Config(feature_map=MAPS[4], impl="native", eps=1e-3),
    ]
    VARIANTS += [linear.Config(feature_map=linear.Identity(), normalize=False, impl="native")]


def features(attention: LinearAttention, x: Tensor, learned: torch.nn.Module) -> Tensor:
    """The maps, as their papers write them."""
    kind = attention.config.feature_map
    if isinstance(kind, linear.EluPlusOne):
        return torch.where(x > 0, x + 1, torch.exp(x))
    if isinstance(kind, linear.Relu):
        return x.clamp(min=0)
    if isinstance(kind, linear.SquaredRelu):
        return x.clamp(min=0) ** 2
    if isinstance(kind, linear.Dpfp):
        r = torch.cat((x.clamp(min=0), (-x).clamp(min=0)), -1)
        size = r.shape[-1]
        shifted = [r[..., [(i - j) % size for i in range(size)]] for j in range(1, kind.nu + 1)]
        return torch.cat([r * each for each in shifted], -1)
    if isinstance(kind, linear.Taylor2):
        x = x / x.shape[-1] ** 0.25
        square = (x[..., :, None] * x[..., None, :]).flatten(-2) / 2**0.5
        return torch.cat((torch.ones_like(x[..., :1]), x, square), -1)
    if isinstance(kind, linear.Hedgehog):
        x = torch.einsum("bthd,hdf->bthf", x, learned.weight) + learned.bias
        both = torch.cat((x, -x), -1).exp()
        return both if kind.kind == "exp" else both / both.sum(-1, keepdim=True)
    if isinstance(kind, linear.T2R):
        return (torch.einsum("bthd,hdf->bthf", x, learned.weight) + learned.bias).clamp(min=0)
    return x


def dense(attention: LinearAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equations 4 and 8, every weight, with the future masked out."""
    group = attention.heads // attention.kv_heads
    q = features(attention, q, attention.query_map)
    k = features(attention, k, attention.key_map).repeat_interleave(group, 2)
    weights = torch.einsum("bthf,bshf->bhts", q, k)
    if attention.causal:
        weights = weights.tril()
    y = torch.einsum("bhts,bshe->bthe", weights, v.repeat_interleave(group, 2))
    if attention.config.normalize:
        y = y / (weights.sum(-1).mT[..., None] + attention.config.eps)
    return y


def test_constant_values_come_back():
    q, k, v = Case("linear", linear.Config(), True).draw()
    for causal in (True, False):
        y = Case("linear", linear.Config(eps=0.0), causal).build()(q, k, torch.full_like(v, 3.0))
        assert_close(y, torch.full_like(y, 3.0), **EXACT)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_order_matters_only_to_the_causal_form(impl):
    """Keys, values and their mask are permuted."""
    q, k, v = Case("linear", linear.Config(), True).draw()
    mixed = torch.randperm(TIME, generator=torch.Generator().manual_seed(0))
    attention = Case("linear", linear.Config(impl=impl), False).build()
    assert_close(attention(q, k[:, mixed], v[:, mixed]), attention(q, k, v), **EXACT)
    for mask in some_masks():
        y = attention.cross_attend(q, attention.encode_memory(k[:, mixed], v[:, mixed], mask[:, mixed]))
        assert_close(y, attention.cross_attend(q, attention.encode_memory(k, v, mask)), **EXACT)
    attention = Case("linear", linear.Config(impl=impl), True).build()
    assert not torch.allclose(attention(q, k[:, mixed], v[:, mixed]), attention(q, k, v))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("feature_map", [*MAPS[:-1], linear.T2R(width=64)], ids=str)
def test_edges(feature_map, impl):
    """Length 1, one valid key and equal keys: the mean of the values that are seen; features that are all 0
    give 0."""
    config = linear.Config(feature_map=feature_map, eps=0.0, impl=impl)
    q, k, v = (x.detach() for x in Case("linear", linear.Config(), True).draw())
    q, k = q.abs(), k.abs()  # of different signs they may share no feature
    seen = v.repeat_interleave(2, 2)
    one = torch.zeros(BATCH, TIME, dtype=torch.bool)
    one[:, 7] = True
    for causal in (True, False):
        attention = Case("linear", config, causal).build()
        assert_close(attention(q[:, :1], k[:, :1], v[:, :1]), seen[:, :1], **EXACT)
        assert_close(attention(q, k, v, mask=one)[:, 7], seen[:, 7], **EXACT)
        assert_close(attention(q, k[:, :1].expand_as(k), v)[:, -1], seen.mean(1), **EXACT)
        if isinstance(feature_map, linear.Relu | linear.SquaredRelu | linear.Dpfp):
            nothing = torch.zeros_like(k).requires_grad_()
            y = attention(q, nothing, v)
            assert (y == 0).all()
            assert gradients(y, [nothing])[0].isfinite().all()
        if not causal:
            y = attention.cross_attend(q, attention.encode_memory(k, v, one))
            assert_close(y, seen[:, 7:8].expand_as(y), **EXACT)


def turned_above(
    attention: LinearAttention, q: Tensor, k: Tensor, v: Tensor, rope: RotaryEmbedding
) -> Tensor:
    """Equation 19 of RoFormer, every weight, with as many key-value heads as heads."""
    q, k = features(attention, q, attention.query_map), features(attention, k, attention.key_map)
    rotated = torch.einsum("bthf,bshf->bhts", rope(q), rope(k))
    weights = torch.einsum("bthf,bshf->bhts", q, k)
    if attention.causal:
        rotated, weights = rotated.tril(), weights.tril()
    divisor = weights.sum(-1).mT[..., None] + attention.config.eps
    return torch.einsum("bhts,bshe->bthe", rotated, v) / divisor


@pytest.mark.parametrize("causal", [True, False])
def test_rotary_turns_the_numerator_alone(causal):
    case = Case("linear", linear.Config(), causal, heads=2, rotary=True)
    attention, (q, k, v) = case.build(), case.draw()
    rope = case.rope(0, q.shape[1])
    expected = turned_above(attention, q, k, v, rope)
    assert_close(attention(q, k, v, rope=rope), expected, **EXACT)


@pytest.mark.parametrize("feature_map", SPARSE, ids=str)
def test_a_model_saved_before_the_field_turns_features_that_may_be_0(feature_map, tmp_path):
    """The model loads with a warning and computes equation 19; saved again, it names the setting itself."""
    config = linear.Config(feature_map=feature_map, eps=1e-3, rotary="inputs")
    model = decoder.Config(vocabulary=5, layers=1, heads=2, width=8, position="rotary", attention=config)
    checkpoint.save(model.build(), tmp_path / "old")
    content = json.loads((tmp_path / "old" / "config.json").read_text())
    del content["config"]["attention"]["rotary"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"may be 0 where .* as large as a numerator over eps=0\.001"):
        old = checkpoint.load(tmp_path / "old").double()
    attention = old.blocks[0].attn.attention
    q, k, v = torch.randn(3, 2, 9, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rope = RotaryEmbedding(torch.arange(9).expand(2, -1), 1e4)
    expected = turned_above(attention, q, k, v, rope)
    assert_close(attention(q, k, v, rope=rope), expected, **EXACT)
    stepped, _ = extend_by_steps(attention, q, k, v, attention.start(2, dtype=q.dtype), rope=rope)
    assert_close(stepped, expected, **EXACT)
    checkpoint.save(old.float(), tmp_path / "again")
    assert '"unbounded"' in (tmp_path / "again" / "config.json").read_text()
    with pytest.warns(UserWarning, match="may be 0 where"):
        again = checkpoint.load(tmp_path / "again")
    tokens = torch.arange(5)[None]
    assert torch.equal(again(tokens), old(tokens))


@pytest.mark.parametrize("feature_map", [each for each in MAPS if each not in SPARSE], ids=str)
def test_other_models_saved_before_the_field_are_what_they_are_now(feature_map):
    config = linear.Config(feature_map=feature_map)
    content = checkpoint.to_json(config)
    del content["rotary"]
    assert checkpoint.from_json(linear.Config, content, "attention") == config
    assert linear.Config(feature_map=linear.Relu(), normalize=False, rotary="unbounded").rotary == "features"


@pytest.mark.parametrize(
    ("feature_map", "q", "k", "least"),
    [
        (linear.EluPlusOne(), (10.0, -10.0), (-10.0, 10.0), 1e5),
        (linear.Hedgehog(), (10.0, 0.0), (-10.0, 0.0), 1e5),
        (linear.Hedgehog(kind="exp"), (10.0, 0.0), (-10.0, 0.0), 1e5),
        (linear.Taylor2(), (10.0, 0.0, 0.0), (0.0, 0.0, 10.0), 20),
    ],
    ids=str,
)
def test_products_above_0_bound_no_output(feature_map, q, k, least):
    """One key, rotated by a quarter turn away from the query: the factor that its value is multiplied by."""
    attention = linear.Config(feature_map=feature_map, eps=0.0).build(heads=1, dim=len(q), causal=False)
    q, k = (torch.tensor(x, dtype=torch.float64)[None, None, None] for x in (q, k))
    with torch.no_grad():
        q, k = attention._features(q, k, torch.float64)
    quarter = RotaryEmbedding(torch.tensor([[math.pi / 2]]), 1.0)  # with base 1, every pair turns alike
    product, rotated = (q * k).sum(), (quarter(q) * k).sum()
    assert product > 0
    assert abs(rotated / product) > least


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("feature_map", MAPS, ids=str)
def test_rotary_may_turn_queries_and_keys_before_the_map(feature_map, causal):
    """This is linear attention of rotated vectors, in the numerator and in the denominator."""
    case = Case("linear", linear.Config(feature_map=feature_map, rotary="inputs"), causal, rotary=True)
    attention, inputs = case.build(), case.draw()
    rope = case.rope(0, TIME)
    q, k, v = inputs
    y, expected = attention(q, k, v, rope=rope), attention(rope(q), rope(k), v)
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@pytest.mark.parametrize("feature_map", SPARSE, ids=str)
def test_features_that_may_be_0_are_not_turned_above_a_denominator(feature_map):
    """Features of one token may share no entry with those of another, but rotated ones do: 1 / eps."""
    config = linear.Config(feature_map=feature_map)
    with pytest.raises(
        ValueError, match=r'may be 0 where .* rotary="inputs" turns .*"unbounded" .* got rope_base=100'
    ):
        AttentionLayer(16, config, heads=2, rope_base=100.0)
    attention = config.build(heads=2, dim=4, causal=True)
    q, k, v = torch.randn(3, 1, 1, 2, 4)
    state, rope = attention.start(1), RotaryEmbedding(torch.zeros(1, 1, dtype=torch.int64), 100.0)
    bounds = torch.tensor([0, 1])
    for call in (
        lambda: attention(q, k, v, rope=rope),
        lambda: attention.extend(q, k, v, state, rope=rope),
        lambda: attention.step(q, k, v, state, rope=rope),
        lambda: attention(q, k, v, cu_seqlens=bounds, rope=rope),
        lambda: attention.extend(q, k, v, state, cu_seqlens=bounds, rope=rope),
    ):
        with pytest.raises(ValueError, match=r"may be 0 where .* and takes no rotation"):
            call()
    AttentionLayer(16, replace(config, normalize=False), heads=2, rope_base=100.0)  # divides by nothing


@pytest.mark.parametrize("feature_map", [linear.Relu(), linear.SquaredRelu(), linear.Dpfp(), linear.T2R()])
def test_sparse_features_and_positions_average_the_values(feature_map):
    """For queries and keys around -1, few features are above 0. No output exceeds the largest value, and in
    float32 the steps match the forward pass."""
    config = linear.Config(feature_map=feature_map, rotary="inputs")
    torch.manual_seed(0)
    attention = config.build(heads=4, dim=16, causal=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 64, 4, 16, generator=generator) + mean for mean in (-1.0, -1.0, 0.0))
    rope = RotaryEmbedding(torch.arange(64).expand(2, -1), 1e4)
    y = attention(q, k, v, rope=rope)
    assert (y.abs() <= 1.0001 * v.abs().max()).all()
    stepped, _ = extend_by_steps(attention, q, k, v, attention.start(2), rope=rope)
    # Sums of up to 64 terms of one sign in another order: a few units in the last place of their ratio.
    assert_close(stepped, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [-30.0, -17.0, -100.0])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_defect_06_elu_plus_one_keeps_its_digits(value, impl):
    """With one key the numerator is phi(q) phi(k) v: in float32, exp(-30)^2 must not be 0."""
    from lintra.ops import linear_attention

    x = torch.full((1, 1, 1, 1), value if value > -50 else value / 4)
    one = torch.ones(1, 1, 1, 1)
    y, state = linear_attention(one - 1, x, one, feature_map="elu+1", normalize=False, impl=impl)
    expected = torch.tensor(float(x), dtype=torch.float64).exp()
    assert_close(state.z.double().squeeze(), expected, rtol=3e-7, atol=0)  # 2 to 3 units in the last place
    assert_close(y.double().squeeze(), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_defect_01_padded_keys_are_not_in_the_denominator(causal, impl):
    """phi(0) is 1: a padded key that is zeroed before the feature map has a weight after it."""
    case = Case("linear", linear.Config(eps=0.0, impl=impl), causal)
    q, k, v = case.draw()
    for mask in some_masks():
        y = case.build()(q, k, torch.ones_like(v), mask=mask)
        assert_close(y[mask], torch.ones_like(y[mask]), **EXACT)


@pytest.mark.parametrize("way", ["extend", "step"])
def test_defect_07_a_state_serves_two_continuations(way):
    case = Case("linear", linear.Config(), True)
    attention, inputs = case.build(), [x.detach() for x in case.draw()]
    _, state = attention.extend(*inputs, attention.start(2, dtype=torch.float64))
    kept = [x.clone() for x in state]
    token = [x[:, :1] for x in inputs]
    first, after = getattr(attention, way)(*token, state)
    getattr(attention, way)(*token, after)
    assert torch.equal(getattr(attention, way)(*token, state)[0], first)
    assert_close(list(state), kept, rtol=0, atol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_defect_25_every_precision_has_values_and_gradients(impl):
    """float64 is checked by finite differences; 16 bits against float64, within what 16 bits can hold."""
    attention = linear.Config(impl=impl).build(heads=2, kv_heads=1, dim=3, causal=True)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 5, h, 3, generator=generator, dtype=torch.float64) for h in (2, 1, 1)]
    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in inputs], atol=1e-6, eps=1e-6)
    for dtype, unit in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        half = [x.detach().to(dtype).requires_grad_() for x in inputs]
        exact = [x.detach().double().requires_grad_() for x in half]
        y, expected = attention(*half), attention(*exact)
        assert y.dtype == dtype
        # One rounding of y; of what comes back for y, of y in it, and of the gradients, over 5 tokens.
        assert_close(y.double(), expected, rtol=unit, atol=0)
        for a, e in zip(gradients(y.double(), half), gradients(expected, exact), strict=True):
            assert_close(a.double(), e, rtol=4 * unit, atol=4 * unit)


def test_signed_features_have_no_denominator():
    with pytest.raises(ValueError, match="needs normalize=False"):
        linear.Config(feature_map=linear.Identity())


def test_hedgehog_by_exp_is_a_sum_of_cosh():
    """exp(a) exp(b) + exp(-a) exp(-b) for each entry, never below 2; softmax weighs keys differently."""
    q, k, v = Case("linear", linear.Config(), False, kv_heads=4).draw()
    found = []
    for kind in ("exp", "softmax"):
        config = linear.Config(feature_map=linear.Hedgehog(kind=kind), eps=0.0)
        found.append(Case("linear", config, False, kv_heads=4).build()(q, k, v))
    weights = 2 * (q[:, :, None] + k[:, None]).cosh().sum(-1)  # W is the identity at first
    assert_close(
        found[0], torch.einsum("btsh,bshe->bthe", weights / weights.sum(2, keepdim=True), v), **EXACT
    )
    assert (found[1] - found[0]).abs().max() > 0.1


def test_a_feature_map_is_no_name():
    with pytest.raises(TypeError, match=r"feature_map must be a FeatureMap \(EluPlusOne\(\), .*, got 'relu'"):
        linear.Config(feature_map="relu")
    with pytest.raises(TypeError, match=r"must be a FeatureMap \(.* got <class"):
        linear.Config(feature_map=linear.Relu)
    with pytest.raises(TypeError, match=r"impl must be 'auto' or .* got 'cuda'"):
        linear.Config(impl="cuda")
    with pytest.raises(TypeError, match=r"chunk must be int, got 2\.5"):
        linear.Config(chunk=2.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear.Config(eps=float("inf")), "eps must be at least 0 and finite, got inf"),
        (lambda: linear.Config(eps=-1.0), "eps must be at least 0 and finite, got -1"),
        (lambda: linear.Config(chunk=0), "chunk must be at least 1, got 0"),
        (lambda: linear.Dpfp(nu=0), "nu must be at least 1, got 0"),
        (lambda: linear.T2R(width=0), "width must be at least 1, got 0"),
        (
            lambda: linear.Config(feature_map=linear.Dpfp(nu=8)).build(heads=1, dim=4, causal=True),
            "nu must be below twice the head size 4",
        ),
    ],
)
def test_config_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_turned_tokens_go_on_from_a_state_of_its_own():
    """A wrong state is refused by name before anything is rotated, just as without positions."""
    attention = linear.Config().build(heads=2, dim=4, causal=True)
    q, k, v = torch.randn(3, 1, 5, 2, 4)
    rope = RotaryEmbedding(torch.arange(5)[None], 100.0)
    with pytest.raises(TypeError, match="state must be a LinearState, got tuple"):
        attention.extend(q, k, v, tuple(attention.start(1)), rope=rope)

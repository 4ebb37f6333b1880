"""The interface of the 2020 library: its names, its state dicts, its numbers."""

import inspect

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra.compat.fast_transformers.attention import ConditionalFullAttention, ReformerAttention
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry
from lintra.compat.fast_transformers.builders import (
    AttentionBuilder,
    RecurrentDecoderBuilder,
    RecurrentEncoderBuilder,
    TransformerDecoderBuilder,
    TransformerEncoderBuilder,
)
from lintra.compat.fast_transformers.feature_maps import (
    ActivationFunctionFeatureMap,
    Favor,
    GeneralizedRandomFeatures,
    RandomFourierFeatures,
    SmoothedRandomFourierFeatures,
    elu_feature_map,
)
from lintra.compat.fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask
from lintra.testing.laws import EXACT, gradients
from tests.compat.inputs import draw

SMALL = {
    "n_layers": 2,
    "n_heads": 3,
    "query_dimensions": 4,
    "value_dimensions": 5,
    "feed_forward_dimensions": 16,
    "dropout": 0.0,
}
# The options that a type requires, with values that take effect on 11 tokens.
OPTIONS = {
    "clustered": {"clusters": 3},
    "improved-clustered": {"clusters": 3, "topk": 4},
    "improved-causal": {"clusters": 3, "topk": 4},
    "causal-improved-clustered": {"clusters": 3, "topk": 4},
    "local": {"local_context": 4},
    "reformer": {"chunk_size": 4},
    "exact-topk": {"topk": 3},
    "aft-full": {"value_dimensions": 4, "model_dimensions": 15},
    "aft-simple": {"value_dimensions": 4, "model_dimensions": 15},
}
BOTH = ["full", "reformer", "local", "exact-topk", "aft-full", "aft-simple"]
CAUSAL = [*BOTH, "causal-linear", "improved-causal"]
BIDIRECTIONAL = [*BOTH, "linear", "clustered", "improved-clustered"]
MAPS = {
    "elu": elu_feature_map,
    "square": ActivationFunctionFeatureMap.factory(lambda x: x.square() + 0.1),
    "favor": Favor.factory(n_dims=8),
    "generalized": GeneralizedRandomFeatures.factory(n_dims=6),
    "smoothed": SmoothedRandomFourierFeatures.factory(n_dims=9, softmax_temp=0.1),
    "fourier": RandomFourierFeatures.factory(n_dims=32, softmax_temp=0.01),
}
LENGTHS = torch.tensor([11, 6])


def encoder(builder=TransformerEncoderBuilder, attention_type="full", **options):
    torch.manual_seed(1)
    options = SMALL | OPTIONS.get(attention_type, {}) | options | {"attention_type": attention_type}
    if attention_type not in ("linear", "causal-linear"):
        options["attention_dropout"] = 0.0
    return builder.from_kwargs(**options).get().double()


def textbook(model, x, weights_of, lengths=None):
    """A post-norm encoder from the names of a state dict alone; weights_of(q, k) is [l s] for one head."""
    state = model.state_dict()
    real = (
        torch.arange(x.shape[1])
        < (torch.tensor([x.shape[1]] * len(x)) if lengths is None else lengths)[:, None]
    )

    def linear(name, x):
        return x @ state[f"{name}.weight"].mT + state[f"{name}.bias"]

    def norm(name, x):
        return functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    for i in range(SMALL["n_layers"]):
        at = f"layers.{i}"
        q, k, v = (
            linear(f"{at}.attention.{name}_projection", x).unflatten(-1, (SMALL["n_heads"], -1))
            for name in ("query", "key", "value")
        )
        y = torch.zeros_like(v)
        for n in range(len(x)):
            for h in range(SMALL["n_heads"]):
                weights = weights_of(q[n, :, h], k[n, :, h]).masked_fill(~real[n], 0.0)
                y[n, :, h] = weights / weights.sum(-1, keepdim=True) @ v[n, :, h]
        y = y * real[..., None, None]  # padded places differ on purpose
        x = norm(f"{at}.norm1", x + linear(f"{at}.attention.out_projection", y.flatten(2)))
        x = norm(f"{at}.norm2", x + linear(f"{at}.linear2", linear(f"{at}.linear1", x).relu()))
    return norm("norm", x)


def exponential(q, k):
    return (q @ k.mT / q.shape[-1] ** 0.5).exp()


def elu(q, k):
    return (functional.elu(q) + 1) @ (functional.elu(k) + 1).mT


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize(
    ("attention_type", "weights", "causal"),
    [
        ("full", exponential, False),
        ("full", lambda q, k: exponential(q, k).tril(), True),
        ("linear", elu, False),
        ("causal-linear", lambda q, k: elu(q, k).tril(), True),
    ],
)
def test_a_state_dict_with_their_names_gives_the_textbook(attention_type, weights, causal, lengths):
    model, x = encoder(attention_type=attention_type), draw(2, 11, 15)
    mask = TriangularCausalMask(11) if causal else None
    y = model(x, mask, None if lengths is None else LengthMask(lengths, 11))
    expected = textbook(model, x, weights, lengths)
    real = slice(None) if lengths is None else torch.arange(11) < lengths[:, None]
    assert_close(y[real], expected[real], rtol=1e-5, atol=1e-6)  # their eps of 1e-6 beside the weights
    names = set(model.state_dict())
    assert {n for n in names if n.startswith("layers.1.")} == {
        n.replace(".0.", ".1.") for n in names if ".0." in n
    }
    assert {
        "layers.0.attention.query_projection.weight",
        "layers.0.attention.key_projection.bias",
        "layers.0.attention.value_projection.weight",
        "layers.0.attention.out_projection.weight",
        "layers.0.linear1.weight",
        "layers.0.linear2.bias",
        "layers.0.norm1.weight",
        "layers.0.norm2.bias",
        "norm.weight",
    } <= names
    assert len(names) == 2 * 16 + 2


@pytest.mark.parametrize("attention_type", CAUSAL)
def test_causal_types_are_blind_to_the_future(attention_type):
    """The gradient is tested, since the selections of two of these types look ahead."""
    model, x = encoder(attention_type=attention_type), draw(2, 11, 15).requires_grad_()
    y = model(x, TriangularCausalMask(11))
    for t in (0, 4, 9):
        (g,) = torch.autograd.grad(y[:, t, 0].sum(), x, retain_graph=True)
        assert (g[:, t + 1 :] == 0).all()
        assert (g[:, t] != 0).any()


@pytest.mark.parametrize("attention_type", sorted({*CAUSAL, *BIDIRECTIONAL}))
def test_padding_changes_nothing(attention_type):
    model, x = encoder(attention_type=attention_type), draw(2, 11, 15)
    mask = TriangularCausalMask(11) if attention_type not in BIDIRECTIONAL else None
    clean = model(x, mask, LengthMask(LENGTHS, 11))
    real = torch.arange(11) < LENGTHS[:, None]
    dirty = model(x.masked_fill(~real[..., None], 1e4), mask, LengthMask(LENGTHS, 11))
    assert_close(dirty[real], clean[real], **EXACT)
    shorter = None if mask is None else TriangularCausalMask(6)
    assert_close(model(x[1:, :6], shorter), clean[1:, :6], **EXACT)


@pytest.mark.parametrize("attention_type", ["full", "linear"])
@pytest.mark.parametrize("name", MAPS)
def test_parallel_is_recurrent(attention_type, name):
    """As an RNN with the same weights under the same names."""
    options = {} if attention_type == "full" else {"feature_map": MAPS[name]}
    model = encoder(attention_type={"linear": "causal-linear"}.get(attention_type, "full"), **options)
    rnn = encoder(RecurrentEncoderBuilder, attention_type, **options)
    rnn.load_state_dict(model.state_dict())
    x, state, ys = draw(2, 11, 15), None, []
    for t in range(11):
        y, state = rnn(x[:, t], state)
        ys.append(y)
    assert_close(torch.stack(ys, 1), model(x, TriangularCausalMask(11)), **EXACT)


@pytest.mark.parametrize("attention_type", ["full", "linear"])
def test_a_decoder_is_its_recurrent_twin(attention_type):
    options = SMALL | {"cross_attention_type": attention_type}
    torch.manual_seed(1)
    own = {"linear": "causal-linear"}.get(attention_type, "full")
    model = TransformerDecoderBuilder.from_kwargs(self_attention_type=own, **options).get().double().eval()
    rnn = (
        RecurrentDecoderBuilder.from_kwargs(self_attention_type=attention_type, **options)
        .get()
        .double()
        .eval()
    )
    rnn.load_state_dict(model.state_dict())
    x, memory, lengths = draw(2, 7, 15), draw(2, 11, 15, seed=1), LengthMask(LENGTHS, 11)
    whole = model(x, memory, x_mask=TriangularCausalMask(7), memory_length_mask=lengths)
    state, ys = None, []
    for t in range(7):
        y, state = rnn(x[:, t], memory if t == 0 else torch.full_like(memory, torch.nan), lengths, state)
        ys.append(y)
    assert_close(torch.stack(ys, 1), whole, **EXACT)


@pytest.mark.slow
def test_the_snippet_of_the_authors():
    model = TransformerEncoderBuilder.from_kwargs(
        n_layers=12,
        n_heads=12,
        query_dimensions=64,
        value_dimensions=64,
        feed_forward_dimensions=3072,
        attention_type="linear",
    ).get()
    with torch.no_grad():
        y = model(torch.rand(10, 4000, 768))
    assert y.shape == (10, 4000, 768)
    assert y.isfinite().all()


@pytest.mark.parametrize("attention_type", [x for x in AttentionRegistry.keys if x != "conditional-full"])
def test_every_type_builds_runs_and_has_gradients(attention_type):
    model, x = encoder(attention_type=attention_type), draw(2, 11, 15).requires_grad_()
    causal = attention_type not in BIDIRECTIONAL
    y = model(x, TriangularCausalMask(11) if causal else None, LengthMask(LENGTHS, 11))
    for g in gradients(y, [x, *model.parameters()]):
        assert g.isfinite().all()


@pytest.mark.parametrize("attention_type", ["linear", "clustered", "improved-clustered"])
def test_a_causal_mask_is_refused_where_there_is_no_causal_form(attention_type):
    with pytest.raises(NotImplementedError, match="no causal form"):
        encoder(attention_type=attention_type)(draw(2, 11, 15), TriangularCausalMask(11))


@pytest.mark.parametrize("attention_type", ["causal-linear", "improved-causal"])
def test_a_causal_type_needs_a_causal_mask(attention_type):
    with pytest.raises(NotImplementedError, match="needs a TriangularCausalMask"):
        encoder(attention_type=attention_type)(draw(2, 11, 15))


def test_arbitrary_masks():
    allowed = torch.rand(11, 11, generator=torch.Generator().manual_seed(0)) > 0.4
    allowed.fill_diagonal_(True)
    x = draw(2, 11, 15)
    model = encoder()
    expected = textbook(model, x, lambda q, k: exponential(q, k) * allowed, LENGTHS)
    real = torch.arange(11) < LENGTHS[:, None]
    y = model(x, FullMask(allowed), LengthMask(LENGTHS, 11))
    assert_close(y[real], expected[real], **EXACT)
    for attention_type in ("linear", "causal-linear", "clustered"):
        with pytest.raises(NotImplementedError, match="arbitrary attn_mask"):
            encoder(attention_type=attention_type)(x, FullMask(allowed))


@pytest.mark.parametrize("masked", [False, True])
def test_reformer_sees_itself_unless_that_is_masked(masked):
    """One chunk holds all tokens: a softmax over all keys, or over all but a token's own."""
    q, v = draw(1, 5, 2, 4), draw(1, 5, 2, 3, seed=1)
    attention = ReformerAttention(chunk_size=8, masked=masked, softmax_temp=0.5, attention_dropout=0.0)
    everybody = LengthMask(torch.tensor([5]))
    y = attention(q, q, v, FullMask(5), everybody, everybody)
    scores = 0.5 * torch.einsum("bthd,bshd->bhts", q, q / q.norm(dim=-1, keepdim=True))
    if masked:
        scores.diagonal(dim1=2, dim2=3).fill_(-torch.inf)
    assert_close(y, torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v), **EXACT)


def test_exact_topk_keeps_the_largest():
    def weights(q, k):
        scores = exponential(q, k)
        return scores * (scores >= scores.topk(3, -1).values[:, -1:])

    model, x = encoder(attention_type="exact-topk"), draw(2, 11, 15)
    assert_close(model(x), textbook(model, x, weights), **EXACT)


def exact_topk(temperature):
    inner = AttentionBuilder.from_kwargs(topk=3, softmax_temp=temperature, attention_dropout=0.0)
    return inner.get("exact-topk")


def test_exact_topk_chooses_before_it_scales():
    """Below 0, the temperature still chooses the largest scores, and the smallest of these weighs most."""
    q, k, v = draw(3, 2, 11, 3, 4)
    best = torch.einsum("nlhe,nshe->nhls", q, k).topk(3, -1)
    weights = torch.zeros(2, 3, 11, 11, dtype=q.dtype).scatter(
        -1, best.indices, (-0.5 * best.values).softmax(-1)
    )
    assert_close(exact_topk(-0.5).double()(q, k, v), torch.einsum("nhls,nshe->nlhe", weights, v), **EXACT)


def test_exact_topk_makes_scores_of_16_bits_in_float32():
    """Rounded to 16 bits, scores in the hundreds would be off by more than the tolerance of the weights."""
    q, k, v = (x.bfloat16() for x in (8 * draw(3, 2, 11, 3, 64)).unbind(0))
    inner = exact_topk(None)
    right = inner(q.float(), k.float(), v.float())
    assert_close(inner(q, k, v).float(), right, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("context", [1, 4, 5, 40])
def test_local_is_a_band(context):
    distance = torch.arange(11)[:, None] - torch.arange(11)
    band = (distance <= context // 2) & (-distance < (context + 1) // 2)
    model, x = encoder(attention_type="local", local_context=context), draw(2, 11, 15)
    assert_close(model(x), textbook(model, x, lambda q, k: exponential(q, k) * band), **EXACT)
    causal = model(x, TriangularCausalMask(11))
    assert_close(causal, textbook(model, x, lambda q, k: (exponential(q, k) * band).tril()), **EXACT)


def test_conditional_full_chooses_by_length():
    builder = AttentionBuilder.from_kwargs(length_limit=8, clusters=2, attention_dropout=0.0)
    inner = builder.get("conditional-full:clustered").double()
    assert isinstance(inner, ConditionalFullAttention)
    q, k, v = draw(3, 2, 11, 3, 4)
    full = AttentionBuilder.from_kwargs(attention_dropout=0.0).get("full").double()
    short = [x[:, :8] for x in (q, k, v)]
    assert_close(inner(*short), full(*short), **EXACT)
    assert not torch.allclose(inner(q, k, v), full(q, k, v))
    assert_close(inner(q, k, v), inner.other_attention(q, k, v), **EXACT)


@pytest.mark.parametrize("name", MAPS)
def test_random_maps_are_saved_and_stay(name):
    model = encoder(attention_type="linear", feature_map=MAPS[name])
    other = encoder(attention_type="linear", feature_map=MAPS[name])
    for layer in other.layers:
        layer.attention.inner_attention.feature_map.new_feature_map("cpu")
    x = draw(2, 11, 15)
    before = torch.get_rng_state()
    y = model(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model(x), y)
    if name in ("favor", "generalized", "smoothed", "fourier"):
        assert not torch.allclose(other(x), y)
        assert "layers.1.attention.inner_attention.feature_map.omega" in model.state_dict()
    other.load_state_dict(model.state_dict())
    assert_close(other(x), y, **EXACT)


@pytest.mark.parametrize(
    ("feature_map", "kernel"),
    [
        (lambda: Favor(4, 8_000), lambda x, y: (x @ y / 2).exp()),
        (lambda: Favor(4, 8_000, orthogonal=False), lambda x, y: (x @ y / 2).exp()),
        (lambda: RandomFourierFeatures(4, 8_000), lambda x, y: (-(x - y).square().sum() / 4).exp()),
        (
            lambda: SmoothedRandomFourierFeatures(4, 8_001, smoothing=0.5),
            lambda x, y: (-(x - y).square().sum() / 4).exp() + 0.25,
        ),
    ],
)
def test_random_maps_estimate_their_kernel(feature_map, kernel):
    torch.manual_seed(0)
    phi = feature_map().double()
    x, y = draw(2, 4) / 2
    # 4,000 rows: the standard error is below 2 %.
    assert_close(phi.forward_queries(x) @ phi.forward_keys(y), kernel(x, y), rtol=0.06, atol=0)


def test_stabilized_favor():
    """The maximum cancels; where it would look ahead, it is refused."""
    x = draw(2, 11, 15)
    plain = encoder(attention_type="linear", feature_map=Favor.factory(n_dims=8))
    stable = encoder(attention_type="linear", feature_map=Favor.factory(n_dims=8, stabilize=True))
    stable.load_state_dict(plain.state_dict())
    assert_close(stable(x), plain(x), rtol=1e-4, atol=1e-5)  # eps is not rescaled
    with pytest.raises(ValueError, match="a causal model must not"):
        encoder(attention_type="causal-linear", feature_map=Favor.factory(stabilize=True))


def test_masks():
    full = FullMask(3, 5)
    assert full.shape == (3, 5)
    assert full.all_ones
    assert not FullMask(torch.tensor([[True, False]])).all_ones
    assert FullMask(N=4).bool_matrix.all()
    lengths = LengthMask(torch.tensor([3, 1]), max_len=4)
    assert lengths.bool_matrix.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert lengths.additive_matrix[1].tolist() == [0, -torch.inf, -torch.inf, -torch.inf]
    assert lengths.additive_matrix_finite.min() == -1e24
    assert FullMask(lengths.bool_matrix).lengths.tolist() == [3, 1]
    with pytest.raises(ValueError, match="no lengths"):
        _ = FullMask(torch.tensor([[False, True]])).lengths
    assert TriangularCausalMask(3).lower_triangular
    assert FullMask(TriangularCausalMask(3).bool_matrix).lower_triangular
    assert not full.lower_triangular
    assert not FullMask(3).lower_triangular
    with pytest.raises(ValueError, match="must be boolean"):
        FullMask(torch.ones(2, 2))
    with pytest.raises(ValueError, match="needs a mask or its size"):
        FullMask()


CLUSTERED = ("clusters", "iterations", "bits", "hash_bias")
SOFTMAX = ("softmax_temp", "attention_dropout", "event_dispatcher")
RANDOM = ("query_dimensions", "n_dims", "softmax_temp", "orthogonal")
REDRAWN = ("redraw", "deterministic_eval")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (AttentionRegistry["full"][0], SOFTMAX),
        (AttentionRegistry["linear"][0], ("query_dimensions", "feature_map", "eps", "event_dispatcher")),
        (AttentionRegistry["clustered"][0], (*CLUSTERED, *SOFTMAX)),
        (AttentionRegistry["improved-clustered"][0], (*CLUSTERED, "topk", *SOFTMAX)),
        (AttentionRegistry["improved-causal"][0], (*CLUSTERED, "topk", *SOFTMAX)),
        (AttentionRegistry["reformer"][0], ("chunk_size", "bits", "rounds", "masked", *SOFTMAX)),
        (AttentionRegistry["local"][0], ("local_context", *SOFTMAX)),
        (AttentionRegistry["exact-topk"][0], ("topk", *SOFTMAX)),
        (AttentionRegistry["conditional-full"][0], ("other_attention", "length_limit", *SOFTMAX)),
        (RandomFourierFeatures, (*RANDOM, *REDRAWN)),
        (SmoothedRandomFourierFeatures, (*RANDOM, "smoothing", *REDRAWN)),
        (Favor, (*RANDOM, "stabilize", *REDRAWN)),
        (GeneralizedRandomFeatures, (*RANDOM, "kernel_fn", *REDRAWN)),
    ],
)
def test_arguments_stand_in_their_order(kind, names):
    assert tuple(inspect.signature(kind).parameters) == names

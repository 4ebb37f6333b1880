"""Inner attentions: what they have in common, and what each does with a mask."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra.attention import aft
from lintra.compat.fast_transformers.attention import (
    AFTFullAttention,
    AFTSimpleAttention,
    AttentionLayer,
    CausalLinearAttention,
    ConditionalFullAttention,
    FullAttention,
    LinearAttention,
    LocalAttention,
    ReformerAttention,
)
from lintra.compat.fast_transformers.attention.causal_linear_attention import causal_linear
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry
from lintra.compat.fast_transformers.builders import AttentionBuilder, TransformerEncoderBuilder
from lintra.compat.fast_transformers.events import AttentionEvent, EventDispatcher
from lintra.compat.fast_transformers.feature_maps.base import FeatureMap
from lintra.compat.fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask
from lintra.testing.laws import EXACT, gradients
from tests.compat.inputs import draw

TYPES = [x for x in AttentionRegistry.keys if x != "conditional-full"]
ANY_MASK = ["full", "exact-topk", "local", "reformer", "aft-full"]
CAUSAL_ONLY = ["causal-linear", "improved-causal", "causal-improved-clustered"]
SIZES = {"query_dimensions": 4, "clusters": 3, "topk": 3, "local_context": 4, "chunk_size": 4}


def inner(attention_type, **options):
    torch.manual_seed(0)
    options = SIZES | {"attention_dropout": 0.0} | options
    return AttentionBuilder.from_kwargs(**options).get(attention_type).double()


def inputs(queries=11, keys=11):
    return draw(2, queries, 3, 4), draw(2, keys, 3, 4, seed=1), draw(2, keys, 3, 4, seed=2)


def some_pairs(queries=11, keys=11):
    """A mask without a pattern, in which one query sees nothing."""
    visible = torch.rand(queries, keys, generator=torch.Generator().manual_seed(3)) > 0.4
    visible[queries // 2] = False
    return visible


def softmax(q, k, v, visible):
    """The definition; a query that sees nothing gets 0, and its row never enters the softmax as NaN."""
    scores = torch.einsum("nlhe,nshe->nhls", q, k) / q.shape[3] ** 0.5
    blind = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(~(visible | blind), -torch.inf).softmax(-1).masked_fill(blind, 0.0)
    return torch.einsum("nhls,nshd->nlhd", weights, v)


def near(queries, keys, context):
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    return (distance <= context // 2) & (-distance < (context + 1) // 2)


@pytest.mark.parametrize("attention_type", TYPES)
def test_outputs_are_contiguous(attention_type):
    mask = TriangularCausalMask(11) if attention_type in CAUSAL_ONLY else FullMask(11)
    for lengths in (LengthMask(torch.tensor([11, 11])), LengthMask(torch.tensor([11, 6]))):
        assert inner(attention_type)(*inputs(), mask, lengths, lengths).is_contiguous()


@pytest.mark.parametrize("attention_type", ANY_MASK)
def test_what_an_arbitrary_mask_hides_has_no_gradient(attention_type):
    """Reformer takes its keys from the queries; gradients of the values work for all types."""
    q, k, v = (x.requires_grad_() for x in inputs())
    visible = some_pairs()
    y = inner(attention_type)(q, k, v, FullMask(visible))
    assert (y[:, 5] == 0).all()
    for i in range(11):
        (g,) = torch.autograd.grad(y[:, i].sum(), v, retain_graph=True)
        assert (g[:, ~visible[i]] == 0).all()
    assert all(
        g.isfinite().all() for g in gradients(y, [q, k, v][: 3 if attention_type != "reformer" else 1])
    )


@pytest.mark.parametrize("attention_type", ANY_MASK)
def test_a_mask_that_is_triangular_is_causal(attention_type):
    attention, tokens = inner(attention_type), inputs()
    lengths = LengthMask(torch.tensor([11, 7]))
    expected = attention(*tokens, TriangularCausalMask(11), lengths, lengths)
    nearly = torch.ones(12, 12, dtype=torch.bool).tril()[:, 1:]  # one query more, which sees nothing
    q = functional.pad(tokens[0], (0, 0, 0, 0, 1, 0))
    if attention_type in ("full", "exact-topk"):
        y = attention(q, *tokens[1:], FullMask(nearly), None, lengths)[:, 1:]
        assert_close(y[0], expected[0], **EXACT)
        assert_close(y[1, :7], expected[1, :7], **EXACT)
    y = attention(*tokens, FullMask(torch.ones(11, 11, dtype=torch.bool).tril()), lengths, lengths)
    assert_close(y, expected, **EXACT)


@pytest.mark.parametrize("context", [1, 4, 5, 40])
@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (5, 8), (8, 5), (70, 41), (1, 3)])
def test_local_with_any_mask_and_any_lengths_is_softmax_in_a_band(context, queries, keys):
    q, k, v = (x.requires_grad_() for x in inputs(queries, keys))
    attention = inner("local", local_context=context)
    real = torch.arange(keys) < torch.tensor([keys, keys // 2 + 1])[:, None]
    for visible in (None, some_pairs(queries, keys)):
        pairs = near(queries, keys, context) & real[:, None, None]
        pairs = pairs if visible is None else pairs & visible
        y = attention(q, k, v, None if visible is None else FullMask(visible), None, FullMask(real))
        expected = softmax(q, k, v, pairs)
        assert_close(y, expected, **EXACT)
        assert_close(gradients(y, [q, k, v]), gradients(expected, [q, k, v]), **EXACT)


def test_reformer_with_any_mask_is_softmax_where_one_chunk_holds_all():
    q, _, v = inputs()
    visible = some_pairs() | torch.eye(11, dtype=torch.bool)
    attention = inner("reformer", chunk_size=16, softmax_temp=0.5)
    u = q / q.norm(dim=-1, keepdim=True)
    assert_close(attention(q, q, v, FullMask(visible)), softmax(q, u, v, visible), **EXACT)


def test_a_mask_may_differ_by_sample_where_scores_are_made():
    q, k, v = inputs()
    visible = torch.stack((some_pairs(), torch.ones(11, 11, dtype=torch.bool)))[:, None]
    assert_close(inner("full")(q, k, v, FullMask(visible)), softmax(q, k, v, visible), **EXACT)
    for attention_type in ("local", "reformer"):
        with pytest.raises(ValueError, match="attn_mask must be one for each of 11 queries and 11 keys"):
            inner(attention_type)(q, k, v, FullMask(visible))


@pytest.mark.parametrize("attention_type", ANY_MASK)
def test_a_mask_of_another_size_is_refused(attention_type):
    with pytest.raises(ValueError, match="attn_mask must be one for each of 11 queries and 11 keys"):
        inner(attention_type)(*inputs(), FullMask(some_pairs(9, 11)))


@pytest.mark.parametrize("keys", [5, 17])
def test_causal_linear_takes_other_keys_than_queries(keys):
    """Keys after the last query are not seen; queries after the last key see all keys."""
    q, k, v = inputs(11, keys)
    attention, lengths = (
        inner("causal-linear"),
        FullMask(torch.tensor([[True] * keys, [True] * 4 + [False] * (keys - 4)])),
    )
    y = attention(q, k, v, TriangularCausalMask(11), None, lengths)
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    weights = torch.einsum("nlhe,nshe->nhls", q, k).tril() * lengths.bool_matrix[:, None, None]
    expected = torch.einsum("nhls,nshd->nlhd", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    assert_close(y, expected, **EXACT)


def test_causal_linear_is_a_sum_without_a_denominator():
    q, k, v = inputs()
    y = causal_linear(q, k, v[..., :3])
    weights = torch.einsum("nlhe,nshe->nhls", q, k).tril()
    assert_close(y, torch.einsum("nhls,nshd->nlhd", weights, v[..., :3]), **EXACT)
    assert y.is_contiguous()


def test_errors_are_those_of_the_library():
    """The types are those that programs catch; the messages are those of lintra."""
    mask = FullMask(some_pairs())
    with pytest.raises(RuntimeError, match="arbitrary attn_mask"):
        inner("linear")(*inputs(), mask)
    with pytest.raises(RuntimeError, match="arbitrary attn_mask"):
        inner("causal-linear")(*inputs(), mask)
    with pytest.raises(ValueError, match="aft-full"):
        inner("aft-simple")(*inputs(), mask)
    q, k, v = inputs()
    for attention_type in ("aft-full", "aft-simple"):
        with pytest.raises(ValueError, match=r"got 4 and 3 numbers a head|must be dim=4, got 3"):
            inner(attention_type)(q, k, v[..., :3])
    with pytest.raises(ValueError, match="max_sequence_length=10 tokens, got 11 queries and 11 keys"):
        inner("aft-full", max_sequence_length=10)(q, k, v)


@pytest.mark.parametrize("keys", [8, 11])
def test_aft_full_multiplies_keys_by_learned_weights_of_pairs(keys):
    """By its definition, as the library computes it; a hidden key stays hidden whatever its sign."""
    attention = inner("aft-full", max_sequence_length=12, aft_parameterization=5)
    attention.u.data, attention.v.data = draw(12, 5, seed=4), draw(12, 5, seed=5)
    assert list(attention.state_dict()) == ["u", "v"]
    q, k, v = inputs(11, keys)
    visible = torch.rand(11, keys, generator=torch.Generator().manual_seed(3)) > 0.4
    visible[:, 0] = True
    for mask in (None, visible):
        y = attention(q, k, v, None if mask is None else FullMask(mask))
        for i in range(11):
            seen = torch.ones(keys, dtype=torch.bool) if mask is None else mask[i]
            weights = (k * (attention.v[:keys] @ attention.u[i])[:, None, None])[:, seen].softmax(1)
            assert_close(y[:, i], q[:, i].sigmoid() * (weights * v[:, seen]).sum(1), **EXACT)


@pytest.mark.parametrize("causal", [False, True])
def test_aft_simple_is_lintras(causal):
    q, k, v = inputs()
    lengths = LengthMask(torch.tensor([11, 7]))
    y = inner("aft-simple")(q, k, v, TriangularCausalMask(11) if causal else None, lengths, lengths)
    mechanism = aft.Config().build(causal=causal, heads=3, dim=4).double()
    assert_close(y, mechanism(q, k, v, mask=lengths.bool_matrix), **EXACT)
    if not causal:  # it also reads keys of another length
        other = inner("aft-simple")(q[:, :3], k, v, None, None, lengths)
        assert_close(other, y[:, :3], **EXACT)


@pytest.mark.parametrize("attention_type", ["full", "causal-linear", "aft-simple", "local"])
def test_a_real_query_may_stand_beside_a_padded_key(attention_type):
    """The lengths of keys hide keys only; queries at these places see the keys before them."""
    attention, (q, k, v) = inner(attention_type, local_context=20), inputs()
    lengths = LengthMask(torch.tensor([11, 7]))
    y = attention(q, k, v, TriangularCausalMask(11), None, lengths)
    both = attention(q, k, v, TriangularCausalMask(11), lengths, lengths)
    assert_close(y[:, :7], both[:, :7], **EXACT)
    assert_close(y[0], both[0], **EXACT)
    assert (both[1, 7:] == 0).all()
    k, v = k[1:, :7], v[1:, :7]
    if attention_type == "aft-simple":
        expected = q[1, 10].sigmoid() * (k[0].softmax(0) * v[0]).sum(0)
    elif attention_type == "causal-linear":
        expected = inner("linear")(q[1:, 10:], k, v)[0, 0]
    else:
        expected = softmax(q[1:, 10:], k, v, torch.ones(1, 7, dtype=torch.bool))[0, 0]
    assert_close(y[1, 10], expected, **EXACT)


@pytest.mark.parametrize("attention_type", TYPES)
def test_lengths_of_one_row_are_those_of_every_sequence(attention_type):
    attention, tokens = inner(attention_type), inputs()
    mask = TriangularCausalMask(11) if attention_type in CAUSAL_ONLY else FullMask(11)
    one, all_of_them = (LengthMask(torch.tensor(x), max_len=11) for x in ([7], [7, 7]))
    expected = attention(*tokens, mask, all_of_them, all_of_them)
    assert torch.equal(attention(*tokens, mask, one, one), expected)
    with pytest.raises(ValueError, match=r"lengths of \[3, 11\] do not fit 2 sequences of 11"):
        attention(*tokens, mask, None, LengthMask(torch.tensor([7, 7, 7]), max_len=11))


class Counted(FeatureMap):
    """A custom map, drawn anew for each sequence."""

    def __init__(self, query_dims):
        super().__init__(query_dims)
        self.devices = []

    def new_feature_map(self, device):
        self.devices.append(device)

    def forward_queries(self, x):
        return x.exp()

    def forward_keys(self, x):
        return x.square()


@pytest.mark.parametrize("kind", [LinearAttention, CausalLinearAttention])
def test_a_map_of_ones_own_draws_at_each_forward(kind):
    attention = kind(4, feature_map=Counted)
    mask = TriangularCausalMask(11) if kind is CausalLinearAttention else FullMask(11)
    q, k, v = inputs()
    for _ in range(3):
        y = attention(q, k, v, mask)
    assert attention.feature_map.devices == [q.device] * 3
    weights = torch.einsum("nlhe,nshe->nhls", q.exp(), k.square()) * mask.bool_matrix
    expected = torch.einsum("nhls,nshd->nlhd", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    assert_close(y, expected, **EXACT)


# The types that call a mechanism of lintra.
BUILT = ["reformer", "clustered", "improved-clustered", "causal-improved-clustered", "aft-simple"]


@pytest.mark.parametrize("attention_type", BUILT)
def test_a_pickle_is_that_of_a_module_that_has_not_run(attention_type):
    """What is built for the shapes and device of a call is not pickled; the original modules never had it."""
    attention, mask = inner(attention_type), TriangularCausalMask(11)
    mask = mask if attention_type in CAUSAL_ONLY else FullMask(11)
    before = pickle.dumps(attention)
    y = attention(*inputs(), mask)
    assert pickle.dumps(attention) == before
    foreign = type(attention).__new__(type(attention))
    foreign.__setstate__({name: x for name, x in vars(attention).items() if name != "_mechanisms"})
    for other in (pickle.loads(before), copy.deepcopy(attention), foreign):
        assert torch.equal(other(*inputs(), mask), y)


def test_a_temperature_that_falls_leaves_no_mechanism_for_each_step():
    attention = inner("reformer")
    before = attention(*inputs())
    for step in range(1, 40):
        attention.softmax_temp = 1 / step
        attention(*inputs())
    assert len(attention._mechanisms) <= 8
    attention.softmax_temp = None
    assert torch.equal(attention(*inputs()), before)


@pytest.mark.parametrize("attention_type", [x for x in TYPES if hasattr(inner(x), "dropout")])
def test_weights_are_dropped_where_the_module_of_dropout_says_so(attention_type):
    """It may be switched separately, as in programs that sample at evaluation."""
    attention = inner(attention_type, attention_dropout=0.5)
    mask = TriangularCausalMask(11) if attention_type in CAUSAL_ONLY else FullMask(11)
    whole = attention.eval()(*inputs(), mask)
    attention.train().dropout.eval()
    assert torch.equal(attention(*inputs(), mask), whole)
    attention.eval().dropout.train()
    assert not torch.allclose(attention(*inputs(), mask), whole)


def test_attributes_that_programs_read_and_change():
    full = FullAttention(softmax_temp=0.5, attention_dropout=0.2)
    assert (full.softmax_temp, full.dropout.p) == (0.5, 0.2)
    q, k, v = inputs()
    full.eval()
    full.softmax_temp = 0.25  # the default for e = 4 is 0.5
    assert_close(full(q, k, v), softmax(q / 2, k, v, torch.ones(11, 11, dtype=torch.bool)), **EXACT)
    full.softmax_temp = None
    expected = softmax(q, k, v, torch.ones(11, 11, dtype=torch.bool))
    assert_close(full(q, k, v), expected, **EXACT)
    full.train()
    full.dropout.p = 0.0
    assert_close(full(q, k, v), expected, **EXACT)
    reformer = ReformerAttention(8, 16, 3, True)
    assert (reformer.chunk_size, reformer.bits, reformer.rounds, reformer.masked) == (8, 16, 3, True)
    clustered = inner("improved-clustered", clusters=7, bits=31)
    assert (clustered.clusters, clustered.bits, clustered.topk, clustered.hash_bias) == (7, 31, 3, True)
    assert LocalAttention(9).local_context == 9
    assert LinearAttention(4).eps == 1e-6
    conditional = ConditionalFullAttention(AFTSimpleAttention(), 5)
    assert conditional.length_limit == 5
    assert AFTFullAttention(9, 3).u.shape == (9, 3)


def test_a_hash_bias_tells_queries_of_one_direction_apart():
    """Without a bias they form a single cluster, whatever their lengths: one output for all."""
    q = draw(1, 1, 1, 4).expand(2, 8, 3, 4) * torch.tensor([0.01, 3.0]).repeat(4)[:, None, None]
    k, v = draw(2, 8, 3, 4, seed=1), draw(2, 8, 3, 4, seed=2)
    mask, lengths = FullMask(8), LengthMask(torch.full((2,), 8))
    for bias in (True, False):
        y = inner("clustered", clusters=2, hash_bias=bias)(q, k, v, mask, lengths, lengths)
        assert torch.equal(y[:, 0], y[:, 1]) != bias


def test_the_hash_bias_reaches_causal_clusters():
    q, k, v = inputs()
    mask, lengths = TriangularCausalMask(11), LengthMask(torch.full((2,), 11))
    found = [
        inner("causal-improved-clustered", topk=2, hash_bias=bias)(q, k, v, mask, lengths, lengths)
        for bias in (True, False)
    ]
    assert not torch.equal(*found)


@pytest.mark.parametrize("attention_type", ["improved-clustered", "causal-improved-clustered"])
def test_lengths_of_keys_do_not_choose_the_clusters_of_queries(attention_type):
    """Keys that no query would attend to may as well be padding."""
    q, k, v = draw(2, 16, 3, 4), draw(2, 16, 3, 4, seed=1), draw(2, 16, 3, 4, seed=2)
    q[..., 0] = q[..., 0].abs() + 1
    k[:, 6:, :, 0] = -1e4  # exp of such a score is 0 in float64
    attention = inner(attention_type, clusters=4)
    mask = TriangularCausalMask(16) if attention_type in CAUSAL_ONLY else FullMask(16)
    expected = attention(q, k, v, mask)
    assert_close(attention(q, k, v, mask, None, LengthMask(torch.tensor([6, 6]), 16)), expected, **EXACT)


@pytest.mark.parametrize("mask", [None, TriangularCausalMask(11), FullMask(some_pairs())])
def test_a_listener_gets_the_weights_that_make_the_output(mask):
    """Whether it reads them or not, the output is the same as without it; a row that sees nothing is 0."""
    q, k, v = inputs()
    heard, events = [], EventDispatcher()
    attention, silent = FullAttention(event_dispatcher=events).double(), FullAttention().eval()
    lengths = LengthMask(torch.tensor([11, 7]))
    events.listen(AttentionEvent, lambda event: None)
    assert_close(
        attention.eval()(q, k, v, mask, lengths, lengths), silent(q, k, v, mask, lengths, lengths), **EXACT
    )
    events.listen(AttentionEvent, lambda event: heard.append(event.attention_matrix))
    attention.train()  # with dropout
    y = attention(q, k, v, mask, None, lengths)
    assert len(heard) == 1
    assert_close(torch.einsum("nhls,nshd->nlhd", heard[0], v), y, **EXACT)
    assert (heard[0] == 0).any()
    assert_close(
        attention.eval()(q, k, v, mask, None, lengths), silent(q, k, v, mask, None, lengths), **EXACT
    )


def test_an_attention_layer_passes_on_what_it_is_given():
    """Its attention may be any function."""
    given = []

    def attention(queries, keys, values, attn_mask, query_lengths, key_lengths):
        given.extend((queries.shape, keys.shape, values.shape, attn_mask, query_lengths, key_lengths))
        return queries.new_zeros(*queries.shape[:3], values.shape[3])

    layer = AttentionLayer(attention, 20, 4, d_keys=6, d_values=7, d_model_keys=9)
    y = layer(torch.rand(3, 5, 20), torch.rand(3, 8, 9), torch.rand(3, 8, 9), None, None, "lengths")
    assert y.shape == (3, 5, 20)
    assert given == [(3, 5, 4, 6), (3, 8, 4, 6), (3, 8, 4, 7), None, None, "lengths"]


@pytest.mark.parametrize("attention_type", ["full", "linear", "causal-linear"])
def test_compiles_without_a_break(attention_type):
    """Default masks are known to be all True without reading their values."""
    options = {"n_layers": 2, "value_dimensions": 4, "query_dimensions": 4, "attention_type": attention_type}
    model = TransformerEncoderBuilder.from_kwargs(**options).get().eval()
    mask = TriangularCausalMask(7) if attention_type == "causal-linear" else None
    x = torch.rand(2, 7, 16)
    expected = model(x, mask)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(x, mask), expected)

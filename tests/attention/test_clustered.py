"""Clustered attention: its dense definition, its clusters, its limits, what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra import checkpoint
from lintra.attention import Attention, clustered
from lintra.attention.clustered import ClusteredAttention
from lintra.testing.laws import BATCH, EXACT, TIME, Case, gradients, some_masks

VARIANTS = [
    clustered.Config(clusters=4, topk=5),
    clustered.Config(clusters=4, topk=5, hash_bias=False),
    clustered.Config(clusters=3, bits=5, iterations=2, improved=False, seed=3),
    clustered.Config(clusters=TIME + 4, bits=9, topk=3, scale=0.3),
    clustered.Config(clusters=3, iterations=0, topk=200),
]


def config(improved: bool, clusters: int, topk: int) -> clustered.Config:
    return clustered.Config(clusters=clusters, improved=improved, **({"topk": topk} if improved else {}))


def build(config: clustered.Config, **shape) -> tuple[Case, Attention]:
    case = Case("clustered", config, False, **shape)
    return case, case.build()


def nearest(code: list[bool], centroids: list[list[bool]]) -> int:
    """The first of the centroids that differ in the fewest bits."""
    distances = [sum(a != b for a, b in zip(code, other, strict=True)) for other in centroids]
    return distances.index(min(distances))


def assignment(attention: ClusteredAttention, q: Tensor) -> list[list[int]]:
    """The cluster of each query of q [t h d], head by head: Lloyd's algorithm, bit by bit."""
    config, time, found = attention.config, q.shape[0], []
    clusters = min(config.clusters, time)
    for h in range(attention.heads):
        wide = torch.promote_types(q.dtype, torch.float32)
        side = q[:, h].detach().to(wide) @ attention.planes[h].to(wide).mT
        side = side if attention.bias is None else side + attention.bias[h].to(wide)
        codes = (side >= 0).tolist()
        centroids = []
        for c in range(clusters):
            start, end = c * time // clusters, (c + 1) * time // clusters
            centroids.append(codes[start + int(attention.draws[h, c]) % (end - start)])

        own = [nearest(code, centroids) for code in codes]
        for _ in range(config.iterations):
            for c in range(clusters):
                members = [code for code, other in zip(codes, own, strict=True) if other == c]
                if members:
                    centroids[c] = [2 * sum(bits) >= len(members) for bits in zip(*members, strict=True)]
            own = [nearest(code, centroids) for code in codes]
        found.append(own)
    return found


def dense(attention: ClusteredAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every weight of every query, from the mean of its cluster and its own scores."""
    config, group = attention.config, attention.heads // attention.kv_heads
    scale = q.shape[-1] ** -0.5 if config.scale is None else config.scale
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    ys = []
    for b in range(q.shape[0]):
        for h, own in enumerate(assignment(attention, q[b])):
            belongs = torch.tensor(own)[:, None] == torch.tensor(own)
            mean = (belongs.to(q.dtype) @ q[b, :, h]) / belongs.sum(1, keepdim=True)
            together = scale * mean @ k[b, :, h].mT
            weights = together.softmax(-1)
            if config.improved:
                # By score: weights too small for their type are all 0 and have no order.
                top = together.topk(min(config.topk, k.shape[1])).indices
                chosen = torch.zeros_like(weights, dtype=torch.bool).scatter(1, top, True)
                scores = (scale * q[b, :, h] @ k[b, :, h].mT).masked_fill(~chosen, -torch.inf)
                mass = (weights * chosen).sum(-1, keepdim=True)
                weights = torch.where(chosen, mass * scores.softmax(-1), weights)
            ys.append(weights @ v[b, :, h])
    return torch.stack(ys).unflatten(0, q.shape[::2][:2]).transpose(1, 2)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = q.shape[-1] ** -0.5 * torch.einsum("bthd,bshd->bhts", q, k)
    return torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v)


@pytest.mark.parametrize("clusters", [1, 3, 40])
@pytest.mark.parametrize("topk", [TIME, 3 * TIME])
def test_all_keys_looked_at_again_is_softmax(clusters, topk):
    """The clustering does not matter."""
    case, attention = build(clustered.Config(clusters=clusters, topk=topk))
    inputs = case.draw()
    y, expected = attention(*inputs), softmax(*inputs)
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@pytest.mark.parametrize("improved", [False, True])
def test_a_cluster_for_every_query_is_softmax(improved):
    case, attention = build(config(improved, clusters=TIME, topk=3))
    inputs = case.draw()
    y, expected = attention(*inputs), softmax(*inputs)
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@pytest.mark.parametrize("improved", [False, True])
def test_equal_queries_are_exact(improved):
    """The output of a cluster of equal queries is exact for each of them."""
    case, attention = build(config(improved, clusters=3, topk=2))
    q, k, v = case.draw()
    q = q[:, torch.arange(TIME) % 2]
    assert_close(attention(q, k, v), softmax(q, k, v), **EXACT)


def test_improved_is_never_further_from_softmax():
    """By the sum of absolute differences in each row of weights; with v = I the output is the weights."""
    rows = []
    for improved in (False, True):
        case, attention = build(config(improved, clusters=3, topk=4), kv_heads=4, value_dim=TIME)
        q, k, _ = (3 * x.detach() for x in case.draw())
        identity = torch.eye(TIME, dtype=q.dtype)[None, :, None].expand(BATCH, TIME, 4, TIME)
        rows.append(attention(q, k, identity))
        assert_close(rows[-1].sum(-1), torch.ones_like(rows[-1][..., 0]), **EXACT)
    plain, improved = ((x - softmax(q, k, identity)).abs().sum(-1) for x in rows)
    assert (improved <= plain + 1e-12).all()
    assert (improved < plain - 1e-3).any()


def test_the_order_of_keys_is_nothing():
    mixed = torch.randperm(TIME, generator=torch.Generator().manual_seed(4))
    for config in VARIANTS:
        case, attention = build(config)
        q, k, v = case.draw()
        assert_close(
            attention.cross_attend(q, attention.encode_memory(k[:, mixed], v[:, mixed])),
            attention(q, k, v),
            **EXACT,
        )


def test_constant_values_come_back():
    for config in VARIANTS:
        case, attention = build(config)
        q, k, v = case.draw()
        y = attention(q, k, torch.full_like(v, 3.0))
        assert_close(y, torch.full_like(y, 3.0), **EXACT)


def test_what_a_query_gets_depends_on_those_it_comes_with():
    """`can` declares it."""
    case, attention = build(clustered.Config(clusters=2, improved=False))
    q, k, v = case.draw()
    assert attention.can.joint_queries
    memory = attention.encode_memory(k, v)
    assert not torch.allclose(
        attention.cross_attend(q[:, :5], memory), attention.cross_attend(q, memory)[:, :5]
    )


@pytest.mark.parametrize(("queries", "keys"), [(1, TIME), (7, TIME), (TIME, 7), (TIME, 1)])
def test_queries_of_another_length_read_a_memory(queries, keys):
    for config in VARIANTS:
        case, attention = build(config)
        q, _, _ = case.draw(queries, seed=2)
        _, k, v = case.draw(keys)
        y, expected = attention.cross_attend(q, attention.encode_memory(k, v)), dense(attention, q, k, v)
        assert_close(y, expected, **EXACT)
        assert_close(gradients(y, [q, k, v]), gradients(expected, [q, k, v]), **EXACT)


def test_queries_and_keys_have_their_own_padding():
    for config in VARIANTS:
        case, attention = build(config)
        q, k, v = case.draw()
        asked, kept, _ = some_masks()
        y = attention.cross_attend(q, attention.encode_memory(k, v, kept), asked)
        for b in range(BATCH):
            memory = attention.encode_memory(*(x[b : b + 1, kept[b]] for x in (k, v)))
            assert_close(
                y[b : b + 1, asked[b]], attention.cross_attend(q[b : b + 1, asked[b]], memory), **EXACT
            )


def test_defect_23_selection_that_looks_ahead_is_refused():
    with pytest.raises(ValueError, match=r"no causal form: .* depends on later tokens, got causal=True"):
        clustered.Config().build(heads=2, dim=4, causal=True)


def test_defect_12_a_seed_leaves_the_global_generator_alone():
    case = Case("clustered", clustered.Config(seed=3), False)
    inputs = [x.detach().float() for x in case.draw()]
    torch.manual_seed(11)
    before = torch.get_rng_state()
    attention = case.config.build(causal=False, heads=4, kv_heads=2, dim=6, value_dim=4)
    attention.redraw(torch.Generator().manual_seed(1))
    attention(*inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_clusters_begin_elsewhere_in_each_head():
    draws = build(clustered.Config(clusters=5))[1].draws
    assert not torch.equal(draws[0], draws[1])


def test_an_empty_cluster_and_zero_vectors_do_no_harm():
    for config in VARIANTS:
        case, attention = build(config)
        _, k, v = case.draw()
        q = torch.zeros(BATCH, TIME, 4, 6, dtype=torch.float64, requires_grad=True)
        y = attention(q, k, v)
        assert_close(y, v.mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(y), **EXACT)
        for g in gradients(y, [q, k, v]):
            assert g.isfinite().all()


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_sizes_of_vectors_do_not_matter_to_planes_through_0(size):
    case, attention = build(VARIANTS[1])
    q, k, v = case.draw()
    assert_close(attention(q * size, k, v), dense(attention, q * size, k, v), **EXACT)
    assert assignment(attention, q[0] * size) == assignment(attention, q[0])


def test_a_bias_tells_queries_of_one_direction_apart():
    """Proposition 1 is about distances: queries of one direction but two lengths form two clusters, which are
    then exact. Planes through 0 see a single cluster and give all of these queries the mean of both."""
    for hash_bias in (True, False):
        config = clustered.Config(clusters=2, improved=False, hash_bias=hash_bias)
        case, attention = build(config)
        q, k, v = (x.detach() for x in case.draw())
        long = torch.where(torch.arange(TIME) < TIME // 2, 5.0, 0.5).to(q.dtype)[:, None, None]
        q = q[:, :1] / q[:, :1].norm(dim=-1, keepdim=True) * long
        y, expected = attention(q, k, v), softmax(q, k, v)
        if hash_bias:
            assert_close(y, expected, **EXACT)
        else:
            assert_close(y, y[:, :1].expand_as(y), **EXACT)
            assert (y - expected).abs().max() > 0.1


def test_a_configuration_of_before_the_bias_has_none():
    """The planes of its seed are unchanged too, so that its outputs in evaluation are what they were."""
    content = checkpoint.to_json(clustered.Config(clusters=4, seed=3))
    del content["hash_bias"]
    config = checkpoint.from_json(clustered.Config, content, "attention")
    assert not config.hash_bias
    old, new = (build(replace(config, hash_bias=given))[1] for given in (False, True))
    assert list(old.state_dict()) == ["planes", "draws"]
    assert all(torch.equal(x, new.state_dict()[name]) for name, x in old.state_dict().items())


def test_one_key_is_all_there_is():
    for config in VARIANTS:
        case, attention = build(config)
        q, k, v = case.draw()
        mask = torch.arange(TIME) == torch.tensor([[3], [TIME - 1]])
        y = attention.cross_attend(q, attention.encode_memory(k, v, mask))
        for b, place in enumerate((3, TIME - 1)):
            assert_close(y[b], v[b, place].repeat_interleave(2, 0).expand_as(y[b]), **EXACT)


def test_seeds_and_redrawing_change_the_clusters():
    case, attention = build(VARIANTS[0])
    inputs = case.draw()
    before = attention(*inputs)
    assert torch.equal(build(VARIANTS[0])[1](*inputs), before)
    assert not torch.allclose(build(replace(VARIANTS[0], seed=1))[1](*inputs), before)
    attention.redraw(torch.Generator().manual_seed(7))
    assert not torch.allclose(attention(*inputs), before)


def test_dropout_acts_in_training_only():
    for config in VARIANTS[:2]:
        case, attention = build(replace(config, dropout=0.5))
        inputs = case.draw()
        whole = build(config)[1](*inputs)
        assert not torch.allclose(attention(*inputs), whole)
        assert_close(attention.eval()(*inputs), whole, **EXACT)


def test_gradcheck():
    case, attention = build(clustered.Config(clusters=3, topk=3), heads=2, kv_heads=1, value_dim=2)
    inputs = [x[:1, :5].detach().requires_grad_() for x in case.draw()]
    assert torch.autograd.gradcheck(attention, inputs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clusters", 0),
        ("bits", 0),
        ("iterations", -1),
        ("topk", 0),
        ("scale", float("nan")),
        ("dropout", 1.0),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        clustered.Config(**{field: value})
    with pytest.raises(ValueError, match="topk needs improved=True, got 5 with improved=False"):
        clustered.Config(improved=False, topk=5)


def test_a_memory_of_another_kind_is_refused():
    case, attention = build(VARIANTS[0])
    q, k, v = case.draw()
    with pytest.raises(TypeError, match="memory must be a TokenMemory, from encode_memory, got tuple"):
        attention.cross_attend(q, (k, v))

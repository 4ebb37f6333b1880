"""Long-Short Transformer: its definition, its limits, what a query sees, its state, what it refuses."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import longshort, softmax
from lintra.attention.longshort import LongShortAttention
from lintra.nn import AttentionLayer
from lintra.ops.rope import RotaryEmbedding
from lintra.testing.laws import BATCH, DIM, EXACT, TIME, Case, Largest, gradients
from tests.attention.test_aft import same

VARIANTS = [
    longshort.Config(window=4, rank=3, segment=4),
    longshort.Config(window=5, rank=0, segment=3, segment_rank=2, dual_norm=False, scale=0.3),
    longshort.Config(window=0, rank=3),
]


def dense(
    attention: LongShortAttention, q: Tensor, k: Tensor, v: Tensor, rope: RotaryEmbedding | None = None
) -> Tensor:
    """The two equations: all tokens beside all summaries in one softmax, with hidden ones masked out."""
    config, time, project = attention.config, q.shape[1], attention.project
    near_k, near_v = norm(attention.key_norm, k), norm(attention.value_norm, v)
    rotated, near_k = (q, near_k) if rope is None else (rope(q), rope(near_k))
    size = config.segment if attention.causal else time
    far_k, far_v = [near_k[:, :0]], [near_v[:, :0]]
    for first in range(0, time - size + 1, size):
        some = slice(first, first + size)
        share = torch.einsum("bsgd,gdr->bsgr", k[:, some], project.weight).softmax(1)
        far_k.append(norm(project.key_norm, torch.einsum("bsgr,bsgd->brgd", share, k[:, some])))
        far_v.append(norm(project.value_norm, torch.einsum("bsgr,bsge->brge", share, v[:, some])))
    near = [[in_window(attention, i, j) for j in range(time)] for i in range(time)]
    far = [[not attention.causal or s < i // size for s in range(time // size)] for i in range(time)]
    near, far = torch.tensor(near), torch.tensor(far, dtype=torch.bool)
    hidden = ~torch.cat((near, far.repeat_interleave(attention.rank, 1)), 1)

    def scores(q: Tensor, k: Tensor) -> Tensor:
        scale = DIM**-0.5 if config.scale is None else config.scale
        return scale * torch.einsum("bthd,bshd->bhts", q, widen(attention, k))

    weights = torch.cat((scores(rotated, near_k), scores(q, torch.cat(far_k, 1))), -1)
    weights = weights.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshe->bthe", weights, widen(attention, torch.cat((near_v, *far_v), 1)))


def in_window(attention: LongShortAttention, i: int, j: int) -> bool:
    """Whether query i has token j in its window."""
    window = attention.config.window
    if attention.causal or not window:
        return 0 <= i - j < window
    start, side = i // window * window, math.ceil(window / 2)
    return start - side <= j < start + window + side


def norm(module: torch.nn.Module, x: Tensor) -> Tensor:
    """Layer normalisation written out, over the features of all heads [g f]."""
    if isinstance(module, torch.nn.Identity):
        return x
    centred = x - x.mean((-2, -1), keepdim=True)
    deviation = (centred.square().mean((-2, -1), keepdim=True) + 1e-5).sqrt()
    return centred / deviation * module.weight + module.bias


def widen(attention: LongShortAttention, x: Tensor) -> Tensor:
    return x.repeat_interleave(attention.heads // attention.kv_heads, 2)


def build(causal: bool, **options) -> LongShortAttention:
    return Case("longshort", longshort.Config(**options), causal).build()


def draw(time: int = TIME) -> list[Tensor]:
    return Case("longshort", VARIANTS[0], True).draw(time)


def shaken(attention: LongShortAttention) -> LongShortAttention:
    """With random norm parameters, different for each norm."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return attention


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [TIME, 10 * TIME])
def test_a_window_over_everything_without_summaries_is_softmax(causal, window):
    inputs = draw()
    attention = build(causal, window=window, rank=0, segment_rank=0, dual_norm=False)
    whole = Case("softmax", softmax.Config(), causal).build()
    same(attention(*inputs), whole(*inputs), inputs)
    if causal:
        _, state = attention.extend(*(x[:, :7] for x in inputs), attention.start(BATCH, dtype=torch.float64))
        rest, _ = attention.extend(*(x[:, 7:] for x in inputs), state)
        assert_close(rest, whole(*inputs)[:, 7:], **EXACT)


def test_without_summaries_it_is_a_window_over_normalised_tokens():
    q, k, v = draw()
    attention = shaken(build(True, window=5, segment_rank=0))
    window = Case("softmax", softmax.Config(window=5), True).build()
    expected = window(q, norm(attention.key_norm, k), norm(attention.value_norm, v))
    same(attention(q, k, v), expected, [q, k, v])
    assert attention.can.state == "window"
    assert "t^2" not in attention.can.cost


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
def test_equals_its_definition_with_norms_of_any_weights(causal, rotary):
    """Rotary positions: window keys are rotated, summaries are of unrotated keys for unrotated queries."""
    inputs = draw()
    attention = shaken(build(causal, window=6, rank=3, segment=3, segment_rank=2))
    rope = RotaryEmbedding(3 + torch.arange(TIME).repeat(BATCH, 1), 100.0) if rotary else None
    everything = [*inputs, *attention.parameters()]
    same(attention(*inputs, rope=rope), dense(attention, *inputs, rope=rope), everything)


@pytest.mark.parametrize("time", [1, 2, 511, 512, 513, 1100])
def test_equals_its_definition_at_the_edges_of_blocks(time):
    attention = build(True, window=40, segment=16, segment_rank=2)
    q, k, v = (x.detach()[:1] for x in draw(time))
    assert_close(attention(q, k, v), dense(attention, q, k, v), **EXACT)


@pytest.mark.parametrize("causal", [True, False])
def test_constant_values_come_back_without_norms(causal):
    """The weights of a query sum to 1, and so do those of a summary."""
    q, k, v = draw()
    attention = build(causal, window=4, rank=3, segment=4, segment_rank=2, dual_norm=False)
    y = attention(q, k, torch.full_like(v, 3.0))
    assert_close(y, torch.full_like(y, 3.0), **EXACT)
    with_norms = build(causal, window=4, rank=3, segment=4)
    assert not torch.allclose(with_norms(q, k, torch.full_like(v, 3.0)), y)


def test_summaries_of_everything_do_not_know_places():
    """Any order of keys and values gives the same result; with a window, or when causal, it does not."""
    q, k, v = draw()
    order = torch.randperm(TIME, generator=torch.Generator().manual_seed(2))
    long = build(False, window=0, rank=3)
    assert_close(long(q, k[:, order], v[:, order]), long(q, k, v), **EXACT)
    for other in (build(False, window=4, rank=3), build(True, window=4, segment=4)):
        assert not torch.allclose(other(q, k[:, order], v[:, order]), other(q, k, v))


def shares(attention: LongShortAttention, time: int) -> Tensor:
    """The weight of each token for each query [t s] where all keys are equal: weights of a kind are too."""
    q, k, _ = (torch.ones(1, time, heads, DIM, dtype=torch.float64) for heads in (4, 2, 2))
    columns = [torch.nn.functional.one_hot(torch.arange(time), time)[None, :, None].expand(-1, -1, 2, -1)]
    return attention(q, k, columns[0].double())[0, :, 0]


def uniform(time: int, **options) -> LongShortAttention:
    config = longshort.Config(dual_norm=False, **options)
    return config.build(heads=4, kv_heads=2, dim=DIM, value_dim=time, causal=True).double()


@pytest.mark.parametrize(("window", "segment", "rank"), [(4, 4, 1), (7, 3, 1), (5, 4, 2), (4, 1, 3)])
def test_a_summary_is_seen_from_the_end_of_its_segment_on(window, segment, rank):
    """The segment's last token does not see it; every token before the window is in a visible summary."""
    time = 3 * window * segment
    found = shares(uniform(time, window=window, segment=segment, segment_rank=rank), time)
    for i in range(time):
        finished = i // segment
        count = min(window, i + 1) + rank * finished
        expected = [(0 <= i - j < window) + rank / segment * (j < finished * segment) for j in range(time)]
        assert_close(found[i], torch.tensor(expected, dtype=torch.float64) / count, **EXACT)
        assert (found[i, : i + 1] > 0).all()


@pytest.mark.parametrize("window", [1, 2, 5, 6, 40])
def test_defect_19_a_window_is_what_the_configuration_says(window):
    """Causal: so many tokens, the query included. Else a segment and half of one, rounded up, per side."""
    for causal in (True, False):
        attention = build(causal, window=window, rank=0, segment_rank=0, dual_norm=False)
        q, k, v = draw()
        y = attention(q, k, v)
        for i in range(TIME):
            (g,) = torch.autograd.grad(y[0, i].sum(), v, retain_graph=True)
            expected = torch.tensor([in_window(attention, i, j) for j in range(TIME)])
            assert torch.equal(g[0].abs().sum((1, 2)) > 0, expected)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("causal", [True, False])
def test_defect_16_hidden_scores_are_not_merely_low(causal):
    """Every real key has a score of -1e6: padding, at 0 minus a large number, would win."""
    attention = build(causal, window=4, rank=2, segment=4, dual_norm=False)
    q, k, v = (x.detach() for x in draw())
    q, k = torch.full_like(q, 1e3), -1e3 - k
    mask = torch.arange(TIME).repeat(BATCH, 1) % 3 != 0
    y = attention(q, k, v, mask=mask)
    assert_close(y[0, mask[0]], attention(*(x[:1, mask[0]] for x in (q, k, v)))[0], **EXACT)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("causal", [True, False])
def test_defect_16_rows_that_see_nothing_have_no_gradient(causal):
    """A norm of zeros returns its bias, which must not leak; a NaN masked later would reach the gradient."""
    attention, inputs = shaken(build(causal, window=4, rank=2, segment=4)), draw()
    mask = torch.zeros(BATCH, TIME, dtype=torch.bool)
    mask[1, 7] = True
    y = attention(*inputs, mask=mask)
    found = gradients(y, [*inputs, *attention.parameters()])
    assert (y[~mask] == 0).all()
    assert all(g.isfinite().all() for g in found)
    assert all((g[~mask] == 0).all() for g in found[:3])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [4, 5, 6])
def test_defect_20_any_length_and_mask_with_several_summaries(causal, window, implementation):
    """Lengths that are no multiple of window or segment; another mask for each sample; all heads alike."""
    attention = shaken(build(causal, window=window, rank=3, segment=4, segment_rank=3))
    for time in range(1, 23):
        q, k, v = (x.detach() for x in draw(time))
        assert_close(attention(q, k, v), dense(attention, q, k, v), **EXACT)
        mask = torch.rand(BATCH, time, generator=torch.Generator().manual_seed(time)) > 0.4
        mask[:, -1] = True
        y = attention(q, k, v, mask=mask)
        for i in range(BATCH):
            alone = dense(attention, *(x[i : i + 1, mask[i]] for x in (q, k, v)))
            assert_close(y[i, mask[i]], alone[0], **EXACT)


def test_each_norm_has_its_own_part():
    """Window values are 0 and summaries 1: y is the share of the summaries, and 0 before the first one."""
    for causal in (True, False):
        attention = build(causal, window=4, rank=2, segment=4)
        with torch.no_grad():
            attention.value_norm.weight.fill_(0.0)
            attention.project.value_norm.weight.fill_(0.0)
            attention.project.value_norm.bias.fill_(1.0)
        y = attention(*draw())
        first = 4 if causal else 0
        assert (y[:, :first] == 0).all()
        assert (y[:, first:] > 0.01).all()
        assert (y[:, first:] < 0.99).all()


def test_the_edge_is_not_normalised():
    """Beyond the first and the last token nothing is seen, although a norm turns nothing into its bias."""
    attention = build(False, window=4, rank=0)
    with torch.no_grad():
        attention.value_norm.weight.fill_(0.0)
        attention.value_norm.bias.fill_(1.0)
    y = attention(*draw())
    assert_close(y, torch.ones_like(y), **EXACT)


def test_a_summary_is_a_mean_or_a_choice():
    """Equal keys give the plain mean; very different ones the values of one token."""
    _, k, v = draw()
    project = build(False, window=0, rank=3, dual_norm=False).project
    real = torch.ones(BATCH, TIME, dtype=torch.bool)
    _, mean = project(torch.ones_like(k), v, real)
    assert_close(mean, v.mean(1, keepdim=True).expand_as(mean), **EXACT)
    _, choice = project(1e6 * k, v, real)
    best = torch.einsum("bsgd,gdr->brgs", k, project.weight).argmax(-1)
    assert_close(choice, v.gather(1, best[..., None].expand(-1, -1, -1, v.shape[3])), **EXACT)


def test_the_state_is_the_window_the_summaries_and_the_open_means():
    attention = build(True, window=6, segment=4, segment_rank=2, dual_norm=False)
    q, k, v = draw()
    for time in range(TIME + 1):
        start = attention.start(BATCH, dtype=torch.float64)
        _, state = attention.extend(q[:, :time], k[:, :time], v[:, :time], start)
        assert min(time, 5) <= state.k.shape[1] <= min(time, 6 + 4 - 2)
        assert_close(state.k, k[:, time - state.k.shape[1] : time], **EXACT)
        assert state.summary_k.shape[1:3] == (time // 4, 2)
        assert (state.seen == time).all()
        part = slice(time // 4 * 4, time)
        if part.stop > part.start:
            logits = torch.einsum("bsgd,gdr->bgrs", k[:, part], attention.project.weight)
            assert_close(state.logsumexp, logits.logsumexp(-1), **EXACT)
            mean = torch.einsum("bgrs,bsgf->bgrf", logits.softmax(-1), torch.cat((k, v), -1)[:, part])
            assert_close(state.o, mean, **EXACT)
        else:
            assert (state.logsumexp == -torch.inf).all()


def test_samples_of_a_batch_may_be_at_different_places():
    """Prompts of different lengths and pieces with different masks: each sample as if it were alone."""
    attention = build(True, window=5, segment=3, segment_rank=2)
    q, k, v = (x.detach() for x in draw(40))
    mask = torch.rand(BATCH, 40, generator=torch.Generator().manual_seed(8)) > torch.tensor([[0.7], [0.2]])
    state, ys, first = attention.start(BATCH, dtype=torch.float64), [], 0
    for size in (1, 1, 9, 2, 14, 1, 1, 1, 10):
        part = slice(first, first + size)
        y, state = attention.extend(q[:, part], k[:, part], v[:, part], state, mask=mask[:, part])
        ys.append(y)
        first += size
    y = torch.cat(ys, 1)
    for i in range(BATCH):
        alone = dense(attention, *(x[i : i + 1, mask[i]] for x in (q, k, v)))
        assert_close(y[i, mask[i]], alone[0], **EXACT)
    assert torch.equal(state.seen, mask.sum(1))
    for i in range(BATCH):
        assert (state.summary_v[i, mask[i].sum() // 3 :] == 0).all()


def test_large_inputs_and_few_tokens():
    for causal in (True, False):
        attention = build(causal, window=4, rank=3, segment=4)
        inputs = [x.detach() * 1e4 for x in draw()]
        y = attention(*inputs)
        assert y.isfinite().all()
        one = [x[:, :1] for x in inputs]
        assert_close(attention(*one), dense(attention, *one), **EXACT)


def test_no_array_of_the_causal_form_has_all_summaries_for_all_queries():
    attention = longshort.Config(window=16).build(heads=1, dim=DIM, causal=True)
    q, k, v = (torch.randn(1, 8192, 1, DIM, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        attention(q, k, v).sum().backward()
    assert largest.numbers <= 8192**2 // 64


def test_dropout_acts_in_training_only():
    for causal in (True, False):
        inputs = draw()
        whole = build(causal, window=4, segment=4)(*inputs)
        attention = build(causal, window=4, segment=4, dropout=0.5)
        assert not torch.allclose(attention(*inputs), whole)
        assert_close(attention.eval()(*inputs), whole, **EXACT)


def test_a_state_follows_autocast():
    """Tokens of 16 bits make a state of 16 bits, except for its sums, and later tokens fit it."""
    torch.manual_seed(0)
    heads = AttentionLayer(8, longshort.Config(window=4, segment=4), heads=2)
    x = torch.randn(1, 14, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected, state, ys = heads(x), None, []
        for part in x.split((6, 1, 7), 1):
            y, state = heads.extend(part, state)
            ys.append(y)
    assert state.attention.k.dtype == state.attention.summary_v.dtype == torch.bfloat16
    assert state.attention.o.dtype == torch.float32
    assert_close(torch.cat(ys, 1), expected, rtol=0.05, atol=0.02)  # two ways of rounding to 8 bits


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", -1),
        ("rank", -1),
        ("segment", 0),
        ("segment_rank", -1),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("scale", float("nan")),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        longshort.Config(**{field: value})


def test_something_must_be_seen():
    with pytest.raises(ValueError, match="window and rank must not both be 0"):
        longshort.Config(window=0, rank=0)


def test_a_causal_window_reaches_the_finished_segments():
    for config, least in ((longshort.Config(window=15), 16), (longshort.Config(window=0, segment_rank=0), 1)):
        with pytest.raises(ValueError, match=f"window must be at least {least} when causal.*got"):
            config.build(heads=2, dim=4, causal=True)
        config.build(heads=2, dim=4, causal=False)
    longshort.Config(window=15, segment_rank=0).build(heads=2, dim=4, causal=True)


def test_cross_attention_has_no_window():
    _, k, v = draw()
    windowed = build(False, window=4)
    assert not windowed.can.cross
    with pytest.raises(ValueError, match=r"'longshort' has no cross form with longshort\.Config\(window=4"):
        windowed.encode_memory(k, v)
    assert build(False, window=0).can.cross
    with pytest.raises(ValueError, match="causal=False"):
        build(True).encode_memory(k, v)


def test_without_a_window_there_is_nothing_to_turn():
    with pytest.raises(ValueError, match="rope_base"):
        AttentionLayer(8, longshort.Config(window=0), heads=2, causal=False, rope_base=100.0)
    with pytest.raises(ValueError, match="rotation"):
        build(False, window=0)(*draw(), rope=RotaryEmbedding(torch.arange(TIME).repeat(BATCH, 1), 100.0))


def test_wrong_states_and_memories_are_refused():
    q, k, v = draw()
    with pytest.raises(TypeError, match="state must be a LongShortState, got tuple"):
        build(True).extend(q, k, v, tuple(build(True).start(BATCH)))
    with pytest.raises(ValueError, match=r"state\.summary_k must be"):
        build(True).extend(q, k, v, build(True, segment_rank=2).start(BATCH, dtype=torch.float64))
    with pytest.raises(TypeError, match="memory must be a LongShortMemory, from encode_memory, got tuple"):
        build(False, window=0).cross_attend(q, (k, v))


def test_a_memory_of_one_sequence_is_read_by_all():
    layer = AttentionLayer(32, longshort.Config(window=0, rank=4), heads=4, causal=False).double()
    x = torch.randn(3, 9, 32, dtype=torch.float64)
    memory = layer.encode_memory(x[:1])
    found = layer.cross_attend(x, memory)
    assert_close(found, torch.cat([layer.cross_attend(x[i : i + 1], memory) for i in range(3)]), **EXACT)
    with pytest.raises(ValueError, match="memory must be of 3 sequences"):
        layer.cross_attend(x, layer.encode_memory(x[:2]))

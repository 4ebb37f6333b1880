"""LSH attention: its dense definition, what it sees of the future, its steps, what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import Attention, lsh, map_state
from lintra.attention.lsh import LshAttention
from lintra.ops.lsh import lsh_attention
from lintra.testing.laws import BATCH, EXACT, TIME, Case, extend, forward, gradients, some_masks

SHAPE = {"kv_heads": 4}
VARIANTS = [
    lsh.Config(rounds=2, chunk=4),
    lsh.Config(rounds=3, chunk=3, buckets=4, across_buckets=False, exact_union=False, scale=0.5),
    lsh.Config(rounds=2, chunk=2, buckets=128, look_back=2, look_ahead=1, wrap=False, seed=5),
    lsh.Config(rounds=3, chunk=8, look_back=1, look_ahead=1, across_buckets=False, see_self=True),
]


def build(config: lsh.Config, causal: bool = True, rotary: bool = False) -> tuple[Case, Attention]:
    case = Case("lsh", config, causal, rotary=rotary, **SHAPE)
    return case, case.build()


def hashes(attention: LshAttention, u: Tensor, time: int) -> Tensor:
    """The bucket [t h r] of each token of u [t h d], by the largest of x and -x."""
    count = attention.config.buckets
    if count is None:
        count = 2
        while 2 * count * attention.config.chunk <= 2 * time:
            count *= 2
    sizes = [count]
    if count > 64:
        sizes = [2 ** (count.bit_length() // 2)]
        sizes.append(count // sizes[0])
    found, unit = 0, 1
    for i, size in enumerate(sizes):
        wide = torch.promote_types(u.dtype, torch.float32)
        directions = attention.rotations[:, :, i, :, : size // 2].to(wide)
        x = torch.einsum("thd,hrdc->thrc", u.detach().to(wide), directions)
        found = found + unit * torch.cat((x, -x), -1).argmax(-1)
        unit *= size
    return found


def seen_in_one_round(config: lsh.Config, bucket: list[int]) -> list[list[bool]]:
    """Which keys each query may see, by the chunks of the sorted tokens."""
    order = sorted(range(len(bucket)), key=lambda i: (bucket[i], i))
    place = {token: rank // config.chunk for rank, token in enumerate(order)}
    chunks = max(place.values()) + 1
    seen = []
    for i in range(len(bucket)):
        near = range(place[i] - config.look_back, place[i] + config.look_ahead + 1)
        allowed = {c % chunks for c in near} if config.wrap else set(near)
        same = [config.across_buckets or bucket[i] == other for other in bucket]
        seen.append([place[j] in allowed and same[j] for j in range(len(bucket))])
    return seen


def dense(attention: LshAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every score, masked out where no round sees the key. A token sees itself with
    `see_self`, otherwise only if it sees nothing else."""
    config, time = attention.config, q.shape[1]
    length = q.norm(dim=-1, keepdim=True)
    scores = config.scale * torch.einsum("bthd,bshd->bhts", q, q / length)
    count = torch.zeros(scores.shape, dtype=torch.int64)
    for b in range(q.shape[0]):
        buckets = hashes(attention, q[b], time)
        for h in range(attention.heads):
            for r in range(config.rounds):
                count[b, h] += torch.tensor(seen_in_one_round(config, buckets[:, h, r].tolist()))
    if not config.see_self:
        count.diagonal(dim1=2, dim2=3).zero_()
    if attention.causal:
        count = count.tril()
    alone = (count == 0).all(-1)
    count.diagonal(dim1=2, dim2=3).masked_fill_(alone, 1)
    weight = (count > 0) if config.exact_union else count
    weights = (scores + weight.to(scores.dtype).log()).softmax(-1)
    return torch.einsum("bhts,bshe->bthe", weights, v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rounds", [1, 3])
def test_one_chunk_is_softmax_without_oneself(causal, rounds):
    """However many rounds see a key, and whether or not they count it twice."""
    for exact in (True, False):
        case, attention = build(lsh.Config(rounds=rounds, chunk=TIME, exact_union=exact), causal)
        q, k, v = case.draw()
        scores = torch.einsum("bthd,bshd->bhts", q, q / q.norm(dim=-1, keepdim=True))
        hidden = torch.eye(TIME, dtype=torch.bool)
        if causal:
            hidden = hidden | torch.ones(TIME, TIME, dtype=torch.bool).triu()
            hidden[0, 0] = False
        expected = torch.einsum("bhts,bshe->bthe", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        y = attention(q, k, v)
        assert_close(y, expected, **EXACT)
        assert_close(gradients(y, [q, v]), gradients(expected, [q, v]), **EXACT)


def test_the_first_token_sees_itself_alone():
    for config in VARIANTS:
        case, attention = build(config)
        q, k, v = case.draw()
        rounding = EXACT if config.see_self else {"rtol": 0, "atol": 0}  # every round has seen it
        assert_close(attention(q, k, v)[:, 0], v[:, 0], **rounding)


def test_constant_values_come_back():
    for config in VARIANTS:
        for causal in (True, False):
            case, attention = build(config, causal)
            q, k, v = case.draw()
            y = attention(q, k, torch.full_like(v, 3.0))
            assert_close(y, torch.full_like(y, 3.0), **EXACT)


def test_order_matters_beyond_one_chunk_only():
    mixed = torch.randperm(TIME, generator=torch.Generator().manual_seed(4))
    for chunk, same in ((TIME, True), (4, False)):
        case, attention = build(lsh.Config(chunk=chunk, buckets=2), causal=False)
        q, k, v = case.draw()
        y, expected = attention(*(x[:, mixed] for x in (q, k, v))), attention(q, k, v)[:, mixed]
        assert torch.allclose(y, expected) is same


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_a_step_gives_what_the_last_token_gets(config, rotary):
    """In place of the law parallel = recurrent: step by step, values and gradients."""
    case, attention = build(config, rotary=rotary)
    inputs = case.draw()
    state = attention.start(BATCH, dtype=torch.float64)
    for i in range(TIME):
        one = [x[:, i : i + 1] for x in inputs]
        y, after = attention.step(*one, state, rope=case.rope(i, 1))
        by_extend, _ = attention.extend(*one, state, rope=case.rope(i, 1))
        expected = forward(case, attention, *(x[:, : i + 1] for x in inputs))[:, -1:]
        assert_close(y, expected, **EXACT)
        assert torch.equal(y, by_extend)
        assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)
        state = after


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_extend_gives_the_new_tokens_what_forward_gives_them(config):
    case, attention = build(config, rotary=True)
    inputs = case.draw()
    state, first = attention.start(BATCH, dtype=torch.float64), 0
    for size in (7, 0, 1, 5, 6):
        last = first + size
        part = [x[:, first:last] for x in inputs]
        y, state = extend(case, attention, part, state, rope=case.rope(first, size))
        expected = forward(case, attention, *(x[:, :last] for x in inputs))[:, first:]
        assert_close(y, expected, **EXACT)
        assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)
        first = last
    assert_close(attention.extend(*inputs, attention.start(BATCH))[0], attention(*inputs), **EXACT)


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_steps_go_on_after_padding(config):
    """Each token of a padded batch equals the last token of its real prefix, run alone."""
    case, attention = build(config)
    inputs = case.draw()
    for mask in some_masks():
        state = attention.start(BATCH, dtype=torch.float64)
        for i in range(TIME):
            one, real = [x[:, i : i + 1] for x in inputs], mask[:, i : i + 1]
            dirty = [x.masked_fill(~real.reshape(-1, 1, 1, 1), torch.nan) for x in one]
            y, state = attention.extend(*dirty, state, mask=real)
            for b in range(BATCH):
                if not real[b]:
                    assert (y[b] == 0).all()
                    continue
                so_far = torch.arange(TIME)[mask[b] & (torch.arange(TIME) <= i)]
                alone = attention(*(x[b : b + 1, so_far] for x in inputs))[:, -1:]
                assert_close(y[b : b + 1], alone, **EXACT)


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_the_future_has_no_gradient(config):
    case, attention = build(config)
    inputs = case.draw()
    y = attention(*inputs)
    for cut in (1, 8, TIME - 1):
        for g in gradients(y[:, :cut], inputs):
            assert (g[:, cut:] == 0).all()


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_later_values_change_nothing(config):
    case, attention = build(config)
    q, k, v = case.draw()
    for cut in (1, 8, TIME - 1):
        changed = torch.cat((v[:, :cut], 7.0 - 100 * v[:, cut:]), 1)
        assert_close(attention(q, k, changed)[:, :cut], attention(q, k, v)[:, :cut], **EXACT)


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_later_tokens_change_nothing_while_the_sort_is_held(config):
    case, attention = build(config)
    u, _, v = case.draw()
    bucket = torch.randint(0, 4, (*u.shape[:3], config.rounds), generator=torch.Generator().manual_seed(2))
    for cut in (1, 8, TIME - 1):
        changed = [torch.cat((x[:, :cut], 7.0 - 100 * x[:, cut:]), 1) for x in (u, v)]
        options = {"exact_union": config.exact_union, "scale": config.scale}
        before = lsh_attention(u, v, bucket, attention.pattern, **options)[:, :cut]
        after = lsh_attention(*changed, bucket, attention.pattern, **options)[:, :cut]
        assert_close(after, before, **EXACT)


def test_defect_23_what_later_tokens_decide_is_declared():
    """Later tokens can push an earlier key out of sight: a prefix gives another output, and `can` says so."""
    case, attention = build(VARIANTS[0])
    inputs = case.draw()
    assert attention.can.lookahead
    cut = TIME // 2
    assert not torch.allclose(attention(*inputs)[:, :cut], attention(*(x[:, :cut] for x in inputs)))


@pytest.mark.usefixtures("implementation")
def test_defect_09_rounds_are_not_averaged():
    """A round that sees little weighs little: the mean of the rounds gives something else."""
    config = lsh.Config(rounds=2, chunk=4)
    case, attention = build(config, causal=False)
    q, k, v = case.draw()
    alone = []
    for r in range(2):
        _, single = build(lsh.Config(rounds=1, chunk=4), causal=False)
        single.rotations.copy_(attention.rotations[:, r : r + 1])
        alone.append(single(q, k, v))
    y = attention(q, k, v)
    assert_close(y, dense(attention, q, k, v), **EXACT)
    assert not torch.allclose(y, (alone[0] + alone[1]) / 2, rtol=0.05)


def test_defect_09_a_zero_vector_has_a_length():
    for config in VARIANTS:
        case, attention = build(config)
        q, _, v = (x.detach() for x in case.draw())
        q[:, ::3] = 0.0
        q.requires_grad_()
        y = attention(q, q, v)
        assert y.isfinite().all()
        assert gradients(y, [q])[0].isfinite().all()


def test_defect_07_a_state_is_not_changed():
    case, attention = build(VARIANTS[0])
    inputs = case.draw()
    _, state = attention.extend(*inputs, attention.start(BATCH, dtype=torch.float64))
    kept = map_state(torch.clone, state)
    for _ in range(2):
        attention.step(*(x[:, :1] for x in inputs), state)
    for a, b in zip(state, kept, strict=True):
        assert torch.equal(a, b)


def test_defect_12_a_seed_leaves_the_global_generator_alone():
    case = Case("lsh", lsh.Config(seed=3), True, **SHAPE)
    inputs = [x.detach().float() for x in case.draw(8)]
    torch.manual_seed(11)
    before = torch.get_rng_state()
    attention = case.config.build(causal=True, heads=4, dim=6, value_dim=4)
    attention.redraw(torch.Generator().manual_seed(1))
    attention(*inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_and_redrawing_change_the_hashes():
    case, attention = build(VARIANTS[0])
    inputs = case.draw()
    before = attention(*inputs)
    assert torch.equal(build(VARIANTS[0])[1](*inputs), before)
    assert not torch.allclose(build(lsh.Config(rounds=2, chunk=4, seed=1))[1](*inputs), before)
    attention.redraw(torch.Generator().manual_seed(7))
    assert not torch.allclose(attention(*inputs), before)


@pytest.mark.parametrize("size", [1e-4, 1e4, 1e8])
def test_a_key_out_of_sight_stays_there_at_any_size(size):
    """Scores far below -1e5 do not lose to the token's own score."""
    case, attention = build(lsh.Config(rounds=2, chunk=4), causal=False)
    q, _, v = case.draw()
    q = q * size
    assert_close(attention(q, q, v), dense(attention, q, q, v), **EXACT)


def test_equal_vectors_share_one_bucket():
    """All keys equal: a query sees the keys beside it in time, evenly."""
    case, attention = build(lsh.Config(rounds=3, chunk=4))
    q, _, v = case.draw()
    q = q[:, :1].expand_as(q)
    y = attention(q, q, v)
    for i in range(1, TIME):
        first = max(0, i // 4 - 1) * 4
        assert_close(y[:, i], v[:, first:i].mean(1), **EXACT)


def test_dropout_acts_in_training_only():
    for alone in (lsh.Config(), lsh.Config(chunk=1, look_back=0)):
        case, attention = build(replace(alone, dropout=0.5))
        inputs = case.draw()
        whole = build(alone)[1](*inputs)
        assert not torch.allclose(attention(*inputs), whole)
        assert_close(attention.eval()(*inputs), whole, **EXACT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rounds", 0),
        ("chunk", 0),
        ("look_back", -1),
        ("look_ahead", -1),
        ("buckets", 1),
        ("buckets", 6),
        ("buckets", 2**15),
        ("scale", float("inf")),
        ("dropout", 1.0),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        lsh.Config(**{field: value})


def test_queries_and_keys_are_one_projection():
    case, attention = build(VARIANTS[0])
    q, _, v = case.draw()
    with pytest.raises(ValueError, match="one projection: k must be q"):
        attention(q, q + 1, v)
    with pytest.raises(ValueError, match="kv_heads must be heads=4, got 2"):
        lsh.Config().build(heads=4, kv_heads=2, dim=8, causal=True)


def test_there_is_no_cross_form():
    case, attention = build(VARIANTS[0], causal=False)
    q, _, v = case.draw()
    with pytest.raises(ValueError, match="'lsh' has no cross form"):
        attention.encode_memory(q, v)
    with pytest.raises(ValueError, match="need a mechanism built with causal=True"):
        attention.extend(q, q, v, attention.start(BATCH))


def test_a_state_of_another_shape_is_refused():
    case, attention = build(VARIANTS[0])
    inputs = case.draw()
    _, state = attention.extend(*inputs, attention.start(BATCH, dtype=torch.float64))
    with pytest.raises(TypeError, match="state must be a LshState, got tuple"):
        attention.extend(*inputs, tuple(state))
    with pytest.raises(ValueError, match=r"state\.real must be"):
        attention.extend(*inputs, state._replace(real=state.real[:, 1:]))

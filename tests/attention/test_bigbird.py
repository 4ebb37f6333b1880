"""BigBird: its sets of blocks, their limits, what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import bigbird, in_layer, softmax
from lintra.attention.bigbird import BigBirdAttention
from lintra.nn import AttentionLayer
from lintra.ops.blocks import hash_uint32
from lintra.testing.laws import EXACT, Case, gradients

SMALL = bigbird.Config(block=2, random_blocks=2)
VARIANTS = [
    SMALL,
    bigbird.Config(block=3, random_blocks=1, window_blocks=1, left_blocks=2, scale=0.3, random_limit=12),
]


OTHERS = [
    bigbird.Config(block=2, random_blocks=0, window_blocks=5, left_blocks=0, right_blocks=0),
    bigbird.Config(block=1, random_blocks=1, window_blocks=1, left_blocks=3),
    bigbird.Config(block=2, random_blocks=3, random_limit=2),  # its random blocks never include every block
]
ONE_SIDED = [bigbird.Config(block=2, random_blocks=1, left_blocks=0, right_blocks=2, seed=5)]


def row_of(attention: BigBirdAttention, head: int, i: int, number: int) -> set[int]:
    """The blocks that block i of `number` sees, from the definition."""
    config = attention.config
    last = i + 1 if attention.causal else number
    ends = set(range(config.left_blocks)) | set(range(number - attention.right, number))
    window = set(range(i - config.window_blocks // 2, i + config.window_blocks // 2 + 1))
    limit = last if config.random_limit is None else config.random_limit // config.block
    if i in ends and not attention.causal:
        return set(range(number))
    others = sorted(set(range(min(last, limit))) - ends - window)
    found = (ends | window) & set(range(last))
    for fallen in hash_uint32(attention.seeds, torch.tensor([[i]]))[0, head, 0].tolist():
        if others:
            found.add(others.pop(fallen * len(others) >> 32))
    return found


def pattern(attention: BigBirdAttention, time: int) -> Tensor:
    """Which keys a query sees [g t t]."""
    block = attention.config.block
    number = -(-time // block)
    seen = torch.zeros(attention.kv_heads, time, time, dtype=torch.bool)
    for head in range(attention.kv_heads):
        for t in range(time):
            blocks = row_of(attention, head, t // block, number)
            for s in range(t + 1 if attention.causal else time):
                seen[head, t, s] = s // block in blocks
    return seen


def dense(attention: BigBirdAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every score, with the keys that are in no set masked out."""
    group = attention.heads // attention.kv_heads
    scale = q.shape[-1] ** -0.5 if attention.config.scale is None else attention.config.scale
    scores = scale * torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(group, 2))
    hidden = ~pattern(attention, q.shape[1]).repeat_interleave(group, 0)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshe->bthe", weights, v.repeat_interleave(group, 2))


def both(config: bigbird.Config) -> list[BigBirdAttention]:
    return [build(config, causal) for causal in (False, True) if not (causal and config.right_blocks)]


def build(config: bigbird.Config, causal: bool) -> BigBirdAttention:
    return Case("bigbird", config, causal).build()


def draw(time: int) -> list[Tensor]:
    return Case("bigbird", SMALL, False).draw(time)


def entries(attention: BigBirdAttention, number: int) -> list[list[list[int]]]:
    """The list of every head and row as it is stored, plus the row's own block if causal."""
    row = torch.arange(number)[None]
    blocks, listed = attention.lists(row, torch.tensor([[number]]))
    own = [[i] if attention.causal else [] for i in range(number)]
    return [
        [blocks[0, g, i, listed[0, 0, i]].tolist() + own[i] for i in range(number)]
        for g in range(attention.kv_heads)
    ]


@pytest.mark.parametrize("number", range(1, 13))
def test_any_number_of_blocks_is_its_definition(number):
    for config in VARIANTS + OTHERS + ONE_SIDED:
        for attention in both(config):
            for time in {config.block * number, config.block * (number - 1) + 1}:
                inputs = draw(time)
                y, expected = attention(*inputs), dense(attention, *inputs)
                assert_close(y, expected, **EXACT)
                assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@pytest.mark.parametrize("config", VARIANTS + OTHERS + ONE_SIDED, ids=str)
def test_defect_10_no_block_is_on_a_list_twice(config):
    """Window, global and random blocks overlap, and are one set."""
    for attention in both(config):
        for number in range(1, 30):
            middle = range(number)
            if not attention.causal:  # the global rows read everything instead
                middle = range(config.left_blocks, number - attention.right)
            for head, rows in enumerate(entries(attention, number)):
                assert all(len(row) == len(set(row)) for row in rows)
                assert all(set(rows[i]) == row_of(attention, head, i, number) for i in middle)


def test_sets_that_cover_everything_are_softmax():
    """With lists, and without them: a short sequence does not need them."""
    config = bigbird.Config(block=2, random_blocks=9)
    inputs = draw(19)
    for causal in (False, True):
        expected = softmax.Config().build(heads=4, kv_heads=2, dim=6, value_dim=4, causal=causal)(*inputs)
        attention = build(config, causal)
        for full in (attention.full, 0):
            attention.full = full
            y = attention(*inputs)
            assert_close(y, expected, **EXACT)
            assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@pytest.mark.parametrize("config", VARIANTS + OTHERS, ids=str)
def test_short_sequences_need_no_lists(config):
    """A sequence that is read as a whole has sets that cover everything."""
    for attention in both(config):
        for number in range(1, attention.full + 1):
            for i in range(number):
                everything = set(range(i + 1 if attention.causal else number))
                assert all(row_of(attention, head, i, number) == everything for head in range(2))


@pytest.mark.parametrize("causal", [False, True])
def test_the_last_block_is_that_of_the_sample(causal):
    """Padding covers several blocks, a different number in each sample: all see the last real block."""
    attention, (q, k, v) = build(SMALL, causal), draw(33)
    mask = torch.arange(33) < torch.tensor([[32], [15]])
    y = attention(q, k, v, mask=mask)
    for i, time in enumerate((32, 15)):
        alone = attention(q[i : i + 1, :time], k[i : i + 1, :time], v[i : i + 1, :time])
        assert_close(y[i : i + 1, :time], alone, **EXACT)
    seen = torch.autograd.grad(y[1, 8].sum(), k)[0][1].abs().sum((1, 2)) > 0
    assert bool(seen[14]) is not causal
    assert not seen[15:].any()


def test_causal_sets_do_not_depend_on_the_length():
    """The outputs of a longer sequence begin with those of a shorter one."""
    attention, inputs = build(SMALL, True), draw(40)
    whole = attention(*inputs)
    for time in (1, 5, 18, 33):
        assert_close(attention(*(x[:, :time] for x in inputs)), whole[:, :time], **EXACT)


def test_keys_of_one_block_may_change_places_and_others_may_not():
    attention, (q, k, v) = build(SMALL, False), draw(20)
    y = attention(q, k, v)
    inside = torch.arange(20).unflatten(0, (-1, 2)).flip(1).flatten()
    assert_close(attention(q, k[:, inside], v[:, inside]), y, **EXACT)
    across = torch.arange(20).roll(6)
    assert not torch.allclose(attention(q, k[:, across], v[:, across]), y)


@pytest.mark.parametrize("causal", [False, True])
def test_constant_values_come_back(causal):
    q, k, v = draw(19)
    y = build(SMALL, causal)(q, k, torch.full_like(v, 3.0))
    assert_close(y, torch.full_like(y, 3.0), **EXACT)


@pytest.mark.parametrize("causal", [False, True])
def test_hard_inputs_give_what_the_definition_gives(causal):
    """Scores of 1e4 and more, equal keys, zeros, one token, one real token."""
    attention, (q, k, v) = build(SMALL, causal), draw(19)
    one = torch.zeros(2, 19, dtype=torch.bool)
    one[:, 11] = True
    values = v.repeat_interleave(2, 2)
    assert_close(attention(q, k, v, mask=one)[one], values[one], **EXACT)
    assert_close(attention(q[:, :1], k[:, :1], v[:, :1]), values[:, :1], **EXACT)
    for hard_q, hard_k in ((100 * q, 100 * k), (q, k[:, :1].expand_as(k)), (0 * q, k)):
        y, expected = attention(hard_q, hard_k, v), dense(attention, hard_q, hard_k, v)
        assert_close(y, expected, rtol=1e-8, atol=1e-8)  # scores of 1e5 have an error of 1e-11, times terms
        assert_close(gradients(y, [q, k, v]), gradients(expected, [q, k, v]), rtol=1e-7, atol=1e-7)


def test_random_blocks_differ_between_heads_layers_and_seeds():
    drawn = [build(in_layer(SMALL, layer), False) for layer in (0, 1)]
    one, other = (entries(attention, 20) for attention in drawn)
    assert one[0] != one[1]
    assert one != other
    assert other == entries(build(bigbird.Config(block=2, random_blocks=2, seed=1), False), 20)
    drawn[0].redraw(torch.Generator().manual_seed(9))
    assert entries(drawn[0], 20) != one


def test_random_blocks_come_from_the_first_tokens():
    """Of 40 blocks of 3, only the first 4 (12 tokens) are drawn, apart from the window and the ends."""
    attention = build(VARIANTS[1], False)
    for rows in entries(attention, 40):
        found = {block for i, row in enumerate(rows) for block in row if block != i and 2 <= block < 39}
        assert found == {2, 3}


@pytest.mark.parametrize("causal", [False, True])
def test_defect_11_training_and_evaluation_see_the_same(causal):
    attention = build(SMALL, causal)
    trained = entries(attention.train(), 20)
    assert entries(attention.eval(), 20) == trained
    assert len({tuple(row) for rows in trained for row in rows}) > 20  # and not one list for all


def test_defect_12_the_global_generator_is_neither_read_nor_seeded():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = SMALL.build(heads=2, dim=6, causal=False)
    first(*(torch.ones(1, 40, 2, 6) for _ in range(3)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(SMALL.build(heads=2, dim=6, causal=False).seeds, first.seeds)


@pytest.mark.parametrize("causal", [False, True])
def test_defect_13_every_length_is_served_by_the_same_numbers(causal):
    """Stored numbers do not depend on the length: a short sequence gives the same after a long one."""
    attention = build(SMALL, causal)
    assert attention.seeds.shape == (2, 2)
    inputs = draw(200)
    few = [x[:, :31] for x in inputs]
    before = attention(*few)
    attention(*inputs)
    assert_close(attention(*few), before, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_defect_16_what_is_hidden_has_no_weight_however_large_its_score(causal):
    attention, (q, k, v) = build(SMALL, causal), draw(40)
    t = 20  # the first of its block; if causal, the only token of that block that it sees
    visible = pattern(attention, 40)
    loud = q[:, t, ::2].detach() * 1e6  # a score of about 1e6 for the query at t
    changed = torch.where(visible[:, t].T[None, :, :, None], k, loud[:, None])
    y, expected = attention(q, changed, v), attention(q, k, v)
    assert not visible[:, t].all(1).any()
    assert_close(y[:, t, ::2], expected[:, t, ::2], **EXACT)
    assert all(g.isfinite().all() for g in gradients(y, [q, k, v]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block", 0),
        ("random_blocks", -1),
        ("window_blocks", 2),
        ("window_blocks", -1),
        ("left_blocks", -1),
        ("right_blocks", -1),
        ("random_limit", 63),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("scale", float("inf")),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        bigbird.Config(**{field: value})


def test_causal_has_no_last_blocks():
    with pytest.raises(ValueError, match=r"right_blocks must be 0 or None where causal.* got 2"):
        bigbird.Config(right_blocks=2).build(heads=2, dim=4, causal=True)
    assert [build(SMALL, causal).right for causal in (False, True)] == [1, 0]


def test_refuses_another_sequence_and_other_states():
    q, k, v = draw(5)
    with pytest.raises(ValueError, match="'bigbird' has no cross form"):
        build(SMALL, False).encode_memory(k, v)
    with pytest.raises(ValueError, match="causal=True"):
        build(SMALL, False).step(q[:, :1], k[:, :1], v[:, :1], None)
    with pytest.raises(TypeError, match="state must be a BigBirdState, got tuple"):
        build(SMALL, True).extend(q, k, v, (k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_acts_in_training_only(causal):
    inputs = draw(40)
    attention = build(bigbird.Config(block=2, random_blocks=2, dropout=0.5), causal)
    whole = build(SMALL, causal)(*inputs)
    torch.manual_seed(0)
    assert not torch.allclose(attention(*inputs), whole)
    assert_close(attention.eval()(*inputs), whole, **EXACT)


def test_a_cache_follows_autocast():
    """Tokens of 16 bits make a cache of 16 bits, and later tokens fit it."""
    heads = AttentionLayer(8, SMALL, heads=2)
    x = torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected, state, ys = heads(x), None, []
        for part in x.split((9, 1, 6), 1):
            y, state = heads.extend(part, state)
            ys.append(y)
    assert state.attention.k.dtype == torch.bfloat16
    assert_close(torch.cat(ys, 1), expected, rtol=0.05, atol=0.02)  # two ways of rounding to 8 bits


def test_the_own_block_alone_is_enough_to_decode():
    config = bigbird.Config(block=4, window_blocks=1, left_blocks=0, random_blocks=0)
    attention = config.build(heads=2, dim=4, causal=True)
    q, k, v = torch.randn(3, 1, 9, 2, 4, generator=torch.Generator().manual_seed(0))
    state, ys = attention.start(1), []
    for i in range(9):
        y, state = attention.extend(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1], state)
        ys.append(y)
    assert_close(torch.cat(ys, 1), attention(q, k, v))


def test_compiled_for_another_length(one_thread):
    attention = SMALL.build(heads=2, dim=4, causal=True)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    for time in (37, 20):
        q, k, v = torch.randn(3, 2, time, 2, 4)
        mask = torch.arange(time) < torch.tensor([[time], [time // 2]])
        assert_close(compiled(q, k, v, mask=mask), attention(q, k, v, mask=mask))

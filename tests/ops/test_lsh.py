"""Hashes by direction, and attention in sorted chunks against its definition."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.ops.lsh import (
    Order,
    Pattern,
    buckets,
    columns,
    lsh_attention,
    lsh_attention_newest,
    lsh_attention_reference,
)
from lintra.ops.norms import unit
from lintra.testing.laws import EXACT, gradients

PATTERNS = [
    Pattern(causal=True, chunk=4),
    Pattern(causal=False, chunk=3, look_ahead=1),
    Pattern(causal=True, chunk=2, look_back=2, look_ahead=2, wrap=False),
    Pattern(causal=False, chunk=5, look_back=0, across_buckets=False),
    Pattern(causal=True, chunk=1, across_buckets=False),
    Pattern(causal=True, chunk=3, see_self=True),
]


def draw(time: int, rounds: int, seed: int = 0) -> list[Tensor]:
    """u [2 t 3 5], v [2 t 3 4], bucket [2 t 3 r] of 4."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(2, time, 3, n, generator=generator, dtype=torch.float64) for n in (5, 4))
    bucket = torch.randint(0, 4, (2, time, 3, rounds), generator=generator)
    return [u.requires_grad_(), v.requires_grad_(), bucket]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("rounds", [1, 3])
def test_equals_its_reference(pattern, rounds):
    for time in (1, pattern.chunk, pattern.chunk + 1, 3 * pattern.chunk - 1, 23):
        u, v, bucket = draw(time, rounds)
        generator = torch.Generator().manual_seed(time)
        holes = torch.rand(2, time, generator=generator) > 0.3
        holes[1] = False
        for mask in (None, holes):
            for exact in (True, False):
                options = {"mask": mask, "exact_union": exact, "scale": 0.7}
                y = lsh_attention(u, v, bucket, pattern, **options)
                expected = lsh_attention_reference(u, v, bucket, pattern, **options)
                assert_close(y, expected, **EXACT)
                assert_close(gradients(y, [u, v]), gradients(expected, [u, v]), **EXACT)
                newest = lsh_attention_newest(u, v, bucket, pattern, **options)
                assert_close(newest, expected[:, -1:], **EXACT)
                assert_close(gradients(newest, [u, v]), gradients(expected[:, -1:], [u, v]), **EXACT)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_pairs_may_be_forbidden(pattern):
    """By a matrix; a token that may not even see itself gets 0, and hidden tokens get no gradient."""
    for time in (1, pattern.chunk + 1, 23):
        u, v, bucket = draw(time, 2)
        generator = torch.Generator().manual_seed(time)
        allowed, mask = (torch.rand(n, time, generator=generator) > 0.4 for n in (time, 2))
        allowed[time // 2] = False
        options = {"mask": mask, "allowed": allowed, "scale": 0.7}
        y = lsh_attention(u, v, bucket, pattern, **options)
        expected = lsh_attention_reference(u, v, bucket, pattern, **options)
        assert_close(y, expected, **EXACT)
        assert_close(gradients(y, [u, v]), gradients(expected, [u, v]), **EXACT)
        assert (y[:, time // 2] == 0).all()
        everybody = {"allowed": torch.ones_like(allowed), "mask": mask}
        whole = lsh_attention(u, v, bucket, pattern, mask=mask)
        assert_close(lsh_attention(u, v, bucket, pattern, **everybody), whole, **EXACT)


def test_what_does_not_go_together_is_refused():
    u = torch.randn(2, 8, 2, 4)
    bucket, pattern = torch.zeros(2, 8, 2, 1, dtype=torch.int64), Pattern(chunk=4, causal=True)
    for wrong, kind, says in (
        ({"v": u.double()}, TypeError, "v must have the dtype of u"),
        ({"v": u[:, :7]}, ValueError, "v must be .*: t is 8 elsewhere"),
        ({"bucket": bucket[:1]}, ValueError, "bucket must be .*: b is 2 elsewhere"),
        ({"bucket": bucket[..., 0]}, ValueError, "bucket must have the 4 axes"),
        ({"mask": torch.ones(2, 8)}, TypeError, "mask must be boolean"),
        (
            {"bucket": bucket + 2**31 - 1},
            ValueError,
            r"bucket must be from -2\^31 to 2\^31 - 2, got 2147483647",
        ),
    ):
        with pytest.raises(kind, match=says):
            lsh_attention(**{"u": u, "v": u, "bucket": bucket, "pattern": pattern, **wrong})


def test_gradcheck():
    u, v, bucket = (x[:1, :, :1].detach() for x in draw(7, 2))
    u, v = u.requires_grad_(), v.requires_grad_()
    for pattern in PATTERNS:
        assert torch.autograd.gradcheck(lambda u, v, p=pattern: lsh_attention(u, v, bucket, p), (u, v))


def test_sorting_and_back_is_the_identity():
    bucket = draw(11, 2)[2]
    mask = torch.rand(2, 11, generator=torch.Generator().manual_seed(1)) > 0.4
    order = Order.of(bucket, mask, 4)
    assert torch.equal(order.token.gather(3, order.rank), torch.arange(12).expand(2, 3, 2, 12))
    by_rank = order.bucket.gather(3, order.token)
    for b, count in enumerate(mask.sum(1).tolist()):
        assert order.chunks[b] == math.ceil(count / 4)
        assert (by_rank[b, ..., :count].diff() >= 0).all()
        assert not mask[b][order.token[b, ..., count:].clamp(max=10)][order.token[b, ..., count:] < 11].any()


def test_no_key_is_seen_twice_where_there_are_few_chunks():
    """A window of five chunks over three of them is the softmax over all other tokens."""
    u, v, bucket = draw(10, 1)
    pattern = Pattern(causal=False, chunk=4, look_back=3, look_ahead=1)
    scores = torch.einsum("bthd,bshd->bhts", u, unit(u))
    scores = scores.masked_fill(torch.eye(10, dtype=torch.bool), -torch.inf)
    expected = torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v)
    for exact in (True, False):
        assert_close(lsh_attention(u, v, bucket, pattern, exact_union=exact), expected, **EXACT)


def test_the_first_chunk_looks_back_at_the_last_of_its_own_round():
    """Not at that of another round, nor at one of padding."""
    u, v, _ = draw(8, 1)
    bucket = torch.arange(8)[None, :, None, None].expand(2, 8, 3, 1)
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    near = Pattern(causal=False, chunk=2)
    wide = replace(near, wrap=False)
    y, without = (lsh_attention(u, v, bucket, each, mask=mask) for each in (near, wide))
    for b, last in ((0, [6, 7]), (1, [4])):
        keys = [1, *last]
        weights = (u[b, 0] * unit(u[b, keys])).sum(-1).softmax(0)
        assert_close(y[b, 0], (weights[..., None] * v[b, keys]).sum(0), **EXACT)
        assert_close(without[b, 0], v[b, 1], **EXACT)


def rotations(level: int, dim: int = 16, rounds: int = 1, seed: int = 0) -> Tensor:
    sizes = columns(level)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rounds, len(sizes), dim, sizes[0], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("level", [1, 3, 6, 7, 12, 14])
def test_a_hash_looks_at_the_direction(level):
    """h(c x) = h(x), and -x is half of the buckets away in each of the hashes."""
    x = torch.randn(1, 50, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    r = rotations(level)
    ids = buckets(x, r, [level]).long()
    assert torch.equal(buckets(3.7 * x, r, [level]), ids)
    assert ids.min() >= 0
    assert ids.max() < 2**level
    opposite = buckets(-x, r, [level]).long()
    first = 2 * columns(level)[0]
    assert torch.equal(opposite % first, (ids % first + first // 2) % first)
    if len(columns(level)) == 2:
        second = 2 * columns(level)[1]
        assert first * second == 2**level
        assert torch.equal(opposite // first, (ids // first + second // 2) % second)


def test_a_hash_is_the_largest_projection():
    x = torch.randn(1, 50, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    r = rotations(6, rounds=2)
    for level in (1, 4, 6):
        seen = torch.einsum("bthd,hrdc->bthrc", x, r[:, :, 0, :, : 2 ** (level - 1)])
        expected = torch.cat((seen, -seen), -1).argmax(-1)
        assert torch.equal(buckets(x, r, [1, 4, 6])[..., [1, 4, 6].index(level)].long(), expected)


def test_zeros_have_a_bucket():
    assert (buckets(torch.zeros(1, 3, 2, 16), rotations(4), [4]) == 0).all()


def test_the_nearer_two_vectors_are_the_more_often_they_meet():
    """2,000 pairs in 64 rounds: the standard deviation of a rate is below 0.002, the steps are above 0.02."""
    generator = torch.Generator().manual_seed(0)
    r = rotations(3, rounds=64)
    x, other = torch.randn(2, 1, 2_000, 2, 16, generator=generator, dtype=torch.float64)
    x = unit(x)
    other = unit(other - (other * x).sum(-1, keepdim=True) * x)
    rates = []
    for cosine in (-0.5, 0.0, 0.5, 0.8, 0.95):
        near = cosine * x + math.sqrt(1 - cosine**2) * other
        rates.append((buckets(x, r, [3]) == buckets(near, r, [3])).double().mean())
    assert abs(rates[1] - 1 / 8) < 0.01  # at right angles the two are independent: one of 8 buckets
    assert (torch.stack(rates).diff() > 0.02).all()


@pytest.mark.parametrize(
    "rounds", [pytest.param(255, marks=pytest.mark.slow), 256, pytest.param(300, marks=pytest.mark.slow)]
)
def test_more_rounds_than_a_byte_counts(rounds):
    """Every key is seen in all rounds, and counts once."""
    u, v = torch.randn(2, 1, 4, 1, 4, dtype=torch.float64)
    bucket, pattern = torch.zeros(1, 4, 1, rounds, dtype=torch.int64), Pattern(causal=True)
    assert_close(
        lsh_attention(u, v, bucket, pattern)[:, 1:],
        lsh_attention_reference(u, v, bucket, pattern)[:, 1:],
        **EXACT,
    )

"""Nystromformer: its dense definition, when it is exact, landmarks of padded sequences, what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import nystromformer
from lintra.attention.nystromformer import Config, NystromAttention
from lintra.nn import AttentionLayer
from lintra.ops.landmarks import CUTOFF, exact_inverse, iterative_inverse, segment_means
from lintra.testing.laws import EXACT, Case, forward, gradients, some_masks
from tests.attention.test_linformer import exact

VARIANTS = [
    Config(landmarks=4),
    Config(landmarks=7, iterations=3, conv=5),
    Config(
        landmarks=4, inverse="exact", scale=1.0
    ),  # less than 0.4 and A is nearly singular: digits are lost
    Config(),  # more landmarks than the laws have tokens
]


def dense(attention: NystromAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """F A^+ B, every weight, head by head; the inverse in float32 at least."""
    group = attention.heads // attention.kv_heads
    y = []
    for head in range(attention.heads):
        values = v[:, :, head // group]
        each = weights(attention.config, q[:, :, head], k[:, :, head // group]) @ values
        if attention.conv is not None:
            each = each + neighbours(attention.conv[head // group], values)
        y.append(each)
    return torch.stack(y, 2)


def weights(config: Config, q: Tensor, k: Tensor) -> Tensor:
    """q [b t d], k [b s d] -> [b t s]."""
    scale = q.shape[-1] ** -0.5 if config.scale is None else config.scale
    if min(q.shape[1], k.shape[1]) <= config.landmarks:
        return (scale * q @ k.mT).softmax(-1)
    few_q, few_k = means(q, config.landmarks), means(k, config.landmarks)
    left, right = (scale * q @ few_k.mT).softmax(-1), (scale * few_q @ k.mT).softmax(-1)
    middle = (scale * few_q @ few_k.mT).softmax(-1)
    a = middle if middle.dtype == torch.float64 else middle.float()
    if config.inverse == "exact":
        # A square matrix of full rank, of which float32 knows the larger singular values only.
        z = torch.linalg.inv(a) if a.dtype == torch.float64 else torch.linalg.pinv(a, rtol=1e-3)
    else:
        z = a.mT / torch.stack([x.abs().sum(0).max() * x.abs().sum(1).max() for x in a])[:, None, None]
        for _ in range(config.iterations):
            r = torch.eye(len(a[0]), dtype=a.dtype) - a @ z
            # The polynomial of the paper, (13 - y (15 - y (7 - y))) / 4, in powers of r = 1 - y.
            z = z @ (torch.eye(len(a[0]), dtype=a.dtype) + r + r @ r + (r @ r @ r) / 4)
    return left @ z.to(left.dtype) @ right


def means(x: Tensor, count: int) -> Tensor:
    """Token p of n belongs to landmark floor(p count / n)."""
    n = x.shape[1]
    members = [[p for p in range(n) if p * count // n == i] for i in range(count)]
    return torch.stack([x[:, each].mean(1) for each in members], 1)


def neighbours(kernel: Tensor, v: Tensor) -> Tensor:
    rows = []
    for n in range(v.shape[1]):
        near = [(i, n + i - len(kernel) // 2) for i in range(len(kernel))]
        rows.append(sum(kernel[i] * v[:, place] for i, place in near if 0 <= place < v.shape[1]))
    return torch.stack(rows, 1)


def build(config: Config, **shape) -> NystromAttention:
    return Case("nystromformer", config, False).build(**shape)


def draw(time: int = 19, seed: int = 0) -> list[Tensor]:
    return Case("nystromformer", VARIANTS[0], False).draw(time, seed)


@pytest.mark.parametrize("landmarks", [19, 20, 64])
@pytest.mark.parametrize("inverse", ["iterative", "exact"])
def test_a_landmark_for_every_token_is_softmax(landmarks, inverse):
    q, k, v = inputs = draw()
    y = build(Config(landmarks=landmarks, inverse=inverse))(q, k, v)
    assert_close(y, exact(q, k, v), **EXACT)
    assert_close(gradients(y, inputs), gradients(exact(q, k, v), inputs), **EXACT)


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        (Config(landmarks=6, inverse="exact"), 1e-9),
        (Config(landmarks=6, iterations=30), 1e-8),  # what 30 iterations reach in float64
    ],
)
def test_equal_tokens_in_each_segment_are_softmax(config, tolerance):
    """F and B then hold the rows and columns of A, and F A^+ B is the whole matrix."""
    q, k, v = draw(6)
    q, k = q.repeat_interleave(4, 1), k.repeat_interleave(4, 1)
    v = draw(24)[2]
    y = build(config)(q, k, v)
    assert_close(y, exact(q, k, v), rtol=tolerance, atol=tolerance)


def test_constant_values_come_back():
    """The rows of A, B and F sum to 1, hence those of F A^-1 B. Six iterations miss by some thousandths."""
    q, k, v = draw()
    three = torch.full_like(v, 3.0)
    y = build(Config(landmarks=5, inverse="exact"))(q, k, three)
    assert_close(y, three.repeat_interleave(2, 2), rtol=1e-9, atol=1e-9)  # the inverse multiplies roundings
    y = build(Config(landmarks=5, iterations=25))(q, k, three)
    assert_close(y, three.repeat_interleave(2, 2), rtol=1e-8, atol=1e-8)
    y = build(Config(landmarks=5))(q, k, three)
    assert (y - 3).abs().max() > 1e-6


def test_landmarks_follow_places():
    """Permuting keys and values within each segment changes nothing; permuting them across segments does."""
    attention, (q, k, v) = build(Config(landmarks=4)), draw(20)
    y = attention(q, k, v)
    within = torch.cat([5 * i + torch.tensor([3, 1, 4, 0, 2]) for i in range(4)])
    assert_close(attention(q, k[:, within], v[:, within]), y, **EXACT)
    assert_close(attention(q[:, within], k, v), y[:, within], **EXACT)
    across = torch.arange(20).roll(7)
    assert not torch.allclose(attention(q, k[:, across], v[:, across]), y, rtol=1e-3)
    near = build(Config(landmarks=4, conv=3))
    assert not torch.allclose(near(q, k[:, within], v[:, within]), near(q, k, v), rtol=1e-3)


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_a_batch_of_mixed_lengths(config):
    """Samples with fewer real tokens than landmarks use softmax, beside others that do not."""
    attention, lengths = build(config), [1, 3, 4, 5, 6, 19]
    q, k, v = (torch.cat([x[:1].detach() for _ in lengths]).requires_grad_() for x in draw())
    mask = torch.arange(19) < torch.tensor(lengths)[:, None]
    y = attention(q, k, v, mask=mask)
    expected = torch.zeros_like(y)
    for i, n in enumerate(lengths):
        expected[i, :n] = dense(attention, q[i : i + 1, :n], k[i : i + 1, :n], v[i : i + 1, :n])[0]
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, [q, k, v]), gradients(expected, [q, k, v]), **EXACT)


@pytest.mark.parametrize("config", [VARIANTS[0], VARIANTS[2], VARIANTS[3]], ids=str)
@pytest.mark.parametrize(("t", "s"), [(1, 19), (4, 19), (19, 1), (19, 4), (7, 19), (19, 7), (30, 8)])
def test_cross_attention_of_any_lengths(config, t, s):
    attention, q, (_, k, v) = build(config), draw(t, seed=5)[0], draw(s)
    y, expected = attention.cross_attend(q, attention.encode_memory(k, v)), dense(attention, q, k, v)
    assert_close(y, expected, **EXACT)
    # The gradient of an exact inverse of near landmarks multiplies roundings by its condition, squared.
    rtol = 1e-7 if config.inverse == "exact" else EXACT["rtol"]
    found, asked = gradients(y, [q, k, v]), gradients(expected, [q, k, v])
    assert_close(found, asked, rtol=rtol, atol=EXACT["atol"])
    # The same with padding on both sides.
    q_mask, k_mask = torch.rand(2, 2, 40, generator=torch.Generator().manual_seed(0)).argsort(-1)
    q_mask, k_mask = q_mask < t, k_mask < s
    padded = [x.new_full((2, 40, *x.shape[2:]), torch.nan) for x in (q, k, v)]
    for whole, x, mask in zip(padded, (q, k, v), (q_mask, k_mask, k_mask), strict=True):
        whole[mask] = x.detach().flatten(0, 1)
    read = attention.cross_attend(padded[0], attention.encode_memory(*padded[1:], k_mask), q_mask)
    assert_close(read[q_mask].reshape(y.shape), y, **EXACT)
    assert (read[~q_mask] == 0).all()


@pytest.mark.parametrize("config", VARIANTS[:3], ids=str)
def test_hard_inputs(config):
    """One token; all tokens equal; one real token; rows of zeros; large norms."""
    case, attention = Case("nystromformer", config, False), build(config)
    q, k, v = inputs = case.draw()
    one = [x[:, :1] for x in inputs]
    assert_close(attention(*one), dense(attention, *one), **EXACT)
    mask = torch.zeros(2, 19, dtype=torch.bool)
    mask[:, 11] = True
    y = forward(case, attention, *inputs, mask=mask)
    assert_close(y[:, 11:12], dense(attention, *(x[:, 11:12] for x in inputs)), **EXACT)
    for some in ([q * 0, k * 0, v], [1e3 * q, 1e3 * k, v], [x[:, :1].expand_as(x) for x in inputs]):
        y = attention(*some)
        assert y.isfinite().all()
        assert all(g.isfinite().all() for g in gradients(y, inputs))


@pytest.mark.parametrize("inverse", ["iterative", "exact"])
def test_equal_tokens_get_the_mean(inverse):
    """A, B and F are constant: A has rank one, and its pseudo-inverse is itself."""
    q, k, v = draw()
    more = {"iterations": 8} if inverse == "iterative" else {}
    y = build(Config(landmarks=4, inverse=inverse, **more))(q * 0, k * 0, v)
    expected = v.mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(y)
    assert_close(y, expected, **EXACT)


def test_the_convolution_is_over_real_neighbours():
    attention, (q, k, v) = build(Config(landmarks=4, conv=3)), draw()
    without = build(Config(landmarks=4))
    mask = some_masks()[2]
    near = attention(q, k, v, mask=mask) - without(q, k, v, mask=mask)
    for i in range(2):
        real = v[i : i + 1, mask[i]]
        for head in range(4):
            expected = neighbours(attention.conv[head // 2], real[:, :, head // 2])
            assert_close(near[i, mask[i], head], expected[0], **EXACT)


def test_a_convolution_has_no_cross_form():
    attention, (q, k, v) = build(Config(conv=3)), draw()
    assert not attention.can.cross
    assert build(Config()).can.cross
    memory = build(Config()).encode_memory(k, v)
    for call in (lambda: attention.encode_memory(k, v), lambda: attention.cross_attend(q, memory)):
        with pytest.raises(ValueError, match=r"'nystromformer' has no cross form with .*Config.*conv=3"):
            call()


def test_causal_is_refused():
    with pytest.raises(ValueError, match=r"'nystromformer' .* has no causal form, got causal=True"):
        Config().build(heads=2, dim=4, causal=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("landmarks", 0),
        ("iterations", 0),
        ("conv", 4),
        ("conv", -1),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("scale", float("inf")),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        Config(**{field: value})


@pytest.mark.parametrize("ignored", [{"iterations": 8}, {"inverse_start": "sample"}])
def test_the_exact_inverse_has_no_iterations(ignored):
    (name,) = ignored
    with pytest.raises(ValueError, match=f"{name} needs inverse='iterative', got .* with inverse='exact'"):
        Config(inverse="exact", **ignored)


def test_the_inverse_has_a_name_that_is_checked():
    with pytest.raises(TypeError, match="inverse must be 'iterative' or 'exact', got 'pinv'"):
        Config(inverse="pinv")


def test_a_memory_is_of_this_mechanism():
    attention, (q, k, v) = build(VARIANTS[0]), draw()
    with pytest.raises(TypeError, match="memory must be a NystromMemory, from encode_memory, got tuple"):
        attention.cross_attend(q, (k, v))


@pytest.mark.parametrize("landmarks", [4, 64])
def test_dropout_acts_in_training_only(landmarks):
    q, k, v = draw()
    attention = build(Config(landmarks=landmarks, dropout=0.5))
    whole = build(Config(landmarks=landmarks))(q, k, v)
    assert not torch.allclose(attention(q, k, v), whole)
    assert_close(attention.eval()(q, k, v), whole, **EXACT)


@pytest.mark.parametrize("inverse", ["iterative", "exact"])
def test_dropout_leaves_the_mean_and_adds_what_independent_weights_do(inverse):
    """Weights of F alone are dropped, y = sum_j F_ij u_j with u = A^+ B v: the mean over draws is y, and the
    variance is p / (1 - p) sum_j F_ij^2 u_j^2."""
    torch.manual_seed(0)
    time, landmarks, dropout, rounds = 64, 16, 0.2, 4000
    q, k, v = (torch.randn(1, time, 1, 8, dtype=torch.float64) for _ in range(3))
    config = Config(landmarks=landmarks, inverse=inverse, dropout=dropout)
    attention = config.build(heads=1, dim=8, causal=False).double()
    few_q, few_k = (segment_means(x, landmarks)[:, :, 0] for x in (q, k))
    left = (q[:, :, 0] @ few_k.mT * 8**-0.5).softmax(-1)
    middle = (few_q @ few_k.mT * 8**-0.5).softmax(-1)
    inverted = exact_inverse(middle) if inverse == "exact" else iterative_inverse(middle, 6)
    u = inverted @ (few_q @ k[:, :, 0].mT * 8**-0.5).softmax(-1) @ v[:, :, 0]
    variance = dropout / (1 - dropout) * left.square() @ u.square()
    many = [x.expand(500, -1, -1, -1) for x in (q, k, v)]
    drawn = torch.cat([attention(*many) for _ in range(rounds // 500)])
    error = (drawn.mean(0) - attention.eval()(q, k, v)).abs()[..., 0, :]
    # The largest of 512 numbers; beyond 5 standard errors it would come once in 3,000 seeds.
    assert (error < 5 * (variance / rounds).sqrt()).all()
    # The standard error of a variance is about (2 / rounds)^(1/2) of it, 2 %.
    assert_close(drawn.var(0)[:, 0], variance[0], rtol=0.2, atol=0)


def test_dropout_reaches_samples_with_few_queries_or_keys():
    """A sample with no more tokens than landmarks, beside one that has more, drops weights of its softmax."""
    q, k, v = draw()
    mask = torch.stack((torch.arange(q.shape[1]) < 3, torch.ones(q.shape[1], dtype=torch.bool)))
    attention = build(Config(landmarks=4, dropout=0.5)).train()
    y, whole = attention(q, k, v, mask=mask), attention.eval()(q, k, v, mask=mask)
    assert not torch.isclose(y, whole)[:, :3].all(-1).any()


@pytest.mark.parametrize(("time", "landmarks"), [(200, 32), (300, 32), (700, 64)])
def test_an_exact_inverse_of_rounded_numbers_multiplies_no_noise(time, landmarks, monkeypatch):
    """Tokens without structure make A nearly singular: outputs stay among the values, and the rounding of
    float32 changes them little, unless a singular value is so near the cutoff that rounding decides
    whether it is kept."""
    inverted = []
    monkeypatch.setattr(nystromformer, "exact_inverse", lambda a: (inverted.append(a), exact_inverse(a))[1])
    attention = Config(landmarks=landmarks, inverse="exact").build(heads=4, dim=16, causal=False)
    for seed in range(20):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, time, 4, 64)[..., :16] for _ in range(3))
        y = attention(q, k, v)
        values = torch.linalg.svdvals(inverted[-1])
        if ((values / values[..., :1] / CUTOFF[torch.float32]).log().abs() > 0.01).all():
            break
    else:
        pytest.fail("every draw has a singular value at the cutoff")
    assert y.abs().max() < v.abs().max()
    # Some 1e-7 is rounded away in a weight, and multiplied by the inverse of a singular value, at most 1e3.
    assert_close(attention(q * (1 + 1e-6), k, v), y, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_inverse_is_never_of_sixteen_bits(dtype):
    """Under autocast, and for 16-bit inputs, A^+ is that of float32: the error stays that of the inputs."""
    torch.manual_seed(0)
    attention = Config(landmarks=16).build(heads=2, dim=8, causal=False)
    q, k, v = (torch.randn(1, 128, 2, 8).to(dtype) for _ in range(3))
    expected = attention(q.double(), k.double(), v.double())
    with torch.autocast("cpu", dtype):
        y = attention(q.float(), k.float(), v.float())
        mask = torch.ones(1, 128, dtype=torch.bool)
        read = attention.cross_attend(q.float(), attention.encode_memory(k.float(), v.float(), mask), mask)
    step = torch.finfo(dtype).eps
    for each in (y, read, attention(q, k, v)):  # rounded only once, at the end
        assert each.dtype == dtype
        assert_close(each.double(), expected, rtol=step, atol=step / 8)


def test_autocast_in_a_layer():
    torch.manual_seed(0)
    heads, x = AttentionLayer(8, Config(landmarks=4, conv=3), heads=2, causal=False), torch.randn(2, 19, 8)
    expected = heads(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = heads(x)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), expected, rtol=0.05, atol=0.1)  # 8 bits of q and k, amplified by the inverse


def test_defect_02_landmarks_leave_padding_out():
    """Means are over real tokens alone: neither divided by the whole segment nor mixed with zeros."""
    attention, (q, k, v) = build(Config(landmarks=4)), draw()
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[:, [0, 1, 2, 9, 18]] = False
    memory = attention.encode_memory(k, v, mask)
    for i in range(4):
        members = [p for p in range(14) if p * 4 // 14 == i]
        assert_close(memory.key_means[:, i], k[:, mask[0]][:, members].mean(1), **EXACT)
    real = [x[:, mask[0]] for x in (q, k, v)]
    assert_close(attention(q, k, v, mask=mask)[:, mask[0]], attention(*real), **EXACT)


def test_a_length_that_does_not_divide_needs_no_padding():
    """Zeros on the left would take part in every softmax if no mask is passed."""
    q, k, v = draw(21)
    attention = build(Config(landmarks=4))
    assert_close(attention(q, k, v), dense(attention, q, k, v), **EXACT)


def test_defect_03_norms_are_of_each_sample_and_head():
    q, k, v = draw()
    attention = build(Config(landmarks=4))
    alone = attention(q[:1], k[:1], v[:1])
    other = torch.zeros_like(k[:1])
    other[:, :6] = 1e3  # one column of A holds everything: its norm is m times as large
    y = attention(torch.cat((q[:1], q[:1].abs())), torch.cat((k[:1], other)), torch.cat((v[:1], v[:1])))
    assert_close(y[:1], alone, **EXACT)


def test_defect_13_lengths_come_from_the_input():
    """One mechanism serves every length, and no row of a batch lands in the place of another."""
    attention = build(Config(landmarks=4))
    for time in (3, 4, 5, 8, 13, 40):
        q, k, v = draw(time)
        y = attention(q, k, v)
        for i in range(2):
            one = slice(i, i + 1)
            assert_close(y[one], attention(q[one], k[one], v[one]), **EXACT)
        assert_close(y, dense(attention, q, k, v), **EXACT)

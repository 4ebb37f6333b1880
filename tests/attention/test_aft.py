"""The attention free transformer: its dense definition, its limits, what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import aft
from lintra.attention.aft import AttentionFree
from lintra.testing.laws import EXACT, TIME, Case, extend_by_steps, gradients

SHAPE = {"value_dim": 6}  # each channel of v is weighted by the matching channel of k
VARIANTS = [
    aft.Config(),
    aft.Config(window=4, max_length=16_384),
    aft.Config(window=5, max_length=64, rank=3),
]
SIMPLE, LOCAL = VARIANTS[:2]
MODES = [(config, causal) for config in VARIANTS for causal in (True, False)]


def place_weights(attention: AttentionFree, time: int) -> Tensor:
    """w [t s]: what was learned for places nearer than the window, 0 beyond."""
    config = attention.config
    rows = []
    for t in range(time):
        row = []
        for s in range(time):
            near = config.window is not None and abs(t - s) < config.window
            if not near or (attention.causal and s > t):
                row.append(torch.zeros(()))
            elif config.rank is None:
                row.append(attention.bias[t, s - t + config.window - 1])
            else:
                row.append(attention.query_bias[t] @ attention.key_bias[s])
        rows.append(torch.stack([x.to(next(attention.parameters(), x).dtype) for x in row]))
    return torch.stack(rows)


def weights(attention: AttentionFree, k: Tensor) -> Tensor:
    """The weight of every pair of places in every channel [b t s h d], with the future masked out."""
    k = k.repeat_interleave(attention.heads // attention.kv_heads, 2)
    w = place_weights(attention, k.shape[1])
    scores = k[:, None] + w.to(k.dtype)[:, :, None, None]
    if attention.causal:
        future = torch.ones_like(w, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future[:, :, None, None], -torch.inf)
    return scores.softmax(2)


def dense(attention: AttentionFree, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 2, every weight of every channel."""
    v = v.repeat_interleave(attention.heads // attention.kv_heads, 2)
    return q.sigmoid() * torch.einsum("btshd,bshd->bthd", weights(attention, k), v)


def build(config: aft.Config, causal: bool) -> tuple[AttentionFree, list[Tensor]]:
    case = Case("aft", config, causal, **SHAPE)
    attention = case.build()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter *= 50  # weights of about exp(0.5), not the initial ones of nearly 1
    return attention, case.draw()


def same(y: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Assert equal values and gradients."""
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@pytest.mark.parametrize("rank", [None, 1, 16])
def test_weights_of_places_begin_as_small_whatever_their_rank(rank):
    torch.manual_seed(0)
    attention = aft.Config(window=4, max_length=1_000, rank=rank).build(heads=1, dim=4, causal=True)
    table = attention.bias if rank is None else attention.query_bias @ attention.key_bias.T
    assert table.std().item() == pytest.approx(0.01, rel=0.1)  # from 4,000 numbers, or from two times 1,000


@pytest.mark.parametrize(("config", "causal"), MODES[2:])
@pytest.mark.parametrize("time", [1, 2, 7, 8, 9, 40])
def test_large_weights_of_places(config, causal, time):
    """At lengths around the blocks, with weights that matter, gradients of the weights included."""
    attention, _ = build(config, causal)
    inputs = Case("aft", config, causal, **SHAPE).draw(time)
    everything = [*inputs, *attention.parameters()]
    same(attention(*inputs), dense(attention, *inputs), everything)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("config", VARIANTS[1:])
def test_weights_of_zero_are_aft_simple(config, causal):
    attention, inputs = build(config, causal)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.zero_()
    simple, _ = build(SIMPLE, causal)
    same(attention(*inputs), simple(*inputs), inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_over_everything_is_aft_full(causal):
    attention, inputs = build(aft.Config(window=2 * TIME, max_length=TIME), causal)
    expected = dense(attention, *inputs)
    same(attention(*inputs), expected, [*inputs, *attention.parameters()])


@pytest.mark.parametrize("causal", [True, False])
def test_constant_keys_give_the_mean(causal):
    attention, (q, k, v) = build(SIMPLE, causal)
    count = torch.arange(1, TIME + 1).double()[:, None, None]
    mean = v.cumsum(1) / count if causal else v.mean(1, keepdim=True).expand_as(v)
    y = attention(q, torch.full_like(k, 3.0), v)
    assert_close(y, q.sigmoid() * mean.repeat_interleave(2, 2), **EXACT)


@pytest.mark.parametrize(("config", "causal"), MODES)
@pytest.mark.parametrize("constant", [5.0, 700.0])
def test_a_constant_added_to_all_keys_changes_nothing(config, causal, constant):
    """exp(700) squared would be inf in float64."""
    attention, (q, k, v) = build(config, causal)
    y = attention(q, k, v)
    # 700 + k has 13 digits of k left.
    assert_close(attention(q, k + constant, v), y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("config", "causal"), MODES)
def test_constant_values_come_back_gated(config, causal):
    """The output is sigmoid(q) times the constant: the declared exception to the law of constant values."""
    attention, (q, k, v) = build(config, causal)
    y = attention(q, k, torch.full_like(v, 3.0))
    assert_close(y, 3 * q.sigmoid(), **EXACT)


def test_the_order_of_keys_matters_only_where_places_have_weights():
    order = torch.randperm(TIME, generator=torch.Generator().manual_seed(0))
    for config in VARIANTS:
        attention, (q, k, v) = build(config, False)
        change = (attention(q, k[:, order], v[:, order]) - attention(q, k, v)).abs().max()
        assert change < 1e-12 if config is SIMPLE else change > 0.01


@pytest.mark.parametrize(("config", "causal"), MODES)
def test_defect_04_a_large_key_leaves_earlier_tokens_alone(config, causal):
    """With the maximum of the whole sequence subtracted, the sums of every earlier token would be 0 / 0."""
    case = Case("aft", config, causal, **SHAPE)
    attention, inputs = case.build().float(), [x.detach().float() for x in case.draw()]
    inputs[1][:, 6] += 200
    inputs[1][:, 12:] += 900
    inputs = [x.requires_grad_() for x in inputs]
    y = attention(*inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = dense(attention.double(), *exact)
    assert_close(y.double(), expected, rtol=1e-3, atol=1e-4)  # 900 + k has 4 digits of k left
    for a, e in zip(gradients(y, inputs), gradients(expected, exact), strict=True):
        assert_close(a.double(), e, rtol=1e-3, atol=1e-3)  # as above, in sums of 19


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_is_subtracted(causal):
    """A place with weight exp(-30) holds a key of 25: what is left of 1 - 1 in float32 would be noise."""
    config = aft.Config(window=1, max_length=TIME)
    case = Case("aft", config, causal, **SHAPE)
    attention, (q, k, v) = case.build().float(), [x.detach().float() for x in case.draw()]
    with torch.no_grad():
        attention.bias.fill_(-30.0)
        k += 25 * (torch.arange(TIME) == 9)[:, None, None]
    y, expected = attention(q, k, v), dense(attention.double(), *(x.double() for x in (q, k, v)))
    assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [300.0, -300.0])
@pytest.mark.parametrize("causal", [True, False])
def test_large_weights_of_either_sign(causal, scale):
    attention, inputs = build(aft.Config(window=TIME, max_length=TIME), causal)
    with torch.no_grad():
        attention.bias.fill_(scale)
    same(attention(*inputs), dense(attention, *inputs), inputs)


def test_defect_07_a_state_serves_two_continuations():
    attention, (q, k, v) = build(SIMPLE, True)
    _, state = attention.extend(q[:, :9], k[:, :9], v[:, :9], attention.start(2, dtype=torch.float64))
    kept = [x.clone() for x in state]
    first, _ = attention.extend(q[:, 9:], k[:, 9:], v[:, 9:], state)
    stepped, _ = extend_by_steps(attention, q[:, 9:], k[:, 9:], v[:, 9:], state)
    assert_close(first, stepped, **EXACT)
    assert_close(list(state), kept, rtol=0, atol=0)


@pytest.mark.parametrize(("config", "causal"), MODES)
def test_defect_01_padding_is_in_neither_sum(config, causal):
    """Nor does a padded key, however large, become the maximum."""
    attention, (q, k, v) = build(config, causal)
    mask = torch.rand(2, TIME, generator=torch.Generator().manual_seed(3)) > 0.4
    broken = k.masked_fill(~mask[..., None, None], 1e30)
    y = attention(q, broken, v, mask=mask)
    for i in range(2):
        alone = dense(attention, *(x[i : i + 1, mask[i]] for x in (q, k, v)))
        assert_close(y[i, mask[i]], alone[0], **EXACT)


@pytest.mark.parametrize(("config", "causal"), MODES[2:])
def test_gradcheck(config, causal):
    attention, _ = build(config, causal)
    q, k, v = (
        x.detach()[:1, :6, :1, :2].requires_grad_() for x in Case("aft", config, causal, **SHAPE).draw()
    )
    small = config.build(heads=1, dim=2, causal=causal).double()
    small.load_state_dict(attention.state_dict())
    assert torch.autograd.gradcheck(small, (q, k, v), atol=1e-6, eps=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0, "max_length": 8}, "window must be at least 1, got 0"),
        ({"window": 4, "max_length": 0}, "max_length must be at least 1, got 0"),
        ({"window": 4, "max_length": 8, "rank": 0}, "rank must be at least 1, got 0"),
        ({"window": 4}, "window and max_length go together, got window=4, max_length=None"),
        ({"max_length": 4}, "window and max_length go together, got window=None, max_length=4"),
        ({"rank": 4}, "rank needs a window, got rank=4 and window=None"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        aft.Config(**options)


def test_values_have_the_width_of_keys():
    with pytest.raises(ValueError, match=r"'aft' weighs each channel .* must be dim=6, got 4"):
        SIMPLE.build(heads=2, dim=6, value_dim=4, causal=True)


def test_too_long_for_its_weights():
    attention = aft.Config(window=2, max_length=TIME - 1).build(heads=4, kv_heads=2, dim=6, causal=True)
    q, k, v = (x.float() for x in Case("aft", SIMPLE, True, **SHAPE).draw())
    with pytest.raises(ValueError, match="'aft' has weights for max_length=18 tokens, got t=19"):
        attention(q, k, v)


def test_places_of_its_own_take_no_rotation():
    case = Case("aft", SIMPLE, True, rotary=True, **SHAPE)
    q, k, v = case.draw()
    with pytest.raises(ValueError, match="'aft' has positions of its own"):
        case.build()(q, k, v, rope=case.rope(0, TIME))


def test_a_window_has_no_recurrent_and_no_cross_form():
    attention, (q, k, v) = build(LOCAL, True)
    assert not attention.can.recurrent
    for call in (
        lambda: attention.start(2),
        lambda: attention.extend(q, k, v, None),
        lambda: attention.step(q[:, :1], k[:, :1], v[:, :1], None),
    ):
        with pytest.raises(ValueError, match="'aft' has no recurrent form"):
            call()
    attention, _ = build(LOCAL, False)
    for call in (lambda: attention.encode_memory(k, v), lambda: attention.cross_attend(q, None)):
        with pytest.raises(ValueError, match="'aft' has no cross form"):
            call()
    simple, _ = build(SIMPLE, False)
    with pytest.raises(TypeError, match="memory must be a ExpSums, from encode_memory, got Tensor"):
        simple.cross_attend(q, k)

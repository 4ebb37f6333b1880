"""Linformer: its dense definition, its limits, lengths and weights, what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lintra import checkpoint
from lintra.attention import linformer
from lintra.attention.linformer import Config, LinformerAttention
from lintra.nn import AttentionLayer
from lintra.testing.laws import EXACT, Case, forward, gradients

VARIANTS = [
    Config(max_length=16_384, rank=5),
    Config(max_length=64, rank=30, sharing="none", scale=0.3),  # more rows than tokens
    Config(max_length=64, rank=7, sharing="key-value"),
    Config(max_length=64, rank=20, projection="mean"),
    Config(max_length=64, rank=20, projection="max"),
    Config(max_length=64, rank=20, projection="convolution", sharing="none"),
]


def dense(attention: LinformerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation 7, every projected row from all its tokens, head by head."""
    config, group = attention.config, attention.heads // attention.kv_heads
    scale = q.shape[-1] ** -0.5 if config.scale is None else config.scale
    y = []
    for head in range(attention.heads):
        keys, values = k[:, :, head // group], v[:, :, head // group]
        keys = rows(attention, keys, head // group, 0)
        values = rows(attention, values, head // group, -1)
        weights = (scale * q[:, :, head] @ keys.mT).softmax(-1)
        y.append(weights @ values)
    return torch.stack(y, 2)


def rows(attention: LinformerAttention, x: Tensor, head: int, which: int) -> Tensor:
    """x [b s w] of one head -> [b r w]."""
    config, weight = attention.config, torch.empty(0)
    if len(attention.projections):
        weight = attention.projections[which]
        weight = weight[head] if config.sharing == "none" else weight
    if config.projection == "learned":
        return weight[:, : x.shape[1]] @ x
    pool = {
        "mean": lambda piece: piece.mean(1),
        "max": lambda piece: piece.max(1).values,
        "convolution": lambda piece: weight[: piece.shape[1]] @ piece,
    }[config.projection]
    return torch.stack([pool(piece) for piece in x.split(config.window, 1)], 1)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v)


def build(config: Config, weight: Tensor | None = None, **shape) -> LinformerAttention:
    """The mechanism as the laws build it, with `weight` for every projection."""
    attention = Case("linformer", config, False).build(**shape)
    with torch.no_grad():
        for each in attention.projections:
            if weight is not None:
                each.copy_(weight.expand_as(each))
    return attention


@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value"])
def test_a_row_for_every_token_is_softmax(sharing):
    q, k, v = inputs = Case("linformer", VARIANTS[0], False).draw()
    config = Config(max_length=19, rank=19, sharing=sharing)
    y = build(config, torch.eye(19, dtype=torch.float64))(q, k, v)
    assert_close(y, exact(q, k, v), **EXACT)
    assert_close(gradients(y, inputs), gradients(exact(q, k, v), inputs), **EXACT)


@pytest.mark.parametrize("projection", ["mean", "max"])
@pytest.mark.parametrize("rank", [19, 50])
def test_windows_of_one_token_are_softmax(projection, rank):
    q, k, v = inputs = Case("linformer", VARIANTS[0], False).draw()
    y = build(Config(max_length=19, rank=rank, projection=projection))(q, k, v)
    assert_close(y, exact(q, k, v), **EXACT)
    assert_close(gradients(y, inputs), gradients(exact(q, k, v), inputs), **EXACT)


def test_rows_that_select_tokens_are_softmax_over_them():
    q, k, v = inputs = Case("linformer", VARIANTS[0], False).draw()
    chosen = torch.tensor([2, 3, 11, 18])
    y = build(Config(max_length=30, rank=4), torch.eye(30, dtype=torch.float64)[chosen])(q, k, v)
    expected = exact(q, k[:, chosen], v[:, chosen])
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


def test_a_convolution_of_equal_weights_is_the_mean():
    q, k, v = Case("linformer", VARIANTS[0], False).draw()
    q, k, v = q[:, :18], k[:, :18], v[:, :18]  # whole windows only: a mean is over the tokens that exist
    mean = build(Config(max_length=18, rank=6, projection="mean"))
    convolution = build(Config(max_length=18, rank=6, projection="convolution"), torch.tensor(1 / 3))
    assert_close(convolution(q, k, v), mean(q, k, v), rtol=1e-7, atol=1e-7)  # 1/3 is a float32 here


def test_a_short_sequence_is_a_long_one_with_zeros():
    """The learned rows of n tokens use the first n columns; nothing is rescaled."""
    attention = build(VARIANTS[2])
    q, k, v = Case("linformer", VARIANTS[2], False).draw()
    zeros = [torch.cat((x, torch.zeros_like(x)), 1) for x in (k, v)]
    y = attention.cross_attend(q, attention.encode_memory(*zeros))
    assert_close(attention(q, k, v), y, **EXACT)


def test_gradients_reach_the_used_columns_alone():
    attention, inputs = build(VARIANTS[0]), Case("linformer", VARIANTS[0], False).draw()
    for g in gradients(attention(*inputs), list(attention.parameters())):
        assert (g[:, :19] != 0).all()
        assert (g[:, 19:] == 0).all()


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"sharing": "none"}, 2 * 3 * 7 * 40),
        ({"sharing": "headwise"}, 2 * 7 * 40),
        ({"sharing": "key-value"}, 7 * 40),
        ({"projection": "mean"}, 0),
        ({"projection": "max"}, 0),
        ({"projection": "convolution", "sharing": "none"}, 2 * 3 * 6),
        ({"projection": "convolution", "sharing": "key-value"}, 6),
    ],
)
def test_how_many_numbers_are_learned(options, numbers):
    attention = Config(max_length=40, rank=7, **options).build(heads=6, kv_heads=3, dim=4, causal=False)
    assert sum(x.numel() for x in attention.parameters()) == numbers
    kept = [x.data_ptr() for x in attention.state_dict().values()]
    assert len(set(kept)) == len(kept)  # a file holds each of them once


@pytest.mark.parametrize(("options", "bound"), [({}, 64), ({"projection": "convolution"}, 8)])
def test_weights_begin_in_a_symmetric_interval(options, bound):
    torch.manual_seed(0)
    config = Config(max_length=512, rank=64, **options)
    drawn = config.build(heads=2, dim=4, causal=False).projections[0] * bound**0.5
    assert drawn.abs().max() <= 1
    assert drawn.abs().max() > 0.6  # 8 numbers all stay below by a chance of 0.6^8 = 0.02, seeded


def test_places_matter():
    """Another order of the keys gives another result, unless the columns of E and F are permuted too."""
    attention, (q, k, v) = build(VARIANTS[2]), Case("linformer", VARIANTS[2], False).draw()
    order = torch.randperm(19, generator=torch.Generator().manual_seed(0))
    y = attention(q, k, v)
    assert not torch.allclose(attention(q, k[:, order], v[:, order]), y, rtol=1e-3)
    with torch.no_grad():
        attention.projections[0][:, :19] = attention.projections[0][:, order]
    assert_close(attention(q, k[:, order], v[:, order]), y, **EXACT)


def test_the_memory_has_the_same_size_for_any_length():
    attention = build(VARIANTS[0])
    for time in (1, 100, 3000):
        k, v = (x[:1].detach() for x in Case("linformer", VARIANTS[0], False).draw(time)[1:])
        memory = attention.encode_memory(k, v)
        assert memory.k.shape == (1, 5, 2, 6)
        assert memory.v.shape == (1, 5, 2, 4)


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_hard_inputs(config):
    """One token; all keys equal; one real key; rows of zeros; large norms."""
    case = Case("linformer", config, False)
    q, k, v = case.draw()
    attention = case.build()
    equal = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    for inputs in (
        (q[:, :1], k[:, :1], v[:, :1]),
        (q, *equal),
        (torch.zeros_like(q), torch.zeros_like(k), v),
        (1e3 * q, 1e3 * k, v),
    ):
        y, expected = attention(*inputs), dense(attention, *inputs)
        assert_close(y, expected, **EXACT)
        assert all(g.isfinite().all() for g in gradients(y, [q, k, v]))
    mask = torch.zeros(2, 19, dtype=torch.bool)
    mask[:, 11] = True
    y = forward(case, attention, q, k, v, mask=mask)
    assert_close(y[:, 11:12], dense(attention, *(x[:, 11:12] for x in (q, k, v))), **EXACT)


def test_a_longer_sequence_is_refused():
    attention, (q, k, v) = build(Config(max_length=18)), Case("linformer", VARIANTS[0], False).draw()
    for call in (lambda: attention(q, k, v), lambda: attention.encode_memory(k, v)):
        with pytest.raises(ValueError, match="max_length=18 tokens, got 19"):
            call()
    attention(*(x[:, :18] for x in (q, k, v)))


def test_causal_is_refused():
    with pytest.raises(ValueError, match=r"'linformer' .* has no causal form, got causal=True"):
        Config().build(heads=2, dim=4, causal=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_length", 0),
        ("rank", 0),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("scale", float("nan")),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*{value}"):
        Config(**{field: value})


@pytest.mark.parametrize("projection", ["mean", "max"])
def test_nothing_learned_is_nothing_shared(projection):
    with pytest.raises(ValueError, match=f"sharing .* projection='{projection}' .* got 'none'"):
        Config(projection=projection, sharing="none")


def test_names_of_choices_are_checked():
    with pytest.raises(TypeError, match=r"projection must be 'learned' or .* got 'median'"):
        Config(projection="median")
    with pytest.raises(TypeError, match=r"sharing must be 'none' or .* got 'layerwise'"):
        Config(sharing="layerwise")


def test_dropout_acts_in_training_only():
    q, k, v = Case("linformer", VARIANTS[0], False).draw()
    attention = build(Config(max_length=19, rank=5, dropout=0.5))
    whole = build(Config(max_length=19, rank=5))(q, k, v)
    assert not torch.allclose(attention(q, k, v), whole)
    assert_close(attention.eval()(q, k, v), whole, **EXACT)


def test_a_memory_is_of_this_mechanism():
    attention, (q, k, v) = build(VARIANTS[0]), Case("linformer", VARIANTS[0], False).draw()
    with pytest.raises(TypeError, match="memory must be a LinformerMemory, from encode_memory, got tuple"):
        attention.cross_attend(q, (k, v))
    with pytest.raises(NotImplementedError, match="no recurrent form"):
        attention.start(1)


@pytest.mark.parametrize("config", VARIANTS[:1] + VARIANTS[3:], ids=str)
def test_autocast(config):
    torch.manual_seed(0)
    heads, x = AttentionLayer(8, config, heads=2, causal=False), torch.randn(2, 19, 8)
    mask = torch.arange(19) < torch.tensor([[19], [12]])
    expected = heads(x, mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        y = heads(x, mask=mask)
        read = heads.cross_attend(x, heads.encode_memory(x, mask), mask)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), expected, rtol=0.05, atol=0.03)  # rounded to 8 bits a few times
    assert_close(read, y, rtol=0.05, atol=0.03)


def test_defect_02_a_mask_is_not_ignored():
    """Padding is part of no row, wherever it stands."""
    for config in VARIANTS:
        attention, (q, k, v) = build(config), Case("linformer", config, False).draw()
        mask = torch.ones(2, 19, dtype=torch.bool)
        mask[:, [0, 4, 18]] = False
        real = [x[:, mask[0]] for x in (q, k, v)]
        assert_close(attention(q, k, v, mask=mask)[:, mask[0]], attention(*real), **EXACT)


def test_projections_do_not_leak_between_models():
    one, other = build(VARIANTS[0]), build(VARIANTS[0])
    before = other.projections[0].clone()
    with torch.no_grad():
        one.projections[0].zero_()
    assert torch.equal(other.projections[0], before)


def test_a_shared_projection_leaves_keys_and_values_apart():
    """sharing="key-value" makes E and F one matrix; it is still applied to keys and to values separately."""
    attention, (_, k, v) = build(VARIANTS[2]), Case("linformer", VARIANTS[2], False).draw()
    memory = attention.encode_memory(k, v)
    weight = attention.projections[0][:, :19]
    assert len(attention.projections) == 1
    assert_close(memory.k, torch.einsum("rs,bsgd->brgd", weight, k), **EXACT)
    assert_close(memory.v, torch.einsum("rs,bsge->brge", weight, v), **EXACT)


@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value"])
def test_weights_survive_a_file(sharing, tmp_path):
    """safetensors refuses a tensor that occurs twice."""
    attention = build(Config(max_length=19, rank=3, sharing=sharing))
    other = build(Config(max_length=19, rank=3, sharing=sharing))
    checkpoint.save_file(attention.state_dict(), tmp_path / "weights")
    with torch.no_grad():
        for x in other.parameters():
            x.zero_()
    other.load_state_dict(checkpoint.read_tensors(tmp_path / "weights"))
    for one, two in zip(attention.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_configuration_survives_json():
    content = checkpoint.to_json(VARIANTS[5])
    assert checkpoint.from_json(linformer.Config, content, "attention") == VARIANTS[5]

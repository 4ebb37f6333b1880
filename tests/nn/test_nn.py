"""The layers around a mechanism: shapes in a custom network, padding, extend = forward."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

from lintra.attention import Attention, Capabilities, linear, longformer, softmax
from lintra.nn import (
    MLP,
    AttentionLayer,
    Block,
    Learned,
    LogisticMixture,
    Logits,
    Sinusoidal,
    lengths_to_mask,
)
from lintra.nn.block import build_norm
from lintra.nn.mask import padded
from lintra.nn.position import Grid
from lintra.ops.layout import Layout
from lintra.ops.rope import RotaryEmbedding

EXACT = {"rtol": 1e-9, "atol": 1e-11}


class Forgetting(Attention):
    """A test mechanism that reads a gate from the layer's input and has only a step."""

    paper = "none"
    can = Capabilities(
        causal=True, bidirectional=False, cross=False, recurrent=True, state="constant", cost="O(t d)"
    )

    def extra_inputs(self):
        return {"gate": self.heads}

    def start(self, batch, *, device=None, dtype=None):
        return (torch.zeros(batch, self.heads, self.value_dim, device=device, dtype=dtype),)

    def _step(self, q, k, v, state, *, gate):
        kept = torch.sigmoid(gate[:, 0])[..., None] * state[0] + v[:, 0]
        return kept[:, None], (kept,)


class ForgettingConfig:
    def build(self, **shape):
        return Forgetting(self, **shape)


def layers():
    for attention in (linear.Config(), softmax.Config(), softmax.Config(window=3), ForgettingConfig()):
        for rotary in (None, 100.0):
            yield AttentionLayer(16, attention, heads=4, rope_base=rotary)
            for norm, kind, feed in (("pre", "layer", "gelu"), ("post", "rms", "swiglu")):
                heads = AttentionLayer(16, attention, heads=4, rope_base=rotary, bias=False)
                yield Block(heads, MLP(16, activation=feed), width=16, norm=norm, norm_kind=kind)


@pytest.mark.parametrize("layer", list(layers()), ids=lambda layer: type(layer).__name__)
def test_extend_is_forward_wherever_it_is_split(layer):
    layer = layer.double()
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    expected = layer(x)
    assert expected.shape == x.shape
    state, ys = None, []
    for part in x.split((4, 1, 6), 1):
        y, state = layer.extend(part, state)
        ys.append(y)
    assert_close(torch.cat(ys, 1), expected, **EXACT)


@pytest.mark.parametrize("layer", list(layers()), ids=lambda layer: type(layer).__name__)
def test_packed_sequences_are_each_alone(layer):
    """In one row and in two; the second row continues from the states of the first."""
    layer, first, second = layer.double(), [3, 0, 5], [1, 2, 0]
    parts = [torch.randn(1, n, 16, dtype=torch.float64) for n in (4, 2, 5)]
    early, late = zip(
        *(part.split(n, 1) for part, n in zip(parts, zip(first, second, strict=True), strict=True)),
        strict=True,
    )
    y, state = layer.extend(torch.cat(early, 1), cu_seqlens=torch.tensor([0, 3, 3, 8]))
    z, _ = layer.extend(torch.cat(late, 1), state, cu_seqlens=torch.tensor([0, 1, 3, 3]))
    alone = [layer(part) for part in parts]
    assert_close(
        layer(torch.cat(parts, 1), cu_seqlens=torch.tensor([0, 4, 6, 11])), torch.cat(alone, 1), **EXACT
    )
    cut = zip(
        *(part.split(n, 1) for part, n in zip(alone, zip(first, second, strict=True), strict=True)),
        strict=True,
    )
    assert_close([y, z], [torch.cat(part, 1) for part in cut], **EXACT)
    with pytest.raises(ValueError, match="cu_seqlens and mask exclude each other"):
        layer(parts[0], mask=torch.ones(1, 4, dtype=torch.bool), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="state is for 3 sequences, x for 1"):
        layer.extend(parts[0], state, cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("layer", list(layers()), ids=lambda layer: type(layer).__name__)
def test_padding_changes_nothing_and_gives_zero(layer):
    """Including NaN, in values and in every gradient."""
    layer = layer.double()
    mask = torch.tensor([[True] * 3 + [False] * 2 + [True] * 3, [False] * 4 + [True] * 4])
    x = torch.randn(2, 8, 16, dtype=torch.float64)

    def run(filling):
        given = x.masked_fill(~mask[..., None], filling).requires_grad_()
        y = layer(given, mask=mask)
        return y, torch.autograd.grad(y.square().sum(), [given, *layer.parameters()], allow_unused=True)

    clean, clean_gradients = run(0.0)
    assert (clean[~mask] == 0).all()
    assert (clean_gradients[0][~mask] == 0).all()
    dirty, gradients = run(torch.nan)
    assert_close(dirty, clean, rtol=0, atol=0)
    for a, b in zip(gradients, clean_gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, rtol=0, atol=0)
    alone = layer(x[1:, mask[1]])
    assert_close(clean[1:, mask[1]], alone, **EXACT)


def test_what_is_read_in_padded_places_changes_nothing():
    """A NaN gate there reaches neither values nor gradients of real tokens."""
    attention = Forgetting(None, heads=2, dim=3, causal=True).double()
    mask = torch.tensor([[True, True, False, True]])
    inputs = [torch.randn(1, 4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    gate = torch.randn(1, 4, 2, dtype=torch.float64)

    def run(filling):
        filled = gate.masked_fill(~mask[..., None], filling).requires_grad_()
        y = attention(*inputs, mask=mask, gate=filled)
        return y, torch.autograd.grad(y.square().sum(), [inputs[2], filled])

    for a, b in zip(run(torch.nan), run(0.0), strict=True):
        assert_close(a, b, rtol=0, atol=0)


def test_what_is_given_at_each_call_reaches_a_mechanism_after_a_state():
    torch.manual_seed(0)
    config = longformer.Config(window=2, global_projections=True)
    block = Block(AttentionLayer(16, config, heads=2), MLP(16), width=16).double()
    x, chosen = torch.randn(2, 9, 16, dtype=torch.float64), torch.rand(2, 9) > 0.6
    y, state = block.extend(x[:, :4], global_mask=chosen[:, :4])
    later, _ = block.extend(x[:, 4:], state, global_mask=chosen[:, 4:])
    assert_close(torch.cat((y, later), 1), block(x, global_mask=chosen), **EXACT)
    assert not torch.allclose(block(x), block(x, global_mask=chosen))


def test_cross_attention_reads_another_sequence():
    heads = AttentionLayer(16, linear.Config(), heads=4, kv_heads=2, causal=False).double()
    x, source = torch.randn(2, 3, 16).double(), torch.randn(2, 9, 16).double()
    mask = lengths_to_mask(torch.tensor([9, 4]))
    y = heads.cross_attend(x, heads.encode_memory(source, mask))
    assert y.shape == x.shape
    assert_close(y[1:], heads.cross_attend(x[1:], heads.encode_memory(source[1:, :4])), **EXACT)


class LowRank(nn.Module):
    """A linear map plus a trainable product of two thin ones; the map itself is usually frozen."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Twice(nn.Module):
    """A parametrization for `parametrize`."""

    def forward(self, x):
        return 2 * x


def replaced(heads, how):
    """`heads` with another map as qkv_proj, and the equivalent linear map."""
    qkv_proj = heads.qkv_proj
    same = nn.Linear(qkv_proj.in_features, qkv_proj.out_features).double()
    with torch.no_grad():
        if how == "wrapper":
            heads.qkv_proj = LowRank(qkv_proj).double()
            up, down = heads.qkv_proj.up, heads.qkv_proj.down
            same.weight.copy_(qkv_proj.weight + up.weight @ down.weight)
            same.bias.copy_(qkv_proj.bias + up.weight @ down.bias + up.bias)
        else:
            same.weight.copy_(2 * qkv_proj.weight)
            same.bias.copy_((2 if how != "parametrization" else 1) * qkv_proj.bias)
    if how == "hook":
        qkv_proj.register_forward_hook(lambda module, args, y: 2 * y)
    if how == "hook before":
        same.bias.data.copy_(qkv_proj.bias)
        qkv_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    if how == "method":
        qkv_proj.forward = lambda x, call=qkv_proj.forward: 2 * call(x)
    if how == "parametrization":
        parametrize.register_parametrization(qkv_proj, "weight", Twice())
    return same


@pytest.mark.parametrize("how", ["wrapper", "hook", "hook before", "method", "parametrization"])
@pytest.mark.parametrize("mechanism", [linear.Config(), softmax.Config()])
def test_what_stands_in_place_of_a_projection_serves_every_verb(how, mechanism):
    """A whole sequence, a continuation and another sequence: the same as with one linear map."""
    x, source = torch.randn(2, 3, 16).double(), torch.randn(2, 9, 16).double()
    for causal in (True, False):
        heads, expected = (
            AttentionLayer(16, mechanism, heads=4, kv_heads=2, causal=causal).double() for _ in range(2)
        )
        same = replaced(heads, how)
        expected.out_proj.load_state_dict(heads.out_proj.state_dict())
        expected.qkv_proj = same
        assert_close(heads(x), expected(x), **EXACT)
        if causal:
            assert_close(heads.extend(x)[0], expected.extend(x)[0], **EXACT)
        else:
            found = heads.cross_attend(x, heads.encode_memory(source))
            assert_close(found, expected.cross_attend(x, expected.encode_memory(source)), **EXACT)


@pytest.mark.parametrize(("kind", "eps"), [("layer", 1e-5), ("rms", 1e-6)])
def test_norms_of_small_numbers(kind, eps):
    x = 1e-3 * torch.randn(3, 16, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    assert_close(build_norm(kind, 16).double()(x), expected, **EXACT)


def test_one_head_of_the_full_width_is_the_mechanism_itself():
    heads = AttentionLayer(6, softmax.Config(), heads=1).double()
    with torch.no_grad():
        for linear_layer in (heads.qkv_proj, heads.out_proj):
            linear_layer.weight.copy_(torch.eye(6).repeat(linear_layer.out_features // 6, 1))
            linear_layer.bias.zero_()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    each = x[:, :, None]
    assert_close(heads(x), heads.attention(each, each, each)[:, :, 0], **EXACT)


def test_rotary_depends_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 2, 8, dtype=torch.float64)

    def score(i, j):
        return (
            RotaryEmbedding(torch.tensor([[i]]), 100.0)(q) * RotaryEmbedding(torch.tensor([[j]]), 100.0)(k)
        ).sum(-1)

    assert_close(score(5, 3), score(1_002, 1_000), **EXACT)
    assert not torch.allclose(score(5, 3), score(5, 4))
    assert_close(score(7, 7), (q * k).sum(-1), **EXACT)


def test_sinusoidal_is_the_formula():
    code = Sinusoidal(8)(torch.tensor([[0, 1, 999]]))
    for p, row in zip((0, 1, 999), code[0], strict=True):
        for i in range(4):
            angle = p / 10_000 ** (2 * i / 8)
            assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-9)
            assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-9)


def test_positions_that_samples_share_have_the_same_code():
    """Codes are looked up if positions are shared, and computed one by one if they are far apart."""
    shared, apart = torch.tensor([[0, 1, 2], [3, 2, 1], [5, 5, 5]]), torch.tensor([[7, 1], [90_000, 3]])
    x = torch.randn(3, 3, 1, 8, dtype=torch.float64)
    for position in (shared, apart, shared[:1], shared[:, :1], shared[:, :0]):
        code = Sinusoidal(8)(position)
        rotated = RotaryEmbedding(position, 100.0)(x[: len(position), : position.shape[1]])
        for (i, j), place in zip(
            itertools.product(*map(range, position.shape)), position.flatten(), strict=True
        ):
            assert_close(code[i, j], Sinusoidal(8)(place.reshape(1, 1))[0, 0], rtol=0, atol=1e-15)
            alone = RotaryEmbedding(place.reshape(1, 1), 100.0)(x[i : i + 1, j : j + 1])
            assert_close(rotated[i, j], alone[0, 0], rtol=0, atol=1e-14)


def test_learned_positions_end():
    positions = Learned(4, 8)
    with pytest.raises(ValueError, match="max_length=4 reach 4 tokens, got token 5"):
        positions(torch.tensor([[3, 4]]))


def test_a_grid_adds_up_its_axes():
    grid = Grid((2, 3, 4), 8)
    code = grid(torch.arange(24)[None]).unflatten(1, (2, 3, 4))[0]
    rows, columns, channels = (table.weight for table in grid.tables)
    torch.testing.assert_close(code, rows[:, None, None] + columns[:, None] + channels)
    with pytest.raises(ValueError, match=r"a grid of \(2, 3, 4\) reach 24 tokens, got token 25"):
        grid(torch.tensor([[24]]))


@pytest.mark.parametrize("positions", [Learned(4, 8), Grid((2, 2), 8)])
def test_past_the_last_position_is_nan_where_nobody_looks(positions):
    """In a graph, as on a GPU, where reading values would stall; no position is ever reused."""
    here = torch.tensor([[0, 3, 4, 9]])
    code = torch.compile(positions, backend="eager", fullgraph=True)(here)
    assert torch.equal(code[:, :2], positions(here[:, :2]))
    assert code[:, 2:].isnan().all()


def test_lengths_to_mask():
    expected = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    assert torch.equal(lengths_to_mask(torch.tensor([2, 0, 3])), expected)
    assert lengths_to_mask(torch.tensor([1]), 4).shape == (1, 4)
    for lengths, time in (([5], 4), ([-1], 4)):
        with pytest.raises(ValueError, match="lengths must be between 0 and 4"):
            lengths_to_mask(torch.tensor(lengths), time)
    with pytest.raises(ValueError, match="lengths must be integers"):
        lengths_to_mask(torch.tensor([1.5]))


def test_sequences_are_padded_to_a_batch():
    parts = [torch.ones(n, 2, dtype=torch.float64) for n in (2, 0, 3)]
    x, mask = padded(parts)
    assert torch.equal(mask, lengths_to_mask(torch.tensor([2, 0, 3])))
    assert torch.equal(x, mask[..., None].expand(3, 3, 2).double())


def test_a_step_is_one_causal_token():
    for config in (linear.Config(), softmax.Config()):
        q = torch.zeros(1, 2, 2, 4)
        attention = config.build(heads=2, dim=4, causal=True)
        with pytest.raises(ValueError, match="step takes one token, got t=2"):
            attention.step(q, q, q, attention.start(1))
        with pytest.raises(ValueError, match="causal=True"):
            config.build(heads=2, dim=4, causal=False).step(q, q, q, attention.start(1))


def test_logits_are_a_softmax():
    params = torch.randn(5, 9)
    expected = params.log_softmax(-1)
    distribution = Logits().build(9)
    assert_close(distribution.log_probs(params), expected)
    target = torch.arange(5)
    assert_close(distribution.log_prob(params, target), expected[torch.arange(5), target])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AttentionLayer(10, linear.Config(), heads=3),
            "width must be a multiple of heads, got 10 and 3",
        ),
        (
            lambda: AttentionLayer(10, linear.Config(), heads=3, head_dim=0),
            "head_dim must be at least 1, got 0",
        ),
        (
            lambda: AttentionLayer(12, linear.Config(), heads=4, kv_heads=3),
            "multiple of the key-value heads, got h=4, g=3",
        ),
        (
            lambda: AttentionLayer(12, linear.Config(), heads=4, rope_base=100.0),
            "even head size, got 100.0 and 3",
        ),
        (lambda: MLP(8, activation="tanh"), "activation must be one of 'gelu', .*, got 'tanh'"),
        (lambda: MLP(8, ratio=0), "ratio must give at least one hidden unit"),
        (lambda: Block(nn.Identity(), MLP(8), width=8, norm="mid"), "norm must be 'pre' or 'post'"),
        (lambda: Block(nn.Identity(), MLP(8), width=8, norm_kind="batch"), "norm_kind must be"),
        (lambda: Sinusoidal(7), "even width, got 7"),
        (lambda: LogisticMixture(components=0), "components must be at least 1, got 0"),
        (lambda: LogisticMixture().build(1), "vocabulary of at least 2, got 1"),
        (lambda: AttentionLayer(8, linear.Config(), heads=2)(torch.zeros(2, 3, 9)), "x must be .*c=8"),
        (lambda: AttentionLayer(8, ForgettingConfig(), heads=2, causal=False), "causal only"),
        (
            lambda: AttentionLayer(8, linear.Config(), heads=2, causal=False).start(1),
            "start, .* built with causal",
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("attention", ["linear", linear, linear.Config, None, {"name": "linear"}])
def test_a_mechanism_is_given_by_its_config(attention):
    with pytest.raises(TypeError, match="attention must be a mechanism's configuration, such as linear"):
        AttentionLayer(8, attention, heads=2)


@pytest.mark.parametrize(
    ("width", "heads", "message"),
    [
        ("16", 4, "width must be int, got '16'"),
        (16.0, 4, r"width must be int, got 16\.0"),
        (16, "4", "heads must"),
    ],
)
def test_sizes_of_a_layer_are_whole_numbers(width, heads, message):
    with pytest.raises(TypeError, match=message):
        AttentionLayer(width, linear.Config(), heads=heads)


def test_a_block_has_the_width_of_its_layer():
    with pytest.raises(ValueError, match="attn must be of width 8, got 16"):
        Block(AttentionLayer(16, linear.Config(), heads=4), MLP(8), width=8)


@pytest.mark.parametrize("mix", [linear.Config(), linear.Config().build(heads=2, dim=4, causal=True)])
def test_a_block_mixes_by_heads(mix):
    with pytest.raises(TypeError, match="attn must be a module x -> x, such as AttentionLayer, got"):
        Block(mix, MLP(8), width=8)


@pytest.mark.parametrize("lengths", [[3, 2], (3, 2)])
def test_lengths_are_a_tensor(lengths):
    with pytest.raises(TypeError, match="lengths must be a tensor of integers"):
        lengths_to_mask(lengths)


def test_a_state_of_another_batch_is_refused():
    heads = AttentionLayer(8, linear.Config(), heads=2)
    with pytest.raises(ValueError, match="state is for 3 sequences, x for 2"):
        heads.extend(torch.zeros(2, 1, 8), heads.start(3))


def test_a_layout_of_another_batch_is_refused():
    layer = AttentionLayer(16, linear.Config(), heads=2)
    block, x = Block(AttentionLayer(16, linear.Config(), heads=2), MLP(16), width=16), torch.randn(2, 5, 16)
    for layout in (Layout.of("x", x[:1]), Layout.of("x", x[:, :4])):
        for module in (layer, block):
            with pytest.raises(
                ValueError, match=r"layout is for b=\d and t=\d on cpu, q has shape \[2, 5, 2, 8\]"
            ):
                module(x, layout=layout)
            with pytest.raises(ValueError, match="layout is for b="):
                module.extend(x, layer.start(layout.n), layout=layout)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_dropout_has_a_mode_of_its_own(activation):
    """As for samples of a model in evaluation (Gal and Ghahramani 2016)."""
    mlp = MLP(8, activation=activation, dropout=0.5)
    block = Block(AttentionLayer(8, linear.Config(), heads=2), mlp, width=8, dropout=0.5).eval()
    for part in block.modules():
        if isinstance(part, torch.nn.Dropout):
            part.train()
    x = torch.randn(1, 5, 8)
    assert not torch.equal(block(x), block(x))
    assert not torch.equal(mlp(x), mlp(x))

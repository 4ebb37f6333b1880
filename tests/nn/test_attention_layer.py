"""The parts of a layer around its mechanism: a convolution, unit queries and keys, a gated norm."""

import io

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.testing import assert_close

from lintra import attention, checkpoint
from lintra.attention import delta, linear, retention, softmax, ssd
from lintra.generation import generate
from lintra.generation.native_decode import why_not
from lintra.models import decoder, encoder
from lintra.nn import AttentionLayer, Block
from lintra.ops import Layout
from lintra.testing.laws import EXACT, gradients, some_masks
from tests.attention.test_delta import convolved
from tests.nn.inputs import draw

PARTS = {"conv": 3, "qk_norm": "l2", "output_gate": True}
MECHANISMS = [linear.Config(), softmax.Config(), retention.Config()]
each = pytest.mark.parametrize("config", MECHANISMS, ids=lambda config: type(config).__module__[-7:])


def build(config=MECHANISMS[0], **options):
    torch.manual_seed(0)
    shape = {"heads": 4, "kv_heads": 2, "causal": True, "rope_base": 100.0} | options
    return AttentionLayer(24, config, **shape).double()


def written_out(layer, x):
    """The parts, written out one by one around the mechanism."""
    product = convolved(layer.qkv_proj(x), layer.conv_weight)
    q, k, v = (part.unflatten(2, (-1, layer.dim)) for part in product.split(layer.widths, -1))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    rope = Layout(*x.shape[:2], x.device).rope(layer.rope_base)
    extra = {name: project(x) for name, project in layer.extra_proj.items()}
    y = layer.attention(q, k, v, rope=rope, **extra)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.out_norm
    return layer.out_proj(y.flatten(2) * functional.silu(layer.gate_proj(x)))


@each
def test_they_are_what_they_say(config):
    layer, x = build(config, **PARTS), draw().requires_grad_()
    y, expected = layer(x), written_out(layer, x)
    inputs = [x, *layer.parameters()]
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@each
@pytest.mark.parametrize("part", PARTS)
def test_each_part_may_come_alone(config, part):
    layer, x = build(config, **{part: PARTS[part]}), draw()
    y, state = layer(x), None
    for i in range(0, 9, 2):
        found, state = layer.extend(x[:, i : i + 2], state)
        assert_close(found, y[:, i : i + 2], **EXACT)
    assert (y - build(config)(x)).abs().max() > 1e-3


@each
def test_padding_and_packing_change_nothing(config):
    layer, x = build(config, **PARTS), draw()
    for mask in some_masks(9):
        y = layer(x.masked_fill(~mask[..., None], torch.nan), mask=mask)
        for i, real in enumerate(mask):
            assert_close(y[i, real][None], layer(x[i, real][None]), **EXACT)
            assert not y[i, ~real].any()
    bounds = torch.tensor([0, 4, 4, 9])
    packed = layer(x[:1], cu_seqlens=bounds)
    assert_close(packed, torch.cat((layer(x[:1, :4]), layer(x[:1, 4:])), 1), **EXACT)
    _, state = layer.extend(x[:1], cu_seqlens=bounds)
    assert not state.conv[0][1].any()
    assert_close(state.conv[0][2:], layer.extend(x[:1, 4:])[1].conv[0], **EXACT)


def test_a_layout_follows_what_the_state_has_seen():
    layer, x = build(), draw()
    whole, end = layer.extend(x)
    before, state = layer.extend(x[:, :3], layout=Layout.of("x", x[:, :3]))
    after, state = layer.extend(x[:, 3:], state, layout=Layout.of("x", x[:, 3:]))
    assert_close(torch.cat((before, after), 1), whole, **EXACT)
    assert_close(state, end, **EXACT)


def test_a_state_is_reordered_with_its_convolution():
    layer, x = build(**PARTS), draw(b=3)
    _, state = layer.extend(x[:, :5])
    order = torch.tensor([2, 0])
    y, _ = layer.extend(x[order, 5:], attention.map_state(lambda part: part[order], state))
    assert_close(y, layer(x)[order, 5:], **EXACT)


def test_cross_attention_has_the_norms():
    layer, x = build(causal=False, rope_base=None, qk_norm="l2", output_gate=True), draw()
    assert_close(layer.cross_attend(x, layer.encode_memory(x)), layer(x), **EXACT)


@pytest.mark.parametrize("config", [linear.Config(), softmax.Config()], ids=str)
def test_a_memory_of_other_sequences_is_refused(config):
    layer = AttentionLayer(8, config, heads=2, causal=False)
    with pytest.raises(ValueError, match="memory must be of 4 sequences, as x is, or of one, got 2"):
        layer.cross_attend(torch.randn(4, 5, 8), layer.encode_memory(torch.randn(2, 7, 8)))


@pytest.mark.parametrize("name", [x for x in attention.names() if attention.mechanism(x).can.cross])
def test_a_memory_of_one_sequence_is_read_by_all(name):
    options = {"window": 0} if name == "longshort" else {}  # it has no cross form with a window
    config = attention.for_length(attention.load(name).Config, 8, **options)
    layer = AttentionLayer(8, config, heads=2, causal=False, rope_base=None).double()
    memory = layer.encode_memory(torch.randn(1, 7, 8, dtype=torch.float64))
    x = torch.randn(4, 5, 8, dtype=torch.float64, requires_grad=True)
    alone = torch.cat([layer.cross_attend(row[None], memory) for row in x])
    together = layer.cross_attend(x, memory)
    assert_close(together, alone, **EXACT)
    assert_close(gradients(together, [x]), gradients(alone, [x]), **EXACT)


def test_a_network_has_them_and_keeps_them(tmp_path):
    torch.manual_seed(0)
    config = decoder.Config(vocabulary=11, layers=2, heads=2, width=16, attention=delta.Config(), **PARTS)
    model = config.build().eval()
    checkpoint.save(model, tmp_path / "model")
    loaded = checkpoint.load(tmp_path / "model")
    assert loaded.config == config
    tokens = torch.arange(8)[None] % 11
    expected = model(tokens)
    assert_close(loaded.eval()(tokens), expected, rtol=0, atol=0)
    state, found = None, []
    for i in range(8):
        params, state = model.extend(tokens[:, i : i + 1], state)
        found.append(params)
    assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)
    assert generate(model, steps=5).shape[1] == 5


def test_it_is_differentiated_twice():
    for config in (linear.Config(impl="torch"), softmax.Config()):
        layer, x = build(config, conv=3, rope_base=None), draw(t=4).requires_grad_()
        (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(dx.square().sum(), x)
        assert found.isfinite().all()
        assert found.abs().max() > 0


def test_unit_length_in_half_precision():
    x = torch.full((1, 1, 1, 64), 40.0, dtype=torch.float16)
    layer = AttentionLayer(64, linear.Config(), heads=1, qk_norm="l2")
    assert_close(layer._normed(x), torch.full_like(x, 0.125))


def test_a_convolution_keeps_its_inputs_in_float32():
    layer = AttentionLayer(8, linear.Config(), heads=2, conv=3).bfloat16()
    before = layer.start(1)
    _, after = layer.extend(torch.randn(1, 2, 8).bfloat16(), before)
    assert before.conv[0].dtype == after.conv[0].dtype == torch.float32


def test_one_native_call_a_token_is_not_for_them():
    base = {"vocabulary": 11, "layers": 1, "heads": 2, "width": 16}
    assert why_not(decoder.Config(**base).build().eval()) is None
    reason = why_not(decoder.Config(**base, qk_norm="l2").build().eval())
    assert reason == "a fused step knows no qk_norm='l2'"
    assert "blocks with an MLP" in (why_not(decoder.Config(**base, mlp_ratio=0).build().eval()) or "")


def test_a_block_without_an_mlp_is_its_attention():
    layer = build()
    block = Block(layer, None, width=24).double()
    x = draw()
    assert_close(block(x), x + layer(block.attn_norm(x)), **EXACT)
    assert_close(block.extend(x)[0], block(x), **EXACT)
    names = {name.split(".")[0] for name, _ in block.named_parameters()}
    assert names == {"attn", "attn_norm"}


def test_blocks_of_papers():
    base = {"vocabulary": 11, "layers": 1, "heads": 2, "width": 16}
    model = decoder.Config(**base, attention=ssd.Config(), **ssd.StateSpaceDuality.paper_block).build()
    assert model.blocks[0].mlp is None
    for name in attention.names():
        kind = attention.mechanism(name)
        if kind.paper_block:
            config = decoder.Config(**base, attention=attention.load(name).Config(), **kind.paper_block)
            assert config.build()(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 11)


def test_refuses():
    with pytest.raises(
        ValueError, match="conv must be at least 1 token and needs causal=True, got 4 and False"
    ):
        build(causal=False, conv=4)
    with pytest.raises(ValueError, match="conv must be at least 1 token"):
        build(conv=0)
    with pytest.raises(ValueError, match="qk_norm must be 'l2' or None, got 'rms'"):
        build(qk_norm="rms")
    with pytest.raises(ValueError, match="conv must be at least 1, got 0"):
        decoder.Config(vocabulary=3, conv=0)
    with pytest.raises(ValueError, match="needs causal=True"):
        encoder.Config(inputs=3, width=16, heads=2, conv=4).build()
    layer = build(conv=3)
    with pytest.raises(ValueError, match=r"state.conv must hold 1 tensors for conv=3, got 0"):
        layer.extend(draw(), layer.start(2)._replace(conv=()))
    _, state = build(conv=4).extend(draw())
    with pytest.raises(ValueError, match=r"state.conv must be \[n=2 w=2 c=48\]"):
        layer.extend(draw(), state)


@pytest.mark.parametrize("mechanism", [linear, retention, softmax], ids=lambda x: x.__name__[-7:])
def test_tensors_without_numbers_go_through_and_leave_nothing_behind(mechanism):
    """With FakeTensorMode and make_fx, which estimate shapes and memory."""
    layer, x = AttentionLayer(16, mechanism.Config(), heads=4), torch.randn(2, 6, 16)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        assert layer(fake, mask=mask).shape == x.shape
        assert layer(fake[:1], cu_seqlens=torch.tensor([0, 2, 6])).shape == (1, 6, 16)
        layer.extend(fake)
    torch.save(layer, io.BytesIO())
    graph = make_fx(lambda x, mask: layer(x, mask=mask))(x, mask)
    assert_close(graph(x, mask), layer(x, mask=mask))


def test_what_a_layer_projects_itself_is_not_given():
    layer, x = AttentionLayer(16, retention.Config(), heads=4), torch.randn(1, 3, 16)
    with pytest.raises(TypeError, match="the layer projects gate itself: do not pass it"):
        layer(x, gate=torch.zeros(1, 3, 16))

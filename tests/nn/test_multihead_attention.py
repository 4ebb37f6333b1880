"""lintra.nn.MultiheadAttention: with softmax it equals that of PyTorch; inside its layers; refusals."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from lintra import attention
from lintra.attention import aft, bigbird, delta, linear, longformer, lsh, retention, softmax
from lintra.generation.sampling import evaluation
from lintra.nn import AttentionLayer, MultiheadAttention

EXACT = {"rtol": 0, "atol": 1e-12}  # float64, numbers of about 1
PADDING = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
TRIANGLE = nn.Transformer.generate_square_subsequent_mask(7)
WIDTH, HEADS = 16, 4


@pytest.fixture(autouse=True)
def in_float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pair(**options):
    """PyTorch's layer and that of lintra, with the same weights and nonzero biases."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
    for x in theirs.parameters():
        nn.init.normal_(x, std=0.3)
    ours = MultiheadAttention(WIDTH, HEADS, **options, attention=softmax.Config())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def check_alike(theirs, ours, inputs, real=None, ours_only=(), **options):
    """Compare values at real tokens, and gradients of inputs and parameters."""
    found = []
    for layer, more in ((theirs, {}), (ours, dict(ours_only))):
        y, weights = layer(*inputs, need_weights=False, **options | more)
        assert weights is None
        y = y if real is None else y[real]
        given = [*dict.fromkeys(inputs), *layer.parameters()]
        found.append((y, torch.autograd.grad(y.sin().sum(), given)))
    assert_close(found[1], found[0], **EXACT)


def draw(*shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", [None, PADDING, torch.zeros(2, 7).masked_fill(PADDING, -torch.inf)])
def test_self_attention_is_pytorchs(batch_first, bias, causal, padding):
    theirs, ours = pair(batch_first=batch_first, bias=bias)
    x = draw(2, 7, WIDTH) if batch_first else draw(7, 2, WIDTH)
    real = None if padding is None else ~PADDING if batch_first else ~PADDING.T
    mask = TRIANGLE if padding is None or padding.is_floating_point() else -torch.inf == TRIANGLE
    options = {"key_padding_mask": padding, "attn_mask": mask if causal else None}
    check_alike(theirs, ours, (x, x, x), real, **options)
    if causal:
        check_alike(theirs, ours, (x, x, x), real, {"attn_mask": None, "is_causal": True}, **options)
        check_alike(theirs, ours, (x, x, x), real, is_causal=True, **options)
    if real is not None:
        assert (ours(x, x, x, **options)[0][~real] == 0).all()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 5, "vdim": 6}, {"vdim": 6}])
def test_cross_attention_is_pytorchs(batch_first, sizes):
    theirs, ours = pair(batch_first=batch_first, **sizes)
    shapes = [(3, WIDTH), (7, sizes.get("kdim", WIDTH)), (7, sizes.get("vdim", WIDTH))]
    inputs = [draw(2, *x) if batch_first else draw(x[0], 2, x[1]) for x in shapes]
    check_alike(theirs, ours, inputs)
    check_alike(theirs, ours, inputs, key_padding_mask=PADDING)


def test_queries_and_keys_with_positions_and_values_without():
    theirs, ours = pair(batch_first=True)
    x, value = draw(2, 7, WIDTH), draw(2, 7, WIDTH)
    check_alike(theirs, ours, (x, x, value), ~PADDING, key_padding_mask=PADDING)
    check_alike(theirs, ours, (x, draw(2, 7, WIDTH), value), attn_mask=TRIANGLE)


@pytest.mark.parametrize("batch_first", [True, False])
def test_without_a_batch(batch_first):
    theirs, ours = pair(batch_first=batch_first)
    x, memory = draw(7, WIDTH), draw(7, WIDTH)
    check_alike(theirs, ours, (x, x, x), ~PADDING[1], key_padding_mask=PADDING[1])
    check_alike(theirs, ours, (x, x, x), attn_mask=TRIANGLE)
    check_alike(theirs, ours, (x, memory, memory), key_padding_mask=PADDING[1])


def test_bfloat16():
    """Its error against float64 is at most twice that of PyTorch."""
    theirs, ours = pair(batch_first=True)
    x = torch.randn(2, 7, WIDTH)
    exact = theirs(x, x, x, need_weights=False)[0]
    theirs, ours, x = theirs.bfloat16(), ours.bfloat16(), x.bfloat16()
    y, reference = ours(x, x, x)[0], theirs(x, x, x, need_weights=False)[0]
    assert y.dtype == torch.bfloat16
    assert (y - exact).abs().max() <= 2 * (reference - exact).abs().max()
    made = MultiheadAttention(WIDTH, HEADS, dtype=torch.bfloat16, attention=delta.Config())
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    assert MultiheadAttention(
        WIDTH, HEADS, device="meta", attention=delta.Config()
    ).extra_proj.beta.weight.is_meta


@pytest.mark.parametrize("name", sorted({*attention.names()} - {"lsh"}))  # it shares queries and keys
def test_every_mechanism_is_that_of_an_attention_layer(name):
    """In each of its forms, and with its extra projections."""
    config = attention.for_length(attention.load(name).Config, 7)
    layer = MultiheadAttention(
        WIDTH, HEADS, batch_first=True, attention=config, causal=name == "longshort" or None
    )
    x = torch.randn(2, 7, WIDTH)
    forms = 0
    for causal in (False, True):
        try:
            same = AttentionLayer(WIDTH, config, heads=HEADS, causal=causal)
        except ValueError:
            with pytest.raises(ValueError, match=f"is_causal={causal} is not supported"):
                layer(x, x, x, is_causal=causal)
            continue
        if causal not in layer._forms:
            continue
        forms += 1
        same.attention.load_state_dict(layer.attention.state_dict())
        same.extra_proj.load_state_dict(layer.extra_proj.state_dict())
        same.out_proj.load_state_dict(layer.out_proj.state_dict())
        with torch.no_grad():
            same.qkv_proj.weight.copy_(layer.in_proj_weight)
            same.qkv_proj.bias.copy_(layer.in_proj_bias)
        y, _ = layer(x, x, x, key_padding_mask=PADDING, is_causal=causal)
        assert_close(y, same(x, mask=~PADDING), **EXACT)
    assert forms
    memory = torch.randn(2, 5, WIDTH)
    if layer.attention.can.cross and not layer.attention.causal:
        assert layer(x, memory, memory)[0].shape == x.shape
    else:
        with pytest.raises(
            ValueError,
            match=r"key must be the tensor query: .* (no cross form|causal only|built with causal=True)",
        ):
            layer(x, memory, memory)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_mask_of_real_tokens_gives_a_warning(batch_first):
    """It would leave the longest sequence without a token, and its output 0."""
    x = torch.randn(2, 7, WIDTH) if batch_first else torch.randn(7, 2, WIDTH)
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, attention=linear.Config())
    said = "key_padding_mask looks inverted: .* True for padding; .* pass key_padding_mask=~mask"
    with pytest.warns(UserWarning, match=said) as found:
        layer(x, x, x, key_padding_mask=~PADDING)
    assert [each.filename for each in found] == [__file__]
    layer(x, x, x, key_padding_mask=PADDING)  # warnings are errors


@pytest.fixture
def layers():
    """PyTorch's encoder with its own attention, and with that of lintra in its place."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2)
    ours = copy.deepcopy(theirs)
    for each in ours.layers:
        attn = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=softmax.Config())
        attn.load_state_dict(each.self_attn.state_dict())
        each.self_attn = attn
    return theirs, ours


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"mask": TRIANGLE}, {"mask": TRIANGLE, "is_causal": True}])
@pytest.mark.parametrize("padding", [None, torch.zeros(2, 7).masked_fill(PADDING, -torch.inf)])
def test_in_an_encoder_of_pytorch(layers, training, options, padding):
    """With its fast paths for softmax attention and nested tensors too: in evaluation, without gradients."""
    x = torch.randn(2, 7, WIDTH)
    real = slice(None) if padding is None else ~PADDING
    padding = padding if padding is None or options else PADDING  # with the dtype of the mask
    expected, y = (
        encoder.train(training)(x, **options, src_key_padding_mask=padding)[real] for encoder in layers
    )
    assert_close(y, expected, **EXACT)
    with torch.no_grad():
        assert_close(layers[1](x, **options, src_key_padding_mask=padding)[real], expected, **EXACT)


def test_no_fast_path_makes_softmax_of_another_mechanism():
    attn = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=linear.Config())
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
    layer.self_attn = attn
    x = torch.randn(2, 7, WIDTH)
    expected = layer.eval()(x)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
    with pytest.warns(UserWarning, match="enable_nested_tensor is True, but"):
        nn.TransformerEncoder(layer, 1)


def test_in_a_decoder_of_pytorch():
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, dropout=0.0)
    x, memory = torch.randn(7, 2, WIDTH), torch.randn(7, 2, WIDTH)
    options = {"tgt_mask": -torch.inf == TRIANGLE, "tgt_is_causal": True, "memory_key_padding_mask": PADDING}
    expected = layer(x, memory, **options)
    for name in ("self_attn", "multihead_attn"):
        attn = MultiheadAttention(WIDTH, HEADS, attention=softmax.Config())
        attn.load_state_dict(getattr(layer, name).state_dict())
        setattr(layer, name, attn)
    assert_close(layer(x, memory, **options), expected, **EXACT)


def test_both_forms_compute_with_the_same_parameters():
    """After they have been replaced, in a copy, and in training."""
    config = linear.Config(feature_map=linear.Hedgehog())
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=config)
    assert len(list(layer.parameters())) == 4 + len(list(layer.attention.parameters()))
    other = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=config)
    other.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(2, 7, WIDTH)
    for same in (other, copy.deepcopy(layer), copy.deepcopy(layer).float().double()):
        for causal in (False, True):
            y, _ = same(x, x, x, is_causal=causal)
            assert_close(y, layer(x, x, x, is_causal=causal)[0], rtol=0, atol=1e-6)  # float32 along the way
    x = torch.randn(1, 1, WIDTH)
    with torch.no_grad():
        next(layer.attention.parameters()).mul_(2)
    assert_close(layer(x, x, x)[0], layer(x, x, x, is_causal=True)[0], **EXACT)  # one token sees itself


def test_dropout_is_of_weights_in_training():
    layer = MultiheadAttention(WIDTH, HEADS, 0.5, batch_first=True, attention=softmax.Config())
    x = torch.randn(2, 7, WIDTH)
    for causal in (False, True):
        assert not torch.equal(layer(x, x, x, is_causal=causal)[0], layer(x, x, x, is_causal=causal)[0])
    layer.eval()
    for causal in (False, True):
        assert torch.equal(layer(x, x, x, is_causal=causal)[0], layer(x, x, x, is_causal=causal)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_what_stands_in_padding_changes_nothing(causal):
    """Even NaN changes neither values nor gradients; a sequence of padding alone gives 0."""
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=softmax.Config())
    padding = torch.stack((PADDING[1], torch.ones(7, dtype=torch.bool)))
    x = torch.randn(2, 7, WIDTH)
    found = []
    for filling in (0.0, torch.nan):
        given = x.masked_fill(padding[..., None], filling).requires_grad_()
        y, _ = layer(given, given, given, key_padding_mask=padding, is_causal=causal)
        found.append((y, torch.autograd.grad(y.square().sum(), [given, *layer.parameters()])))
    assert_close(found[1], found[0], rtol=0, atol=0)
    assert (found[0][0][1] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "add_bias_kv and add_zero_attn must be False"),
        ({"add_zero_attn": True}, "add_bias_kv and add_zero_attn must be False"),
        ({"num_heads": 3}, "embed_dim must be a multiple of num_heads, got 16 and 3"),
        ({"dropout": 0.1, "attention": linear.Config()}, "dropout must be 0 for .* no weights to drop"),
        ({"dropout": 0.1, "attention": softmax.Config(dropout=0.2)}, "dropout must be 0 for .* of its own"),
        (
            {"attention": lsh.Config()},
            "one projection for queries and keys, .* use lintra.nn.Att",
        ),
        ({"attention": delta.Config(value_heads=8)}, "value_heads must be num_heads=4 or None, .* got 8"),
        ({"kdim": 5, "attention": bigbird.Config()}, "kdim and vdim must be embed_dim=16, .* got 5 and 16"),
        ({"causal": False, "attention": retention.Config()}, "'retention' is causal only"),
        ({"attention": aft.Config(window=2, max_length=9)}, "causal must be True or False, got None"),
    ],
)
def test_what_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(
            **{"embed_dim": WIDTH, "num_heads": HEADS, "attention": softmax.Config()} | options
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"need_weights": True}, ValueError, "need_weights must be False"),
        ({"attn_mask": TRIANGLE == 0}, ValueError, r"attn_mask must be None or the causal mask \[t=7 s=7\]"),
        ({"attn_mask": TRIANGLE.expand(8, 7, 7)}, ValueError, r"Got another mask, of shape \[8, 7, 7\]"),
        ({"attn_mask": TRIANGLE + 0.5}, ValueError, "attn_mask must be boolean, or 0 and -inf: other"),
        ({"attn_mask": torch.ones(7, 7).long()}, TypeError, "attn_mask must be .*, got torch.int64"),
        ({"key_padding_mask": PADDING.byte()}, TypeError, "key_padding_mask must be .*, got torch.uint8"),
        ({"key_padding_mask": PADDING[:, :5]}, ValueError, "key_padding_mask must be .*s=7"),
        ({"key_padding_mask": -1.0 * PADDING}, ValueError, "key_padding_mask must be boolean, or 0 and -inf"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, error, message):
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=softmax.Config())
    x = torch.randn(2, 7, WIDTH)
    with pytest.raises(error, match=message):
        layer(x, x, x, **options)


def test_calls_of_a_form_that_is_not_there_are_refused():
    x, memory = torch.randn(2, 7, WIDTH), torch.randn(2, 5, WIDTH)
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=softmax.Config(), causal=True)
    refusal = "is_causal=False is not supported: the layer was built with causal=True; pass is_causal=True"
    with pytest.raises(ValueError, match=refusal):
        layer(x, x, x)
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=softmax.Config())
    with pytest.raises(ValueError, match="is_causal needs as many queries as keys, got 7 and 5"):
        layer(x, memory, memory, is_causal=True)
    with pytest.raises(ValueError, match="value must be"):
        layer(x, memory, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_sequences_attend_to_themselves_alone():
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=softmax.Config())
    one, other = (torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in (3, 5)]) for _ in range(2))
    with pytest.raises(ValueError, match="a nested query must be key and value too, and go without masks"):
        layer(one, one, other)


def test_global_projections_begin_as_copies():
    config = longformer.Config(window=2, global_projections=True)
    layer = MultiheadAttention(WIDTH, HEADS, attention=config)
    copies = [layer.extra_proj[name].weight for name in ("global_q", "global_k", "global_v")]
    assert torch.equal(torch.cat(copies), layer.in_proj_weight)


def test_an_encoder_layer_of_pytorch_with_padding_is_one_graph_and_is_mapped():
    """PyTorch's layer turns a boolean mask into one of 0 and -inf before it calls attention."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    layer.self_attn = MultiheadAttention(16, 4, batch_first=True, attention=linear.Config())
    x, padding = torch.randn(2, 6, 16), torch.arange(6) >= torch.tensor([[6], [4]])
    right = layer(x, src_key_padding_mask=padding)
    whole = torch.compile(layer, backend="eager", fullgraph=True)(x, src_key_padding_mask=padding)
    assert_close(whole, right)
    mapped = torch.vmap(lambda x, p: layer(x[None], src_key_padding_mask=p[None])[0])(x, padding)
    assert_close(mapped, right)


def test_a_causal_mask_in_a_graph_is_asked_for_by_name():
    layer = MultiheadAttention(16, 4, batch_first=True, attention=linear.Config())
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    compiled = torch.compile(layer, backend="eager")
    with pytest.raises(ValueError, match="pass is_causal=True"):
        compiled(*[torch.randn(1, 5, 16)] * 3, need_weights=False, attn_mask=mask)


@pytest.mark.parametrize("name", ["performer", "bigbird", "clustered"])
def test_state_dicts_of_pytorch_leave_sampled_features_alone(name):
    torch.manual_seed(0)
    theirs, config = torch.nn.MultiheadAttention(16, 2), attention.load(name).Config()
    ours = MultiheadAttention(16, 2, attention=config)
    sampled = {n: x.clone() for n, x in ours.attention.state_dict().items()}
    assert sampled
    network, whole = torch.nn.Sequential(ours), torch.nn.Sequential(theirs)
    network.load_state_dict(whole.state_dict())
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)
    for n, x in ours.attention.state_dict().items():
        assert torch.equal(x, sampled[n])
    other = MultiheadAttention(16, 2, attention=config)
    other.load_state_dict(ours.state_dict())
    some = {n: x for n, x in ours.state_dict().items() if n != f"attention.{next(iter(sampled))}"}
    assert (len(sampled) > 1) is (name == "clustered")
    if len(sampled) > 1:  # a sample that is lost raises an error
        with pytest.raises(RuntimeError, match="Missing key"):
            other.load_state_dict(some)


def test_hooks_of_the_attention_run_in_every_form():
    attention, seen = MultiheadAttention(8, 2, batch_first=True, attention=linear.Config()), []
    attention.attention.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(1, 3, 8)
    for arguments, options in (((x, x, x), {}), ((x, x, x), {"is_causal": True}), ((x, x.clone(), x), {})):
        attention(*arguments, **options)
    assert len(seen) == 3


def test_dropout_comes_back_after_an_evaluation():
    """Whoever restores the mode of all submodules passes over a form that is none."""
    layer = MultiheadAttention(8, 2, 0.5, batch_first=True, attention=softmax.Config())
    x = torch.randn(2, 7, 8)
    with evaluation(layer):
        pass
    for causal in (False, True):
        a, b = (layer(x, x, x, is_causal=causal)[0] for _ in range(2))
        assert not torch.equal(a, b)


def test_a_checkpoint_computes_the_same_form_again():
    """A reentrant one passes on three views of the one tensor."""
    config = aft.Config(max_length=7, window=2)  # has no form across sequences
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, attention=config, causal=False)
    x = draw(2, 7, WIDTH)
    assert not layer.attention.can.cross
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            y = checkpoint(lambda *inputs: layer(*inputs, PADDING)[0], x, x, x, use_reentrant=True)
        else:
            y = layer(x, x, x, PADDING)[0]
        x.grad = None
        y.sin().sum().backward()
        found.append((y, x.grad))
    assert_close(found[1], found[0], **EXACT)
    with pytest.raises(ValueError, match="key must be the tensor query"):
        layer(x, x.clone(), x)

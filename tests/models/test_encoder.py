"""The encoder: each sequence of a ragged batch equals the sequence alone; pools; directions; refusals."""

import dataclasses

import pytest
import torch
from torch.nn.functional import gelu
from torch.testing import assert_close

from lintra import attention
from lintra.attention import gated, linear, longformer, softmax
from lintra.models import encoder
from tests.models import kinds

EXACT = {"rtol": 1e-8, "atol": 1e-10}  # float64 through two layers
LONGEST = 12


def build(**changes):
    torch.manual_seed(0)
    options = {"vocabulary": 11, "layers": 2, "heads": 4, "width": 32, "outputs": 3} | changes
    model = encoder.Config(**options).build().double().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # fresh norms map zero padding to zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def loss_and_gradients(model, *inputs, **given):
    """A loss with unequal weights, and its gradient for every parameter."""
    return gradients_of(model, model(*inputs, **given))


def gradients_of(model, y):
    loss = (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).sin().reshape(y.shape)).sum()
    return loss, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


WHOLE = {
    "token_types": 2,
    "embedding_norm": True,
    "norm": "post",
    "norm_eps": 1e-3,
    "activation": "gelu_tanh",
}
WHOLE |= {"head_activation": "tanh", "head_norm": True}
MASK = torch.tensor([[True] * 9, [True] * 4 + [False] * 5, [False] * 3 + [True, False] * 3])
MECHANISMS = [
    linear.Config(),
    softmax.Config(),
    softmax.Config(window=4),
    (linear.Config(), softmax.Config()),
]
PARTS = [
    {"pool": "mean"},
    {"pool": "first", "position": "learned", "max_length": LONGEST, "norm": "post"},
    {"pool": "last", "position": "concatenated"},
    {"pool": "mean", "position": "rotary", "kv_heads": 2, "activation": "swiglu", "norm_kind": "rms"},
    {"pool": None, **WHOLE},
    {"pool": "mean", "heads": 3, "head_dim": 6},
]

ALTERNATING = [
    {"alternating": True, "pool": "mean", "position": "rotary", "conv": 3, "layers": 4},
    {"alternating": True, "pool": None, "position": "learned", "max_length": LONGEST, "layers": 4},
]


def test_types_norms_and_a_hidden_layer_of_the_head():
    """The options of the configuration, written out around the blocks."""
    model = build(**WHOLE, position="none")
    x, kind = torch.arange(9)[None] % 5, torch.tensor([[0, 1, 1, 0, 0, 1, 0, 0, 1]])
    y = model.embedding.table(x) + model.token_types(kind)
    y = layer_norm(model.embedding_norm, y)
    for block in model.blocks:
        y = layer_norm(block.attn_norm, y + block.attn(y))
        y = layer_norm(block.mlp_norm, y + block.mlp.down(gelu(block.mlp.up(y), approximate="tanh")))
    hidden, _, norm, last = model.head
    assert_close(model(x, token_types=kind), last(layer_norm(norm, hidden(y).tanh())), **EXACT)
    assert_close(model(x), model(x, token_types=torch.zeros_like(kind)), **EXACT)
    with pytest.raises(ValueError, match="token_types"):
        model(x, token_types=kind + 1)
    with pytest.raises(ValueError, match="token_types"):
        model(x, token_types=kind[:, 1:])
    with pytest.raises(TypeError, match="says how many there are"):
        build()(x, token_types=kind)


def layer_norm(norm, x):
    centred = x - x.mean(-1, keepdim=True)
    return norm.weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() + norm.bias


def test_types_go_with_padded_and_packed_tokens_and_each_piece():
    model = build(**WHOLE, causal=True)
    x, kind = torch.arange(9)[None] % 5, torch.tensor([[0, 1, 1, 0, 0, 1, 0, 0, 1]])
    whole = model(x, token_types=kind)
    junk = kind.masked_fill(~MASK[1:2], 77)
    found = model(x, mask=MASK[1:2], token_types=junk)
    assert_close(found[:, :4], model(x[:, :4], token_types=kind[:, :4]), **EXACT)
    bounds = torch.tensor([0, 4, 9])
    packed = model(x, cu_seqlens=bounds, token_types=kind)
    assert_close(packed[:, :4], found[:, :4], **EXACT)
    first, state = model.extend(x[:, :5], token_types=kind[:, :5])
    rest, _ = model.extend(x[:, 5:], state, token_types=kind[:, 5:])
    assert_close(torch.cat((first, rest), 1), whole, **EXACT)


def readable(parts, mechanism):
    """The parts with another pool than the first token, where that sees no other one."""
    causal = mechanism == softmax.Config(window=4)
    return parts | {"pool": "last"} if causal and parts["pool"] == "first" else parts


def is_itself_alone(model, x, junk):
    """Each sequence of a batch padded with junk, at either end and in between, gives what it gives alone."""
    found = model(junk, mask=MASK)
    for i, real in enumerate(MASK):
        alone = model(x[i : i + 1, real])[0]
        assert_close(found[i][real] if model.config.pool is None else found[i], alone, **EXACT)
    if model.config.pool is None:
        assert (found[~MASK] == 0).all()


@pytest.mark.parametrize("parts", [*PARTS, *ALTERNATING], ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize("inputs", [None, 5])
def test_packed_sequences_are_each_alone(parts, mechanism, inputs):
    """Predictions for each sequence, or for each token; gradients of all parameters."""
    parts = readable(parts, mechanism)
    reads = {"vocabulary": 11} if inputs is None else {"vocabulary": None, "inputs": inputs}
    model, lengths = build(attention=mechanism, **reads, **parts), [4, 0, 9, 1]
    x = torch.randint(0, 11, (1, 14)) if inputs is None else torch.randn(1, 14, inputs).double()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    y = model(x, cu_seqlens=cu_seqlens)
    alone = torch.cat([model(part) for part in x.split(lengths, 1)], 1 if model.config.pool is None else 0)
    assert_close(y, alone, **EXACT)
    assert_close(gradients_of(model, y), gradients_of(model, alone), **EXACT)


def test_a_mechanism_of_a_hybrid_gets_what_it_takes_alone():
    """Other layers do not get them; an input that no layer takes is refused."""
    first, second = linear.Config(), longformer.Config(window=2, global_projections=True)
    model = build(attention=(first, second), layers=2, causal=False)
    x, chosen = torch.randint(0, 11, (1, 14)), torch.arange(14)[None] % 3 == 1
    got = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda _, args, given: got.append(set(given)), with_kwargs=True)
    found = model(x, global_mask=chosen)
    assert got == [{"layout"}, {"layout", "global_mask"}]
    assert not torch.equal(found, model(x))
    with pytest.raises(TypeError, match="attention 'linear' takes no global with"):
        model(x, **{"global": chosen})
    causal = build(attention=(first, longformer.Config(window=2)), layers=2, causal=True, pool=None)
    with pytest.raises(TypeError, match="takes no hint with"):
        causal.extend(x, hint=chosen)


def test_what_a_mechanism_takes_by_token_is_packed_too():
    """A global_mask for the tokens of each sequence."""
    mechanism = longformer.Config(window=2, global_projections=True)
    model, lengths = build(attention=mechanism, pool="mean"), [4, 9, 1]
    x, chosen = torch.randint(0, 11, (1, 14)), torch.arange(14)[None] % 3 == 1
    found = model(x, cu_seqlens=torch.tensor([0, 4, 13, 14]), global_mask=chosen)
    parts = zip(x.split(lengths, 1), chosen.split(lengths, 1), strict=True)
    assert_close(found, torch.cat([model(part, global_mask=some) for part, some in parts]), **EXACT)
    with pytest.raises(ValueError, match=r"global_mask must be \[b=1 t=14 \.\.\.\], got shape \[1, 3\]"):
        model(x, cu_seqlens=torch.tensor([0, 14]), global_mask=chosen[:, :3])


@pytest.mark.parametrize("parts", [*PARTS, *ALTERNATING], ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_ragged_batches_are_their_sequences_alone(parts, mechanism):
    x = torch.randint(0, 11, (3, 9))
    is_itself_alone(build(attention=mechanism, **readable(parts, mechanism)), x, x.masked_fill(~MASK, -100))


@pytest.mark.parametrize("name", attention.names())
def test_ragged_features_by_every_mechanism(name):
    model = build(attention=kinds.configs(LONGEST)[name], vocabulary=None, inputs=5, pool="mean")
    x = torch.randn(3, 9, 5, dtype=torch.float64)
    is_itself_alone(model, x, x.masked_fill(~MASK[..., None], torch.nan))


@pytest.mark.parametrize("name", [x for x in attention.names() if attention.mechanism(x).can.causal])
def test_every_second_layer_reads_from_the_end(name):
    """Written out, for every causal mechanism; a sequence in a batch equals the sequence alone."""
    model = build(attention=kinds.configs(LONGEST)[name], alternating=True, pool=None, layers=3)
    assert not model.causal
    x = torch.randint(0, 11, (3, 9))
    is_itself_alone(model, x, x.masked_fill(~MASK, -100))
    y = model.embedding(x)
    y = y + model.position(torch.arange(9)[None]).to(y.dtype)
    first, second, third = model.blocks
    y = third(second(first(y).flip(1)).flip(1))
    assert_close(model(x), model.head(model.norm(y)), **EXACT)


def test_a_token_sees_both_sides_through_alternating_layers():
    """The first layer reads from the start, the second from the end: each output depends on all tokens."""
    model = build(vocabulary=None, inputs=5, attention=gated.Config(), alternating=True, pool=None)
    x = torch.randn(1, 9, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x)[:, 4].sum(), x)
    assert (gradient != 0).any(-1).all()


def test_each_mechanism_of_a_hybrid_reads_in_both_directions():
    hybrid = (gated.Config(), linear.Config())
    model = build(attention=hybrid, alternating=True, pool=None, layers=4)
    x = torch.randint(0, 11, (2, 9))
    y = model.embedding(x)
    y = y + model.position(torch.arange(9)[None]).to(y.dtype)
    first, second, third, fourth = model.blocks
    y = fourth(third(second(first(y)).flip(1))).flip(1)
    assert_close(model(x), model.head(model.norm(y)), **EXACT)


@pytest.mark.parametrize("wrong", [torch.ones(9, dtype=torch.bool), torch.tensor(True)], ids=["t", "scalar"])
def test_what_is_not_of_tokens_is_refused_where_layers_alternate(wrong):
    mechanism = longformer.Config(window=2, global_projections=True)
    model = build(attention=(linear.Config(), mechanism), alternating=True, pool=None, layers=4)
    x = torch.randint(0, 11, (2, 9))
    assert_close(model(x, global_mask=None), model(x), **EXACT)
    with pytest.raises(ValueError, match="global_mask must be"):
        model(x, global_mask=wrong)


def test_what_a_mechanism_takes_by_token_is_read_from_the_end_too():
    model = build(attention=longformer.Config(window=2, global_projections=True), alternating=True, pool=None)
    x, chosen = torch.randint(0, 11, (2, 9)), torch.rand(2, 9) < 0.3
    y = model.embedding(x)
    y = y + model.position(torch.arange(9)[None]).to(y.dtype)
    first, second = model.blocks
    y = second(first(y, global_mask=chosen).flip(1), global_mask=chosen.flip(1)).flip(1)
    assert_close(model(x, global_mask=chosen), model.head(model.norm(y)), **EXACT)


def test_nan_in_padding_has_no_gradient():
    model = build(vocabulary=None, inputs=5)
    x = torch.randn(3, 9, 5, dtype=torch.float64)
    clean = loss_and_gradients(model, x, mask=MASK)
    dirty = loss_and_gradients(model, x.masked_fill(~MASK[..., None], torch.nan), mask=MASK)
    assert_close(dirty, clean, rtol=0, atol=0)


def test_pools_are_of_the_hidden_vectors():
    x = torch.randint(0, 11, (3, 9))
    model = build(pool=None)
    hidden = model.hidden(x, mask=MASK)
    assert (hidden[~MASK] == 0).all()
    assert_close(model(x, mask=MASK)[MASK], model.head(hidden[MASK]), **EXACT)
    expected = torch.stack([each[real].mean(0) for each, real in zip(hidden, MASK, strict=True)])
    assert_close(build(pool="mean")(x, mask=MASK), model.head(expected), **EXACT)
    assert_close(build(pool="mean")(x), model.head(model.hidden(x).mean(1)), **EXACT)
    expected = hidden[torch.arange(3), MASK.int().argmax(1)]
    assert_close(build(pool="first")(x, mask=MASK), model.head(expected), **EXACT)
    last = hidden.shape[1] - 1 - MASK.int().flip(1).argmax(1)
    assert_close(build(pool="last")(x, mask=MASK), model.head(hidden[torch.arange(3), last]), **EXACT)
    assert_close(build(pool="last")(x), model.head(model.hidden(x)[:, -1]), **EXACT)
    with pytest.raises(ValueError, match="the first token of a causal encoder sees no other"):
        build(pool="first", causal=True)
    assert_close(build(pool="mean", outputs=None)(x), model.hidden(x).mean(1), **EXACT)


@pytest.mark.parametrize("pool", ["mean", "first", "last", None])
def test_a_sequence_of_nothing_is_predicted_from_zeros(pool):
    model = build(pool=pool)
    mask = torch.tensor([[True] * 4, [False] * 4])
    loss, gradients = loss_and_gradients(model, torch.randint(0, 11, (2, 4)), mask=mask)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients)
    found = model(torch.randint(0, 11, (2, 4)), mask=mask)[1]
    expected = model.head.bias if pool else torch.zeros(4, 3, dtype=torch.float64)
    assert_close(found, expected, **EXACT)
    assert model(torch.zeros(2, 0, dtype=torch.int64)).shape == ((2, 3) if pool else (2, 0, 3))


def test_a_mean_of_many_is_within_float16():
    config = encoder.Config(
        vocabulary=3, layers=1, heads=1, width=4, outputs=2, pool="mean", attention=linear.Config()
    )
    model = config.build().half()
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.fill_(4)  # the hidden vector of every token
        short, long = (model(torch.zeros(1, n, dtype=torch.int64)) for n in (10, 20_000))
    assert_close(short, long)


def test_bidirectional_where_the_mechanism_can_be():
    for name, config in kinds.configs(LONGEST).items():
        model = build(attention=config)
        assert model.causal == (kinds.bidirectional(config) is None), name
    assert build(attention=softmax.Config(window=4)).causal
    assert not build(attention=(linear.Config(), softmax.Config())).causal
    assert build(attention=(linear.Config(), softmax.Config(window=4))).causal
    assert build(attention=linear.Config(), causal=True).causal
    with pytest.raises(ValueError, match=r"causal only .* got causal=False"):
        build(attention=softmax.Config(window=4), causal=False)
    with pytest.raises(ValueError, match="multiple of the key-value heads"):
        linear.Config().build(heads=4, kv_heads=3, dim=2, causal=False)


@pytest.mark.parametrize("causal", [True, False])
def test_what_a_token_sees(causal):
    model = build(vocabulary=None, inputs=5, causal=causal, pool=None)
    x = torch.randn(1, 9, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x)[:, 4].sum(), x)
    assert (gradient[:, :5] != 0).any()
    assert bool((gradient[:, 5:] == 0).all()) == causal


@pytest.mark.parametrize("name", attention.names())
def test_blocks_computed_again_are_the_same(name):
    """Values and gradients, with dropout, random features, hashes; the generator ends in the same state."""
    x = torch.randint(0, 11, (3, 9))
    found = []
    for again in (False, True):
        config = kinds.configs(LONGEST)[name]
        model = build(attention=config, dropout=0.3, checkpoint_blocks=again).train()
        torch.manual_seed(5)
        found.append((*loss_and_gradients(model, x, mask=MASK), torch.rand(1)))
    assert_close(found[1], found[0], rtol=0, atol=0)


def test_blocks_are_computed_again_only_for_gradients(monkeypatch):
    model = build(checkpoint_blocks=True)
    calls = []
    forward = type(model.blocks[0]).forward
    monkeypatch.setattr(
        type(model.blocks[0]), "forward", lambda self, *a, **k: calls.append(self) or forward(self, *a, **k)
    )
    x = torch.randint(0, 11, (3, 9))
    with torch.no_grad():
        model(x)
    assert len(calls) == 2
    model(x).sum().backward()
    assert len(calls) == 2 + 2 * 2


def test_a_mechanism_gets_what_it_takes_at_each_call():
    seen = {}

    class Given(softmax.SoftmaxAttention):
        call_inputs = ("hint",)

        def _forward(self, q, k, v, layout, *, hint):
            seen["hint"] = hint
            return super()._forward(q, k, v, layout)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        def build(self, **shape):
            return Given(softmax.Config(), **shape)

    for again in (False, True):
        hint = torch.ones(1, 4)
        build(attention=Config(), checkpoint_blocks=again)(torch.zeros(1, 4, dtype=torch.int64), hint=hint)
        assert seen.pop("hint") is hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": 4}, "one of vocabulary and inputs must be given, got 11 and 4"),
        ({"vocabulary": None}, "one of vocabulary and inputs must be given, got None and None"),
        ({"vocabulary": 0}, "vocabulary must be at least 1, got 0"),
        ({"outputs": 0}, "outputs must be at least 1, got 0"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"token_types": 0}, "token_types must be at least 1, got 0"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0 and finite, got 0.0"),
        ({"outputs": None, "head_activation": "tanh"}, "head_activation needs outputs, got 'tanh' without"),
        ({"head_norm": True}, "head_norm comes after head_activation, which is None"),
        ({"alternating": True, "causal": True}, "alternating layers read in both directions: .* causal=True"),
        (
            {"alternating": True, "layers": 1},
            "of each mechanism there are 2 or more, got .* layers=1 and 1 in",
        ),
        (
            {"alternating": True, "layers": 2, "attention": (gated.Config(), linear.Config())},
            "of each mechanism there are 2 or more, got .* layers=2 and 2 in attention",
        ),
        ({"width": 30}, "width must be a multiple of heads, got 30 and 4"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": "max"}, "pool must be 'mean' or 'first' or 'last' or None, got 'max'"),
        ({"causal": 1}, "causal must be bool or None, got 1"),
        ({"checkpoint_blocks": "yes"}, "checkpoint_blocks must be bool, got 'yes'"),
    ],
)
def test_config_refuses_wrong_types(changes, message):
    with pytest.raises(TypeError, match=message):
        build(**changes)


def test_inputs_are_checked():
    with pytest.raises(ValueError, match="tokens must be between 0 and 10, got 11"):
        build()(torch.tensor([[3, 11]]))
    with pytest.raises(TypeError, match=r"tokens must be int64 or int32, got torch\.float32"):
        build()(torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"x must be .*c=5"):
        build(vocabulary=None, inputs=5)(torch.zeros(2, 3, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match="mask must be boolean"):
        build()(torch.zeros(1, 2, dtype=torch.int64), mask=torch.ones(1, 2))


PIECEWISE = [name for name in attention.names() if attention.mechanism(name).can.causal and name != "lsh"]


@pytest.mark.parametrize("inputs", [None, 5])
@pytest.mark.parametrize("parts", [parts | {"pool": None} for parts in PARTS], ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_piece_by_piece_is_the_whole(parts, mechanism, inputs):
    reads = {"vocabulary": 11} if inputs is None else {"vocabulary": None, "inputs": inputs}
    model = build(attention=mechanism, causal=True, **reads, **parts)
    x = torch.randint(0, 11, (2, 9)) if inputs is None else torch.randn(2, 9, inputs).double()
    for cuts in ((9,), (1,) * 9, (4, 0, 1, 4)):
        found, state = extended(model, x.split(cuts, 1))
        assert_close(found, model(x), **EXACT)
        assert torch.equal(state.seen, torch.tensor([9, 9]))


@pytest.mark.parametrize("name", PIECEWISE)
def test_every_mechanism_goes_on_from_its_state(name):
    model = build(attention=kinds.configs(LONGEST)[name], causal=True)
    x = torch.randint(0, 11, (2, 9))
    found, _ = extended(model, x.split((5, 1, 3), 1))
    assert_close(found, model(x), **EXACT)


def test_what_a_mechanism_takes_by_token_goes_with_each_piece():
    model = build(attention=longformer.Config(window=2, global_projections=True), causal=True)
    x, chosen = torch.randint(0, 11, (2, 9)), torch.arange(9).expand(2, 9) % 4 == 1
    pieces = x.split((5, 1, 3), 1)
    found, _ = extended(model, pieces, [{"global_mask": some} for some in chosen.split((5, 1, 3), 1)])
    assert_close(found, model(x, global_mask=chosen), **EXACT)
    assert not torch.allclose(found, model(x))


def extended(model, pieces, given=None):
    found, state = [], None
    for piece, more in zip(pieces, given or [{}] * len(pieces), strict=True):
        y, state = model.extend(piece, state, **more)
        found.append(y)
    return torch.cat(found, 1), state


def test_pieces_may_be_padded_or_packed():
    """Each sequence continues from its own real tokens."""
    model = build(causal=True, vocabulary=None, inputs=5)
    x, more = torch.randn(3, 9, 5).double(), torch.randn(3, 2, 5).double()
    found, state = model.extend(x.masked_fill(~MASK[..., None], torch.nan), mask=MASK)
    assert (found[~MASK] == 0).all()
    assert_close(found, model(x, mask=MASK), **EXACT)
    after, _ = model.extend(more, state)
    for i, real in enumerate(MASK):
        assert_close(after[i], model(torch.cat((x[i, real], more[i]))[None])[0, -2:], **EXACT)
    lengths = MASK.sum(1)
    _, packed = model.extend(x[MASK][None], cu_seqlens=torch.cat((torch.tensor([0]), lengths.cumsum(0))))
    assert_close(model.extend(more, packed)[0], after, **EXACT)


def test_what_cannot_go_on_is_refused():
    x = torch.randint(0, 11, (2, 9))
    with pytest.raises(ValueError, match=r"extend needs an encoder that sees no future: .* causal=True"):
        build().extend(x)
    with pytest.raises(ValueError, match="extend needs an encoder that sees no future"):
        build(alternating=True).extend(x)
    with pytest.raises(ValueError, match="extend predicts for each token, so pool must be None, got 'mean'"):
        build(causal=True, pool="mean").extend(x)
    model = build(causal=True)
    with pytest.raises(TypeError, match="state must be a EncoderState, got tuple"):
        model.extend(x, (1, 2))
    with pytest.raises(ValueError, match="state is for 3 sequences, x for 2"):
        model.extend(x, model.start(3))
    with pytest.raises(ValueError, match="state is for 1 layers, the model has 2"):
        model.extend(x, build(causal=True, layers=1).start(2))

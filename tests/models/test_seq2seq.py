"""Sequence to sequence: parallel = recurrent, padding on both sides, the memory in the state, refusals."""

import pytest
import torch
from torch.testing import assert_close

from lintra import attention
from lintra.attention import linear, map_state, performer, softmax
from lintra.models import encoder, seq2seq
from lintra.nn import MLP, AttentionLayer, LogisticMixture
from lintra.nn.block import CrossBlock
from tests.models import kinds

EXACT = {"rtol": 1e-8, "atol": 1e-10}  # float64 through three layers
LONGEST = 12


def build(**changes):
    torch.manual_seed(0)
    reads = changes.pop("encoder", {})
    shape = {"layers": 2, "heads": 4, "width": 32}
    options = {"vocabulary": 11, **shape} | changes
    source = encoder.Config(**({"vocabulary": 7, **shape, "layers": 1} | reads))
    return seq2seq.Config(encoder=source, **options).build().double().eval()


KINDS = [
    {},
    {"attention": softmax.Config(), "cross": softmax.Config(), "norm": "post", "kv_heads": 2},
    {"attention": softmax.Config(window=4), "position": "rotary", "norm_kind": "rms"},
    {"cross": softmax.Config(), "position": "learned", "max_length": LONGEST, "encoder": {"norm": "post"}},
    {"output": LogisticMixture(components=2), "encoder": {"attention": softmax.Config(), "causal": True}},
]
SOURCE_MASK = torch.tensor([[True] * 8, [True] * 3 + [False] * 5, [False] * 2 + [True, False] * 3])
MASK = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [False] * 3 + [True] * 3])


def is_recurrent(model, memory, tokens):
    expected = model(tokens, memory)
    for cuts in ((9,), (1,) * 9, (4, 1, 4)):
        state, found = model.start(memory), []
        for part in tokens.split(cuts, 1):
            params, state = model.extend(part, state)
            found.append(params)
        assert_close(torch.cat(found, 1), expected, **EXACT)
        assert torch.equal(state.seen, torch.full((len(tokens),), 9))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_parallel_is_recurrent(kind):
    model = build(**kind)
    memory = model.encode_memory(torch.randint(0, 7, (3, 8)), SOURCE_MASK)
    is_recurrent(model, memory, torch.randint(0, 11, (3, 9)))


@pytest.mark.parametrize("name", attention.names())
def test_every_mechanism_reads_or_is_refused(name):
    """Served: a cross form in which queries depend neither on each other nor on their places in a call."""
    config = kinds.configs(LONGEST)[name]
    can = kinds.bidirectional(config)
    if can and can.cross and not can.joint_queries and not can.placed_queries:
        model = build(cross=config)
        is_recurrent(model, model.encode_memory(torch.randint(0, 7, (2, 8))), torch.randint(0, 11, (2, 9)))
    else:
        with pytest.raises(ValueError, match=rf"'{name}' .*(no cross form|causal only|depend on each other)"):
            build(cross=config)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packed_sources_and_targets_are_each_alone(kind):
    """Each of the two in its own row; values, gradients, and continuing from the states."""
    model, lengths, targets = build(**kind), [5, 1, 8], [3, 6, 0]
    source, tokens = torch.randint(0, 7, (1, 14)), torch.randint(0, 11, (1, 9))
    last, cu_seqlens = torch.randint(0, 11, (3, 1)), torch.tensor([0, 3, 9, 9])
    memory = model.encode_memory(source, cu_seqlens=torch.tensor([0, 5, 6, 14]))
    assert memory.length.tolist() == lengths
    packed = model(tokens, memory, cu_seqlens=cu_seqlens)
    extended, state = model.extend(tokens, model.start(memory), cu_seqlens=cu_seqlens)
    assert_close(extended, packed, **EXACT)
    after, _ = model.extend(last, state)
    parts = zip(source.split(lengths, 1), tokens.split(targets, 1), last[:, None], strict=True)
    alone = [model(torch.cat((t, end), 1), model.encode_memory(s)) for s, t, end in parts]
    assert_close(after, torch.cat([y[:, -1:] for y in alone]), **EXACT)
    alone = torch.cat([y[:, :-1] for y in alone], 1)
    assert_close(packed, alone, **EXACT)
    parameters = list(model.parameters())
    assert_close(
        *(torch.autograd.grad(y.sin().sum(), parameters, allow_unused=True) for y in (packed, alone)), **EXACT
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ragged_batches_are_their_sequences_alone(kind):
    """Padding of the source and of the target, and the tokens after it."""
    model = build(**kind)
    source, tokens = torch.randint(0, 7, (3, 8)), torch.randint(0, 11, (3, 6))
    memory = model.encode_memory(source.masked_fill(~SOURCE_MASK, -100), SOURCE_MASK)
    assert torch.equal(memory.length, SOURCE_MASK.sum(1))
    junk, more = tokens.masked_fill(~MASK, -100), torch.randint(0, 11, (3, 2))
    params = model(junk, memory, mask=MASK)
    _, state = model.extend(junk, model.start(memory), mask=MASK)
    after, _ = model.extend(more, state)
    for i in range(3):
        alone = model.encode_memory(source[i : i + 1, SOURCE_MASK[i]])
        real = tokens[i : i + 1, MASK[i]]
        assert_close(params[i : i + 1, MASK[i]], model(real, alone), **EXACT)
        assert_close(after[i : i + 1], model(torch.cat((real, more[i : i + 1]), 1), alone)[:, -2:], **EXACT)


def test_a_source_of_features():
    """NaN in its padding reaches neither values nor gradients."""
    model = build(encoder={"vocabulary": None, "inputs": 5})
    source, tokens = torch.randn(3, 8, 5, dtype=torch.float64), torch.randint(0, 11, (3, 6))
    found = []
    for filling in (0.0, torch.nan):
        memory = model.encode_memory(source.masked_fill(~SOURCE_MASK[..., None], filling), SOURCE_MASK)
        params = model(tokens, memory, mask=MASK)[MASK]
        found.append((params, *torch.autograd.grad(params.square().sum(), list(model.parameters()))))
    assert_close(found[1], found[0], rtol=0, atol=0)


def test_the_source_is_read_by_every_token_and_the_future_by_none():
    model = build(encoder={"vocabulary": None, "inputs": 5})
    source = torch.randn(1, 8, 5, dtype=torch.float64, requires_grad=True)
    x = model.embedding(torch.randint(0, 11, (1, 9))).detach().requires_grad_()
    model.embedding.forward = lambda tokens: x
    y = model(torch.zeros(1, 9, dtype=torch.int64), model.encode_memory(source))
    to_source, to_target = torch.autograd.grad(y[:, 4].sum(), (source, x))
    assert (to_source != 0).any(2).all()
    assert (to_target[:, 5:] == 0).all()
    assert (to_target[:, :5] != 0).any(2).all()


def test_indexing_a_state_keeps_its_memory():
    model = build(cross=softmax.Config())
    memory = model.encode_memory(torch.randint(0, 7, (3, 8)), SOURCE_MASK)
    _, state = model.extend(torch.randint(0, 11, (3, 5)), model.start(memory))
    order = torch.tensor([2, 0])
    params, _ = model.extend(torch.tensor([[1], [2]]), map_state(lambda x: x[order], state))
    both, _ = model.extend(torch.tensor([[2], [7], [1]]), state)
    assert_close(params, both[order], **EXACT)


def test_the_state_is_constant_where_both_mechanisms_allow():
    def size(source, target):
        found = []
        _, state = model.extend(
            torch.zeros(1, target, dtype=torch.int64),
            model.start(model.encode_memory(torch.zeros(1, source, dtype=torch.int64))),
        )
        map_state(lambda x: found.append(x.numel()) or x, state)
        return sum(found)

    model = build()
    assert size(2, 1) == size(9, 7)
    model = build(cross=softmax.Config())
    assert size(2, 1) < size(9, 1)


def test_blocks_computed_again_are_the_same():
    source, tokens = torch.randint(0, 7, (3, 8)), torch.randint(0, 11, (3, 6))
    found = []
    for again in (False, True):
        reads = {"checkpoint_blocks": again, "dropout": 0.2}
        model = build(dropout=0.2, checkpoint_blocks=again, encoder=reads).train()
        torch.manual_seed(5)
        params = model(tokens, model.encode_memory(source, SOURCE_MASK), mask=MASK)
        found.append((params, *torch.autograd.grad(params.square().sum(), list(model.parameters()))))
    assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": {"width": 64}}, "the encoder must have the decoder's width, got 64 and 32"),
        ({"encoder": {"outputs": 2}}, "needs outputs=None and pool=None, got 2 and None"),
        ({"encoder": {"pool": "mean"}}, "needs outputs=None and pool=None, got None and 'mean'"),
        ({"cross": softmax.Config(window=3)}, "causal only"),
        ({"vocabulary": 0}, "vocabulary must be at least 1, got 0"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_refuses_to_turn_what_it_reads():
    mix = AttentionLayer(16, linear.Config(), heads=2)
    read = AttentionLayer(16, linear.Config(), heads=2, causal=False, rope_base=100.0)
    block = CrossBlock(mix, read, MLP(16), width=16)
    with pytest.raises(ValueError, match="cross-attention takes no rotary positions"):
        block.encode_memory(torch.randn(1, 3, 16))


def test_memories_and_states_are_checked():
    model, tokens = build(), torch.zeros(2, 3, dtype=torch.int64)
    memory = model.encode_memory(tokens)
    with pytest.raises(ValueError, match="memory is for 2 sequences, tokens for 1"):
        model(tokens[:1], memory)
    with pytest.raises(ValueError, match="memory is for 2 layers, the model has 1"):
        build(layers=1).start(memory)
    with pytest.raises(TypeError, match="memory must be a Memory, from encode_memory, got Tensor"):
        model(tokens, tokens)
    with pytest.raises(
        TypeError,
        match=r"state must be that of a memory, from model\.start\(model\.encode_memory\(source\)\)",
    ):
        model.extend(tokens)
    with pytest.raises(TypeError, match="memory must be a LinearState"):
        model(tokens, build(cross=softmax.Config()).encode_memory(tokens))


def test_attention_to_itself_and_to_the_source_draw_features_of_their_own():
    model = build(attention=performer.Config(), cross=performer.Config())
    drawn = [x for name, x in model.named_buffers() if name.endswith("weight") and "encoder" not in name]
    assert len(drawn) == 4
    assert all((a != b).any() for i, a in enumerate(drawn) for b in drawn[:i])

"""Recurrent models of the 2020 library: what a state holds, and programs that work with one."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from lintra.compat.fast_transformers.attention import LinearAttention
from lintra.compat.fast_transformers.builders import (
    RecurrentDecoderBuilder,
    RecurrentEncoderBuilder,
    TransformerDecoderBuilder,
    TransformerEncoderBuilder,
)
from lintra.compat.fast_transformers.events import AttentionEvent, EventDispatcher, IntermediateOutput
from lintra.compat.fast_transformers.feature_maps import Favor, FeatureMap
from lintra.compat.fast_transformers.masking import LengthMask, TriangularCausalMask
from lintra.compat.fast_transformers.recurrent.attention import (
    RecurrentAttentionLayer,
    RecurrentCrossAttentionLayer,
    RecurrentCrossFullAttention,
    RecurrentCrossLinearAttention,
    RecurrentFullAttention,
    RecurrentLinearAttention,
)
from lintra.compat.fast_transformers.recurrent.attention.cross_attention import (
    linear_attention as cross_linear,
)
from lintra.compat.fast_transformers.recurrent.attention.self_attention import full_attention as self_full
from lintra.compat.fast_transformers.recurrent.attention.self_attention import linear_attention as self_linear
from lintra.compat.fast_transformers.recurrent.transformers import (
    RecurrentTransformerDecoderLayer,
    RecurrentTransformerEncoder,
    RecurrentTransformerEncoderLayer,
)
from lintra.ops import LinearState, linear_attention
from lintra.ops.features import elu_plus_one
from lintra.testing.laws import EXACT
from tests.ops.test_linear_attention import needs_native

SMALL = {
    "n_layers": 2,
    "n_heads": 3,
    "query_dimensions": 4,
    "value_dimensions": 5,
    "feed_forward_dimensions": 16,
    "dropout": 0.0,
}
TYPES = ["full", "linear"]
LENGTHS = LengthMask(torch.tensor([6, 3]), max_len=6)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def encoder(attention_type, builder=RecurrentEncoderBuilder, **options):
    torch.manual_seed(1)
    return builder.from_kwargs(attention_type=attention_type, **SMALL | options).get().double().eval()


def pair(attention_type):
    """A model for whole sequences, and the same model as an RNN, from its state dict."""
    whole = encoder(
        {"linear": "causal-linear"}.get(attention_type, attention_type), TransformerEncoderBuilder
    )
    rnn = encoder(attention_type)
    rnn.load_state_dict(whole.state_dict())
    return whole, rnn


def decoders(attention_type):
    torch.manual_seed(1)
    own = {"linear": "causal-linear"}.get(attention_type, attention_type)
    types = {"self_attention_type": own, "cross_attention_type": attention_type}
    whole = TransformerDecoderBuilder.from_kwargs(**types, **SMALL).get().double().eval()
    types["self_attention_type"] = attention_type
    rnn = RecurrentDecoderBuilder.from_kwargs(**types, **SMALL).get().double().eval()
    rnn.load_state_dict(whole.state_dict())
    return whole, rnn


def steps(rnn, x, state=None, **options):
    """y [n l c] of x [n l c], one token at a time, and the final state."""
    ys = []
    for token in x.unbind(1):
        y, state = rnn(token, state=state, **options)
        ys.append(y)
    return torch.stack(ys, 1), state


def each(function, state):
    return [[function(x) for x in layer] for layer in state]


FORMS = {
    "lists": lambda state: each(lambda x: x, state),
    "tuples": lambda state: tuple(tuple(layer) for layer in state),
    "detached": lambda state: each(torch.Tensor.detach, state),
    "copies": lambda state: each(torch.clone, state),
    "of other strides": lambda state: each(lambda x: x.mT.contiguous().mT, state),
    "stacked": lambda state: list(
        zip(*(torch.stack(parts) for parts in zip(*state, strict=True)), strict=True)
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("attention_type", TYPES)
def test_a_state_goes_in_whatever_holds_its_tensors(attention_type, form):
    rnn, x = encoder(attention_type), draw(2, 7, 15)
    expected, _ = steps(rnn, x)
    _, state = steps(rnn, x[:, :4])
    y, _ = steps(rnn, x[:, 4:], FORMS[form](state))
    assert_close(y, expected[:, 4:], **EXACT)


@pytest.mark.parametrize("attention_type", TYPES)
def test_a_decoder_takes_its_states_so_too(attention_type):
    _, rnn = decoders(attention_type)
    x, memory = draw(2, 5, 15), draw(2, 6, 15, seed=1)
    expected, _ = steps(rnn, x, memory=memory, memory_length_mask=LENGTHS)
    _, state = steps(rnn, x[:, :2], memory=memory, memory_length_mask=LENGTHS)
    assert isinstance(state, list)
    state = tuple(tuple(tuple(x.detach() for x in part) for part in layer) for layer in state)
    y, _ = steps(rnn, x[:, 2:], state, memory=memory, memory_length_mask=LENGTHS)
    assert_close(y, expected[:, 2:], **EXACT)


@pytest.mark.parametrize("feature_map", [None, Favor.factory(8, stabilize=True)])
def test_what_stands_in_padded_keys_changes_nothing(feature_map):
    """A map that subtracts the maximum over the sequence sees zeros there, as the parallel form does."""
    torch.manual_seed(0)
    recurrent = RecurrentCrossLinearAttention(4, feature_map).double()
    parallel = LinearAttention(4, feature_map).double()
    parallel.load_state_dict(recurrent.state_dict())
    q, k, v = draw(2, 1, 3, 4), draw(2, 6, 3, 4, seed=1), draw(2, 6, 3, 5, seed=2)
    expected = parallel(q, k, v, None, None, LENGTHS)[:, 0]
    for x in (k, v):
        x[1, 3:] = torch.nan
    y, state = recurrent(q[:, 0], k, v, LENGTHS)
    assert_close(y, expected, **EXACT)
    assert all(x.isfinite().all() for x in state)


def test_what_a_state_holds():
    """Keys and values of all tokens, or their sums, each with its axes in the order of the library."""
    q, k, v = draw(3, 2, 5, 3, 4)  # [n l h e]
    v = torch.cat((v, v[..., :1]), -1)
    full, linear, state, sums = RecurrentFullAttention(), RecurrentLinearAttention(4), None, None
    for t in range(5):
        _, state = full(q[:, t], k[:, t], v[:, t], state)
        _, sums = linear(q[:, t], k[:, t], v[:, t], sums)
    keys, values = state
    assert torch.equal(keys, k.movedim(1, 2))
    assert torch.equal(values, v.movedim(1, 2))
    kv, z = sums
    phi = elu_plus_one(k)
    assert_close(kv, torch.einsum("nlhf,nlhd->nhfd", phi, v), **EXACT)
    assert_close(z, phi.sum(1), **EXACT)

    _, (keys, values) = RecurrentCrossFullAttention()(q[:, 0], k, v)
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
    _, (vk, z) = RecurrentCrossLinearAttention(4)(q[:, 0], k, v)
    assert_close(vk, kv.mT, **EXACT)
    assert_close(z, phi.sum(1), **EXACT)


@pytest.mark.parametrize("attention_type", TYPES)
def test_the_list_handed_in_is_filled_and_its_tensors_stay(attention_type):
    rnn, x = encoder(attention_type), draw(2, 2, 15)
    with torch.no_grad():
        _, state = rnn(x[:, 0])
        before = list(state)
        kept = each(torch.clone, state)
        _, after = rnn(x[:, 1], state)
    assert after is state
    for new, old, copies in zip(state, before, kept, strict=True):
        for a, b, c in zip(new, old, copies, strict=True):
            assert a is not b
            assert torch.equal(b, c)
    with torch.no_grad():  # an empty list is the state before any token
        empty = [None, None]
        y, _ = rnn(x[:, 0], empty)
    assert_close(y, rnn(x[:, 0])[0], **EXACT)
    for a, b in zip(empty, kept, strict=True):
        assert_close(a[1], b[1], **EXACT)


def test_a_state_in_a_tuple_stays_as_it_is():
    rnn = encoder("linear")
    _, state = rnn(draw(2, 15))
    given = tuple(state)
    _, after = rnn(draw(2, 15, seed=1), given)
    assert isinstance(after, list)
    assert all(a is b for a, b in zip(given, state, strict=True))


@pytest.mark.parametrize("attention_type", TYPES)
def test_a_state_shares_no_tensor_of_the_caller(attention_type):
    q, k, v = draw(3, 2, 3, 4)
    kind = {"full": RecurrentFullAttention, "linear": lambda: RecurrentLinearAttention(4)}[attention_type]
    attention = kind().eval()
    _, state = attention(q, k, v)
    expected, _ = attention(q, k, v, state)
    _, state = attention(q, k, v)
    again = [x.clone() for x in (q, k, v)]
    k.fill_(torch.nan)
    v.fill_(torch.nan)
    assert_close(attention(*again, state)[0], expected, **EXACT)


@pytest.mark.parametrize("attention_type", TYPES)
def test_beams_reorder_states(attention_type):
    """Every beam continues the sequence it has become, as if the batch model had read its whole past."""
    whole, rnn = pair(attention_type)
    generator, beams = torch.Generator().manual_seed(0), 3
    tokens = draw(2, 1, 15)
    _, state = rnn(tokens[:, 0])
    state = each(lambda x: x.repeat_interleave(beams, 0), state)
    tokens = tokens.repeat_interleave(beams, 0)
    for _ in range(4):
        parents = torch.randint(beams, (2, beams), generator=generator) + beams * torch.arange(2)[:, None]
        state = [[x[parents.flatten()] for x in layer] for layer in state]
        new = torch.randn(2 * beams, 15, generator=generator, dtype=torch.float64)
        tokens = torch.cat((tokens[parents.flatten()], new[:, None]), 1)
        y, state = rnn(new, state)
        expected = whole(tokens, TriangularCausalMask(tokens.shape[1]))
        assert_close(y, expected[:, -1], **EXACT)


class Compound(nn.Module):
    """Words of two parts, each with its embedding and its output; a decoder that keeps a list of states."""

    SIZES = (5, 7)

    def __init__(self, transformer):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, 8) for n in self.SIZES)
        self.qkv_proj = nn.Linear(16, 15)
        self.transformer = transformer
        self.out_proj = nn.ModuleList(nn.Linear(15, n) for n in self.SIZES)

    def entrance(self, words):
        parts = [embed(words[..., i]) for i, embed in enumerate(self.embeddings)]
        return self.qkv_proj(torch.cat(parts, -1))

    def forward(self, words):
        y = self.transformer(self.entrance(words), TriangularCausalMask(words.shape[1]))
        return [out(y) for out in self.out_proj]

    def step(self, words, memory):
        y, memory = self.transformer(self.entrance(words), memory)
        return [out(y) for out in self.out_proj], memory


def test_compound_words_are_generated_from_a_list_of_states():
    whole, rnn = pair("linear")
    torch.manual_seed(0)
    whole = Compound(whole).double()
    rnn = Compound(rnn).double()
    rnn.load_state_dict(whole.state_dict())
    words, state = [torch.tensor([[2, 3]]), torch.tensor([[4, 0]])], None
    with torch.no_grad():
        for i in range(9):
            ends, state = rnn.step(words[i], state)
            if i + 1 == len(words):
                words.append(torch.cat([end.argmax(-1, keepdim=True) for end in ends], -1))
        ends = whole(torch.stack(words[:-1], 1))
    said = torch.stack([end.argmax(-1) for end in ends], -1)[0, 1:]
    assert torch.equal(said, torch.cat(words[2:]))


class Pixels(nn.Module):
    """An image as a sequence of values: learned embedding and places, a transformer, logits."""

    def __init__(self, transformer):
        super().__init__()
        self.value, self.place = nn.Embedding(6, 15), nn.Embedding(12, 15)
        self.transformer = transformer
        self.predictor = nn.Linear(15, 6)

    def forward(self, values):
        x = self.value(values) + self.place(torch.arange(values.shape[1]))
        return self.predictor(self.transformer(x, TriangularCausalMask(values.shape[1])))

    def step(self, value, i, state):
        y, state = self.transformer(self.value(value) + self.place(torch.tensor(i)), state)
        return self.predictor(y), state


@pytest.mark.parametrize("attention_type", TYPES)
def test_images_are_drawn_with_the_weights_of_the_batch_model(attention_type):
    whole, rnn = (Pixels(model).double() for model in pair(attention_type))
    torch.manual_seed(0)
    rnn.load_state_dict(whole.state_dict())
    values, state, logits = torch.randint(6, (2, 1)), None, []
    with torch.no_grad():
        for i in range(12):
            new, state = rnn.step(values[:, i], i, state)
            logits.append(new)
            values = torch.cat((values, new.argmax(-1, keepdim=True)), 1)
        assert_close(torch.stack(logits, 1), whole(values[:, :-1]), **EXACT)


@pytest.mark.parametrize("attention_type", TYPES)
def test_truncated_training_detaches_states(attention_type):
    """Gradients through states equal those of the whole sequence; detached states act as inputs."""
    whole, rnn = pair(attention_type)
    x = draw(2, 6, 15).requires_grad_()
    weight = draw(2, 3, 15, seed=2)

    def gradients(y):
        return torch.autograd.grad((y * weight).sum(), [x, *parameters], allow_unused=True)

    parameters = list(whole.parameters())
    expected = gradients(whole(x, TriangularCausalMask(6))[:, 3:])
    parameters = list(rnn.parameters())
    _, state = steps(rnn, x[:, :3])
    cut = each(torch.Tensor.detach, state)
    for a, b in zip(gradients(steps(rnn, x[:, 3:], state)[0]), expected, strict=True):
        assert_close(a, b, **EXACT)

    g = gradients(steps(rnn, x[:, 3:], list(cut))[0])
    assert (g[0][:, :3] == 0).all()
    with torch.no_grad():
        _, constants = steps(rnn, x[:, :3])
    for a, b in zip(g, gradients(steps(rnn, x[:, 3:], constants)[0]), strict=True):
        assert_close(a, b, **EXACT)
    assert not torch.allclose(g[1], expected[1])


@pytest.mark.parametrize("attention_type", TYPES)
def test_a_mask_of_the_memory_counts_at_every_token(attention_type):
    whole, rnn = decoders(attention_type)
    x, memory = draw(2, 4, 15), draw(2, 6, 15, seed=1)
    dirty = memory.masked_fill(~LENGTHS.bool_matrix[..., None], torch.nan)
    y, _ = steps(rnn, x, memory=dirty, memory_length_mask=LENGTHS)
    causal = TriangularCausalMask(4)
    assert_close(y, whole(x, memory, x_mask=causal, memory_length_mask=LENGTHS), **EXACT)
    assert_close(steps(rnn, x, memory=memory)[0], whole(x, memory, x_mask=causal), **EXACT)


def test_attention_of_ones_own():
    """Any callable will do: it gets heads and the state, and the state it returns is passed on unchanged."""

    def own(query, key, value, state):
        assert query.shape == (2, 3, 4)
        assert value.shape == (2, 3, 5)
        return value, {"count": 1 if state is None else state["count"] + 1}

    def cross(query, keys, values, key_lengths, state=None):
        assert key_lengths.lengths.tolist() == [6, 6]
        return query.new_zeros(2, 3, 5), values if state is None else state

    layer = RecurrentAttentionLayer(own, 15, 3, d_keys=4, d_values=5)
    rnn = RecurrentTransformerEncoder([RecurrentTransformerEncoderLayer(layer, 15, dropout=0.0)])
    _, state = steps(rnn, draw(2, 4, 15, dtype=torch.float32))
    assert state == [{"count": 4}]
    reading = RecurrentCrossAttentionLayer(cross, 15, 3, d_keys=4, d_values=5)
    decoder = RecurrentTransformerDecoderLayer(layer, reading, 15)
    memory = draw(2, 6, 15, dtype=torch.float32)
    _, state = decoder(memory[:, 0], memory)
    _, (count, values) = decoder(memory[:, 0], memory, state=state)
    assert count == {"count": 2}
    assert values.shape == (2, 6, 3, 5)


def test_memory_is_the_old_name_of_a_state():
    rnn = encoder("linear")
    _, state = rnn(draw(2, 15))
    with pytest.warns(DeprecationWarning, match="memory is the deprecated name of state"):
        y, _ = rnn(draw(2, 15), memory=list(state))
    assert_close(y, rnn(draw(2, 15), state)[0], **EXACT)


@pytest.mark.parametrize("attention_type", TYPES)
def test_states_that_do_not_fit_are_refused(attention_type):
    rnn = encoder(attention_type)
    _, state = rnn(draw(2, 15))
    with pytest.raises(ValueError, match="batch changed: the state is for 2 sequences, the query for 3"):
        rnn(draw(3, 15), list(state))
    with pytest.raises(ValueError, match="one for each of 2 layers, got 1"):
        rnn(draw(2, 15), state[:1])
    with pytest.raises(ValueError, match="two tensors, got 3"):
        rnn(draw(2, 15), [[*layer, layer[0]] for layer in state])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_are_in_float32(dtype):
    """A state rounded to half precision may be passed in, too."""
    attention = RecurrentLinearAttention(4)
    q, k, v = draw(3, 2, 3, 4).to(dtype)
    y, state = attention(q, k, v)
    assert y.dtype == dtype
    assert [x.dtype for x in state] == [torch.float32] * 2
    _, expected = attention(q, k, v, [x.to(dtype).float() for x in state])
    _, after = attention(q, k, v, [x.to(dtype) for x in state])
    for a, b in zip(after, expected, strict=True):
        assert torch.equal(a, b)
    reading = RecurrentCrossLinearAttention(4)
    q, k, v = draw(3, 2, 5, 3, 4).to(dtype)
    first, state = reading(q[:, 0], k, v)
    assert [x.dtype for x in state] == [torch.float32] * 2
    again, _ = reading(q[:, 0], k, v, state=state)
    assert again.dtype == dtype
    # Both are float32 sums of a few terms, rounded once.
    assert_close(again, first, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("attention_type", TYPES)
def test_listeners_see_weights_and_change_nothing(attention_type):
    dispatcher, seen = EventDispatcher(), []
    _, rnn = decoders(attention_type)
    x, memory = draw(2, 4, 15), draw(2, 6, 15, seed=1)
    expected, _ = steps(rnn, x, memory=memory, memory_length_mask=LENGTHS)
    for module in rnn.modules():
        if hasattr(module, "event_dispatcher"):
            module.event_dispatcher = dispatcher
    dispatcher.listen(AttentionEvent, seen.append)
    outputs = []
    dispatcher.listen(IntermediateOutput, lambda event: outputs.append(event.x))
    y, _ = steps(rnn, x, memory=memory, memory_length_mask=LENGTHS)
    assert_close(y, expected, **EXACT)
    assert len(outputs) == 2 * 4
    assert_close(rnn.norm(outputs[-1]), y[:, -1], **EXACT)
    if attention_type == "linear":  # it has no such matrix
        assert not seen
        return
    own, read = seen[-2:]
    assert own.attention_matrix.shape == (2, 3, 4)  # [n h s]
    assert_close(own.attention_matrix.sum(2), torch.ones(2, 3).double(), **EXACT)
    assert read.attention_matrix.shape == (2, 6, 3)  # [n s h]
    assert (read.attention_matrix[1, 3:] == 0).all()
    assert_close(read.attention_matrix.sum(1), torch.ones(2, 3).double(), **EXACT)
    assert isinstance(read.source, RecurrentCrossFullAttention)


class Drawn(FeatureMap):
    """A custom map, drawn before each sequence."""

    drawn = 0

    def new_feature_map(self, device=None):
        self.drawn += 1

    def forward(self, x):
        return (x * self.drawn).exp()


def test_a_feature_map_of_ones_own_is_drawn_where_a_sequence_begins():
    attention, reading = RecurrentLinearAttention(4, Drawn), RecurrentCrossLinearAttention(4, Drawn)
    q, k, v = draw(3, 2, 5, 3, 4)
    state = memory = y = None
    for t in range(5):
        _, state = attention(q[:, t], k[:, t], v[:, t], state)
        y, memory = reading(q[:, t], k, v, state=memory)
    assert_close(state[1], k.exp().sum(1), **EXACT)
    expected = torch.einsum("nhd,nshd,nshe->nhe", q[:, 4].exp(), k.exp(), v)
    total = torch.einsum("nhd,nshd->nh", q[:, 4].exp(), k.exp()) + 1e-6
    assert_close(y, expected / total[..., None], **EXACT)
    _, state = attention(q[:, 0], k[:, 0], v[:, 0])
    assert_close(state[1], (2 * k[:, 0]).exp(), **EXACT)


def test_modules_have_their_names():
    assert self_full.RecurrentFullAttention is RecurrentFullAttention
    assert cross_linear.RecurrentCrossLinearAttention is RecurrentCrossLinearAttention


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("feature_map", [None, "elu+1"])
def test_the_short_way_of_one_token_is_the_sum(dtype, feature_map):
    q, k, v = (draw(2, 1, 3, n, seed=i, dtype=dtype).abs() for i, n in enumerate((5, 5, 3)))
    state = None
    for _ in range(3):
        found = self_linear.native_step(q, k, v, state, 1e-6, feature_map)
        y, (kv, z) = linear_attention(q, k, v, state=state, feature_map=feature_map)
        assert found is not None
        for a, b in zip(found, (y, kv, z), strict=True):
            assert torch.equal(a, b)
        state = LinearState(kv, z)


@needs_native
def test_the_short_way_is_for_numbers_alone():
    """Gradients, transforms, graphs and unsuitable inputs are left to the full function."""
    q, k, v = (draw(2, 1, 3, n, seed=i, dtype=torch.float32) for i, n in enumerate((4, 4, 3)))
    kv, z = linear_attention(q, k, v)[1]

    def found(q=q, k=k, v=v, kv=kv, z=z):
        return self_linear.native_step(q, k, v, (kv, z), 1e-6, None) is not None

    assert found()
    learned = q.clone().requires_grad_()
    assert not found(q=learned)
    assert not found(kv=kv.clone().requires_grad_())
    with torch.no_grad():
        assert found(q=learned)
    for wrong in (
        {"k": k[:, :, :2]},
        {"q": q[:1]},
        {"v": v[:1]},
        {"kv": kv.mT},
        {"z": z[:, :2]},
        {"q": q.double()},
        {"kv": kv.bfloat16()},
        {"z": z.to("meta")},
    ):
        assert not found(**wrong)
    assert self_linear.native_step(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, 1e-6, None) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert not found()
    seen = []
    torch.func.vmap(lambda x: seen.append(found(q=x[None])) or x)(q)
    make_fx(lambda x: seen.append(found(q=x)) or x)(q)
    assert seen == [False, False]


def test_a_listener_that_writes_into_weights_changes_no_output():
    """As with whole sequences: the output has been computed."""
    attention, x = RecurrentFullAttention(attention_dropout=0.0), torch.randn(2, 3, 4)
    expected = attention(x, x, x)[0]
    attention.event_dispatcher = EventDispatcher()
    attention.event_dispatcher.listen(AttentionEvent, lambda event: event.attention_matrix.detach().zero_())
    torch.testing.assert_close(attention(x, x, x)[0], expected)

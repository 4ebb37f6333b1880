"""The decoder: the parallel form equals the RNN, in every combination of its parts; what it refuses."""

import copy
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from lintra.attention import delta, gated, linear, longformer, map_state, performer, retention, softmax
from lintra.models import decoder
from lintra.nn import LogisticMixture
from lintra.ops import layout
from lintra.ops.layout import Layout

EXACT = {"rtol": 1e-8, "atol": 1e-10}  # float64 through two layers


def build(**changes):
    torch.manual_seed(0)
    options = {"vocabulary": 11, "layers": 2, "heads": 4, "width": 32} | changes
    return decoder.Config(**options).build().double().eval()


KINDS = [
    {"attention": attention} | changes
    for attention in (linear.Config(), softmax.Config(), softmax.Config(window=4))
    for changes in (
        {"position": "sinusoidal"},
        {"position": "concatenated", "norm": "post"},
        {"position": "learned", "max_length": 30, "kv_heads": 2},
        {"position": "rotary", "activation": "swiglu", "norm_kind": "rms"},
        {"position": "none", "embed": "value", "output": LogisticMixture(components=3)},
        {"position": "sinusoidal", "start": False},
        {"position": "grid", "grid": (3, 5, 2), "context": (1, 4, 7), "norm": "post", "final_norm": True},
    )
]
HYBRIDS = [
    {"attention": (gated.Config(), softmax.Config()), "layers": 4},
    {"attention": (delta.Config(), softmax.Config(window=4), retention.Config()), "layers": 3, "kv_heads": 2},
    {"attention": (linear.Config(rotary="inputs"), softmax.Config()), "position": "rotary", "conv": 3},
]
TIED = [{"tie_embeddings": True} | x for x in ({}, {"start": False}, {"context": (1, 3)})]
KINDS += HYBRIDS + TIED
KINDS += [
    {"head_dim": 6, "heads": 3, "attention": attention, "position": "rotary", "conv": 3, "output_gate": True}
    for attention in (linear.Config(rotary="inputs"), softmax.Config(window=4))
]
KINDS += [{"head_dim": 16, "kv_heads": 2, "attention": retention.Config()}]


def test_the_base_of_rotary_positions_is_that_of_every_layer():
    """The slowest of four pairs of features turns by base ** -0.75 a token."""
    model = build(position="rotary", rope_base=500.0, heads=2, width=16, attention=softmax.Config(scale=1.0))
    assert [block.attn.rope_base for block in model.blocks] == [500.0] * len(model.blocks)
    k = torch.eye(8, dtype=torch.float64)[3].expand(1, 9, 1, 8)
    turned = model.blocks[0].attn._rope(Layout(1, 9, k.device))(k)
    angle = torch.arange(9) * 500.0**-0.75
    assert_close(turned[0, :, 0, 3], angle.cos().double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_parallel_is_recurrent(kind):
    model = build(**kind)
    tokens = torch.randint(0, 11, (2, 13))
    expected = model(tokens)
    assert expected.shape == (2, 13, model.output.size)
    for cuts in ((13,), (1,) * 13, (5, 1, 7)):
        state, found = None, []
        for part in tokens.split(cuts, 1):
            params, state = model.extend(part, state)
            found.append(params)
        assert_close(torch.cat(found, 1), expected, **EXACT)
        assert torch.equal(state.seen, torch.tensor([13, 13]))


def test_global_tokens_are_named_at_each_call():
    """In parallel and piece by piece; their projections have gradients."""
    model = build(attention=longformer.Config(window=2, global_projections=True))
    tokens = torch.randint(0, 11, (2, 13))
    chosen = torch.arange(13)[None].expand(2, -1) % 5 == 1
    y = model(tokens, global_mask=chosen)
    assert not torch.equal(y, model(tokens))
    y.sum().backward()
    (extra,) = (block.attn.extra_proj for block in model.blocks[:1])
    assert all(x.grad.abs().max() > 0 for x in extra.parameters() if x.dim() == 2)
    state, found = None, []
    for part, here in zip(tokens.split((5, 1, 7), 1), chosen.split((5, 1, 7), 1), strict=True):
        params, state = model.extend(part, state, global_mask=here)
        found.append(params)
    assert_close(torch.cat(found, 1), y, **EXACT)
    with pytest.raises(TypeError, match="takes no global_mask"):
        build(attention=linear.Config())(tokens, global_mask=chosen)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ragged_batches_are_their_sequences_alone(kind):
    model = build(**kind)
    tokens = torch.randint(0, 11, (3, 9))
    mask = torch.tensor([[True] * 9, [True] * 4 + [False] * 5, [False] * 6 + [True] * 3])
    junk = tokens.masked_fill(~mask, -100)
    more = torch.randint(0, 11, (3, 2))
    params = model(junk, mask=mask)
    _, state = model.extend(junk, mask=mask)
    after, _ = model.extend(more, state)
    for i in range(3):
        alone = tokens[i : i + 1, mask[i]]
        assert_close(params[i : i + 1, mask[i]], model(alone), **EXACT)
        assert_close(after[i : i + 1], model(torch.cat((alone, more[i : i + 1]), 1))[:, -2:], **EXACT)


@pytest.mark.parametrize("kind", TIED, ids=str)
def test_a_tied_head_is_the_table_of_the_embedding(kind):
    model, free = build(**kind), build(**kind | {"tie_embeddings": False})
    weights = model.state_dict()
    name = "embedding.own.table.weight" if model.config.context else "embedding.table.weight"
    assert free.state_dict().keys() - weights.keys() == {"head.weight"}
    free.load_state_dict(weights | {"head.weight": weights[name][:11]})
    tokens = torch.randint(0, 11, (2, 9))
    assert_close(model(tokens), free(tokens), **EXACT)
    for each in (model, free):
        each(tokens).sin().sum().backward()
    found, read = (x.get_parameter(name).grad for x in (model, free))
    read[:11] += free.head.weight.grad
    assert_close(found, read, **EXACT)
    copied = copy.deepcopy(model)
    copied.get_parameter(name).data.zero_()
    assert not (copied.head.weight != 0).any()
    assert (model.head.weight != 0).any()


def test_a_fresh_tied_head_is_not_sure_of_anything():
    model = build(tie_embeddings=True, vocabulary=64, width=256)
    log_probs = model.output.log_probs(model(torch.randint(0, 64, (4, 50))))
    assert log_probs.logsumexp(-1).abs().max() < 1e-6
    assert log_probs.exp().amax(-1).mean() < 0.5


@pytest.mark.parametrize("kind", HYBRIDS, ids=str)
def test_packed_sequences_of_a_hybrid_are_its_sequences_alone(kind):
    model, lengths = build(**kind), [5, 1, 0, 7]
    parts = [torch.randint(0, 11, (1, n)) for n in lengths]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    row, token = torch.cat(parts, 1), torch.randint(0, 11, (4, 1))
    alone = torch.cat([model(part) for part in parts], 1)
    assert_close(model(row, cu_seqlens=cu_seqlens), alone, **EXACT)
    params, state = model.extend(row, cu_seqlens=cu_seqlens)
    assert_close(params, alone, **EXACT)
    after, _ = model.extend(token, state)
    for i, part in enumerate(parts):
        whole = model(torch.cat((part, token[i : i + 1]), 1))
        assert_close(after[i], whole[0, -1:], **EXACT)


def test_the_mechanisms_of_a_hybrid_repeat():
    first, last = gated.Config(), softmax.Config(window=4)
    model = build(attention=[first, last], layers=4)
    assert model.config.attention == (first, last)
    assert [block.attn.attention.config for block in model.blocks] == [first, last] * 2
    for layer, alone in zip(model.start(3).layers, (first, last) * 2, strict=True):
        own = alone.build(heads=4, dim=8, causal=True).start(3, dtype=torch.float64)
        assert type(layer.attention) is type(own)
        assert [x.shape for x in layer.attention] == [x.shape for x in own]
    state = model.start(2)
    with pytest.raises(TypeError, match="state must be a"):
        model.extend(torch.tensor([[1], [2]]), state._replace(layers=state.layers[::-1]))


def test_several_times_one_mechanism_are_the_mechanism():
    tokens = torch.randint(0, 11, (2, 9))
    one, several = (build(attention=x) for x in (performer.Config(), (performer.Config(),) * 2))
    assert torch.equal(one(tokens), several(tokens))
    first, second = (block.attn.attention.config for block in several.blocks)
    assert first.seed + 1 == second.seed  # each layer has its own features


def test_heads_of_their_own_size():
    model = build(head_dim=6, heads=3, width=32, kv_heads=1)
    layer = model.blocks[0].attn
    assert layer.qkv_proj.weight.shape == ((3 + 1 + 1) * 6, 32)
    assert layer.out_proj.weight.shape == (32, 3 * 6)
    assert model.start(2).layers[0].attention.kv.shape[-2:] == (6, 6)
    given, own = build(head_dim=8), build()
    tokens = torch.randint(0, 11, (2, 9))
    assert torch.equal(given(tokens), own(tokens))


def test_the_future_has_no_gradient():
    model = build()
    x = model.embedding(torch.randint(0, 11, (1, 9))).detach().requires_grad_()
    model.embedding.forward = lambda tokens: x
    (gradient,) = torch.autograd.grad(model(torch.zeros(1, 9, dtype=torch.int64))[:, 4].sum(), x)
    assert (gradient[:, 5:] == 0).all()
    assert (gradient[:, :5] != 0).any()


def test_shift_checks_what_it_shifts():
    """The check in `forward` would come too late: its message would name other axes."""
    model = build()
    with pytest.raises(ValueError, match=r"targets must have the 2 axes \[b t\], got shape \[3\]"):
        model.shift(torch.tensor([3, 4, 5]))
    with pytest.raises(TypeError, match=r"targets must be a tensor \[b t\], got list"):
        model.shift([[3, 4, 5]])


def test_shift_starts_with_the_start_symbol():
    model = build()
    assert torch.equal(model.shift(torch.tensor([[3, 4, 5]])), torch.tensor([[11, 3, 4]]))
    with pytest.raises(ValueError, match="start=True"):
        build(start=False).shift(torch.tensor([[3]]))


def test_the_start_symbol_stands_before_the_first_real_target():
    model, targets = build(), torch.tensor([[9, 3, 4, 5], [3, 9, 4, 5], [3, 4, 5, 9]])
    mask = targets != 9
    shifted = model.shift(targets, mask=mask)
    assert torch.equal(shifted[mask].view(3, 3), torch.tensor([[11, 3, 4]] * 3))


def test_a_model_of_16_bits_keeps_its_positions():
    """Codes are computed in float64 and rounded once: bfloat16 cannot represent position 1,001."""
    model = build(vocabulary=2, layers=1)
    exact = model(torch.zeros(1, 1_100, dtype=torch.int64))
    rounded = model.bfloat16()(torch.zeros(1, 1_100, dtype=torch.int64))
    assert_close(rounded.double(), exact, rtol=0.05, atol=0.05)


def test_states_can_be_indexed():
    model = build()
    _, state = model.extend(torch.randint(0, 11, (3, 5)))
    order = torch.tensor([2, 0])
    token = torch.tensor([[1], [2]])
    params, _ = model.extend(token, map_state(lambda x: x[order], state))
    both, _ = model.extend(torch.tensor([[2], [7], [1]]), state)
    assert_close(params, both[order], **EXACT)


def test_the_papers_model_has_the_papers_size():
    """6.36 M parameters, and a state of 264 KiB per sequence."""
    config = decoder.Config(vocabulary=256, position="concatenated", output=LogisticMixture(), norm="post")
    model = config.build()
    assert sum(x.numel() for x in model.parameters()) == pytest.approx(6.36e6, rel=0.002)
    sizes = []
    map_state(
        lambda x: sizes.append(x.numel() * x.element_size()) or x,
        [s.attention for s in model.start(1).layers],
    )
    assert sum(sizes) == 264 * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 0}, "vocabulary must be at least 1, got 0"),
        ({"width": 30}, "width must be a multiple of heads, got 30 and 4"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"head_dim": 5, "position": "rotary"}, "rope_base .* needs an even head size, got 10000.0 and 5"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"position": "learned"}, "max_length goes with position='learned', got None"),
        ({"max_length": 5}, "max_length goes with position='learned', got 5 with 'sinusoidal'"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"mlp_ratio": -1}, "mlp_ratio must be at least 0 widths and finite, got -1"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        *(
            (
                {"tie_embeddings": True} | changes,
                "tie_embeddings needs a vector as wide as the network for each",
            )
            for changes in (
                {"embed": "value"},
                {"output": LogisticMixture(components=3)},
                {"position": "concatenated"},
            )
        ),
        ({"attention": ()}, r"attention must be at least one mechanism's configuration, got \(\)"),
        (
            {"attention": (linear.Config(),) * 3},
            "layers must be a multiple of the mechanisms in attention, got 2 layers and 3 mechanisms",
        ),
        (
            {"width": 36, "heads": 18, "position": "rotary", "kv_heads": 5},
            "multiple of kv_heads, got 18 and 5",
        ),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "absolute"}, "position must be 'sinusoidal' or .* got 'absolute'"),
        ({"embed": "patch"}, "embed must be 'token' or 'value', got 'patch'"),
        ({"vocabulary": 2.5}, "vocabulary must be int, got 2.5"),
        ({"layers": True}, "layers must be int, got True"),
        ({"attention": "linear"}, "attention must be a mechanism's configuration, such as .*, got 'linear'"),
        (
            {"attention": (linear.Config(), "softmax")},
            r"attention must be a mechanism's .* or several, got \(Config\(.*",
        ),
        ({"attention": linear.Config}, "attention must be a mechanism's configuration, .*, got <class"),
        ({"output": "logits"}, "output must be Logits or LogisticMixture, got 'logits'"),
        ({"kv_heads": 2.0}, "kv_heads must be int or None, got 2.0"),
    ],
)
def test_config_refuses_wrong_types(changes, message):
    with pytest.raises(TypeError, match=message):
        build(**changes)


def test_tokens_are_checked():
    model = build()
    with pytest.raises(ValueError, match="tokens must be between 0 and 11, got 12"):
        model(torch.tensor([[3, 12]]))
    with pytest.raises(ValueError, match="tokens must be between 0 and 11, got -1"):
        model(torch.tensor([[3, -1]]))
    with pytest.raises(ValueError, match="tokens must be between 0 and 10, got 11"):
        build(start=False)(torch.tensor([[11]]))
    with pytest.raises(TypeError, match=r"tokens must be int64 or int32, got torch\.float32"):
        model(torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"tokens must have the 2 axes \[b t\]"):
        model(torch.zeros(2, dtype=torch.int64))


def test_states_are_checked():
    model, token = build(), torch.tensor([[1], [2]])
    with pytest.raises(ValueError, match="state is for 3 sequences, tokens for 2"):
        model.extend(token, model.start(3))
    with pytest.raises(ValueError, match="state is for 1 layers, the model has 2"):
        model.extend(token, build(layers=1).start(2))
    with pytest.raises(TypeError, match="state must be a DecoderState, got tuple"):
        model.extend(token, (1, 2))
    with pytest.raises(ValueError, match=r"state\.kv must be"):
        model.extend(token, build(width=64).start(2))
    with pytest.raises(TypeError, match="state must be a LinearState"):
        model.extend(token, build(attention=softmax.Config()).start(2))


COMPILED = """
import torch
from lintra.attention import linear, softmax
from lintra.models import decoder

for attention in (linear.Config(), softmax.Config()):
    for position in ("concatenated", "rotary"):
        shape = {"vocabulary": 64, "layers": 1, "heads": 4, "width": 64}
        model = decoder.Config(attention=attention, position=position, **shape).build().eval()
        tokens = torch.randint(0, 64, (2, 33))
        mask = torch.arange(33) < torch.tensor([[33], [20]])
        found = torch.compile(model, fullgraph=True)(tokens, mask=mask)
        torch.testing.assert_close(found, model(tokens, mask=mask), rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            _, state = model.extend(tokens)
            found, _ = torch.compile(model.extend, fullgraph=True)(tokens[:, :1], state)
            torch.testing.assert_close(found, model.extend(tokens[:, :1], state)[0], rtol=1e-4, atol=1e-4)
print("same")
"""


@pytest.mark.slow
def test_torch_compile_keeps_a_model_in_one_graph():
    """Both verbs. In a separate process, since the compiler gives warnings."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILED], capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_samples_and_ensembles_in_torch_func(kind):
    """The gradients for each of several ragged sequences, and the outputs of two models for them."""
    models = [build(**kind), build(**kind)]
    for parameter in models[1].parameters():
        parameter.data.mul_(1.1)
    tokens = torch.randint(0, 11, (3, 1, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([9, 4, 1])[:, None, None]

    def loss(parameters, tokens, mask):
        params = torch.func.functional_call(models[0], parameters, (tokens,), {"mask": mask})
        return -(models[0].output.log_prob(params, tokens) * mask).sum()

    own, each = dict(models[0].named_parameters()), list(zip(tokens, mask, strict=True))
    samples = torch.vmap(torch.func.grad(loss), (None, 0, 0))(own, tokens, mask)
    alone = [torch.autograd.grad(loss(own, *x), own.values()) for x in each]
    expected = [torch.stack(x) for x in zip(*alone, strict=True)]
    assert_close(list(samples.values()), expected, **EXACT)
    stacked, _ = torch.func.stack_module_state(models)
    ensemble = torch.vmap(loss, (0, None, None))(stacked, *each[0])
    expected = [loss(dict(model.named_parameters()), *each[0]) for model in models]
    assert_close(ensemble, torch.stack(expected), **EXACT)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packed_sequences_are_each_alone(kind):
    """Values, and continuing from the states of a row of prompts: packed again, then as a batch."""
    model = build(**kind)
    lengths, more = [4, 0, 9, 1], [2, 3, 0, 1]
    row, rest, last = (torch.randint(0, 11, (1, n)) for n in (sum(lengths), sum(more), 4))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    first, state = model.extend(row, cu_seqlens=cu_seqlens)
    assert_close(first, model(row, cu_seqlens=cu_seqlens), **EXACT)
    second, state = model.extend(rest, state, cu_seqlens=torch.tensor([0, *more]).cumsum(0))
    third, state = model.extend(last.mT, state)
    assert state.seen.tolist() == [7, 4, 10, 3]
    pieces = [x.split(n, 1) for x, n in ((row, lengths), (rest, more), (last, [1] * 4))]
    found = zip(first.split(lengths, 1), second.split(more, 1), third[:, None], strict=True)
    for tokens, params in zip(zip(*pieces, strict=True), found, strict=True):
        assert_close(torch.cat(params, 1), model(torch.cat(tokens, 1)), **EXACT)


@pytest.mark.parametrize("mechanism", [linear.Config(), softmax.Config(), softmax.Config(window=4)], ids=str)
@pytest.mark.parametrize("checkpoint_blocks", [False, True])
def test_the_loss_of_packed_sequences_is_that_of_each(mechanism, checkpoint_blocks):
    """Each sequence begins with the start symbol; gradients of all parameters."""
    model = build(attention=mechanism, position="rotary", checkpoint_blocks=checkpoint_blocks)
    lengths = [5, 0, 2, 8]
    targets, cu_seqlens = torch.randint(0, 11, (1, 15)), torch.tensor([0, 5, 5, 7, 15])
    shifted = model.shift(targets, cu_seqlens)
    assert torch.equal(shifted, torch.cat([model.shift(x) for x in targets.split(lengths, 1)], 1))
    packed = model.output.log_prob(model(shifted, cu_seqlens=cu_seqlens), targets).sum()
    parts = [x for x in targets.split(lengths, 1) if x.numel()]
    alone = sum(model.output.log_prob(model(model.shift(x)), x).sum() for x in parts)
    assert_close(packed, alone, **EXACT)
    parameters = list(model.parameters())
    assert_close(torch.autograd.grad(packed, parameters), torch.autograd.grad(alone, parameters), **EXACT)


@pytest.mark.parametrize("checkpoint_blocks", [False, True])
def test_a_row_is_checked_and_laid_out_once(monkeypatch, checkpoint_blocks):
    """Not in every layer, nor in recomputed blocks; and a row that is built once serves many calls."""
    calls = []
    for name in ("_pad_all", "_pad_bucketed", "_check_cu_seqlens"):
        way = getattr(layout, name)
        monkeypatch.setattr(layout, name, lambda *args, name=name, way=way: calls.append(name) or way(*args))
    model = build(attention=softmax.Config(), layers=3, checkpoint_blocks=checkpoint_blocks)
    tokens, cu_seqlens = torch.randint(0, 11, (1, 5)), torch.tensor([0, 2, 5])
    params = model(tokens, cu_seqlens=cu_seqlens)
    params.sum().backward()
    assert calls == ["_check_cu_seqlens", "_pad_bucketed"]
    made = Layout.of("tokens", tokens, cu_seqlens=cu_seqlens)
    again, state = model.extend(tokens, cu_seqlens=made)
    model.extend(tokens, state, cu_seqlens=made)
    assert calls == ["_check_cu_seqlens", "_pad_bucketed", "_check_cu_seqlens", "_pad_all"]
    assert_close(again, params, **EXACT)
    with pytest.raises(ValueError, match="layout is for b=1 and t=5 on cpu, tokens has shape"):
        model(tokens[:, :4], cu_seqlens=made)


def test_a_row_first_used_without_gradients_serves_training():
    """Tensors made in inference mode cannot be saved for a backward pass."""
    model, tokens = build(attention=softmax.Config(), position="rotary"), torch.randint(0, 11, (1, 5))
    row = Layout.of("tokens", tokens, cu_seqlens=torch.tensor([0, 2, 5]))
    with torch.inference_mode():
        before = model(tokens, cu_seqlens=row)
    after = model(tokens, cu_seqlens=row)
    after.sum().backward()
    assert_close(after, before.clone(), **EXACT)


def test_refuses_what_is_not_packed_well():
    model, tokens = build(), torch.zeros(1, 5, dtype=torch.int64)
    good, state = torch.tensor([0, 2, 5]), model.start(1)
    with pytest.raises(ValueError, match=r"cu_seqlens must end with the number of tokens, t=5, got 4"):
        model(tokens, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"one row: tokens must be \[1 t \.\.\.\]"):
        model(tokens.expand(2, -1), cu_seqlens=good)
    with pytest.raises(ValueError, match="cu_seqlens and mask exclude each other"):
        model(tokens, mask=tokens == 0, cu_seqlens=good)
    with pytest.raises(ValueError, match="one row: targets must be"):
        model.shift(tokens.expand(2, -1), good)
    with pytest.raises(ValueError, match="state is for 1 sequences, tokens for 2"):
        model.extend(tokens, state, cu_seqlens=good)
    with pytest.raises(ValueError, match="cu_seqlens must be on the device of tokens, meta, got cpu"):
        Layout.of("tokens", tokens.to("meta"), cu_seqlens=good)


SCRIPT = """
import torch
from lintra.models import decoder
torch.manual_seed(0)
model = decoder.Config(vocabulary=9, layers=2, heads=2, width=16, position="rotary").build()
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
for lengths in ([5, 0, 28], [33, 1, 7, 0]):
    tokens = torch.randint(0, 9, (1, sum(lengths)))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    found, expected = (call(tokens, cu_seqlens=cu_seqlens) for call in (compiled, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
print("same")
"""


@pytest.mark.slow
def test_packed_sequences_compile_into_one_graph():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": (0,)}, r"context must be different offsets, each at least 1, got \(0,\)"),
        ({"context": (2, 2)}, r"context must be different offsets, each at least 1, got \(2, 2\)"),
        ({"context": (10**9,)}, "context must look back 65,536 places at most, got 1,000,000,000"),
        ({"context": (1,), "start": False}, "context needs start=True"),
        ({"context": (1,), "embed": "value"}, "and embed='token', got start=True and embed='value'"),
        ({"rope_base": 500.0}, "rope_base goes with position='rotary', got 500.0 with 'sinusoidal'"),
        ({"rope_base": 1.0, "position": "rotary"}, "rope_base must be above 1 and finite, got 1.0"),
        ({"position": "grid"}, r"grid goes with position='grid', .* got \(\) with 'grid'"),
        ({"position": "grid", "grid": (3, 0)}, r"sizes of at least 1, got \(3, 0\)"),
        ({"grid": (3, 4)}, r"grid goes with position='grid', .* got \(3, 4\) with 'sinusoidal'"),
    ],
)
def test_what_is_seen_of_earlier_symbols_and_places_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_a_state_remembers_as_far_as_the_embedding_looks():
    far, near = build(context=(3,)), build(context=(1,))
    with pytest.raises(ValueError, match=r"state must remember 3 places, got recent of \[2, 1\]"):
        far.extend(torch.tensor([[1], [2]]), near.start(2))
    with pytest.raises(ValueError, match=r"positions in a grid of .* reach 6 tokens, got token 7"):
        build(position="grid", grid=(2, 3))(torch.zeros(1, 7, dtype=torch.int64))

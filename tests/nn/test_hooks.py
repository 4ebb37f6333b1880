"""Forward hooks of layers run with a state just as they do for a whole sequence."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

from lintra.attention import linear, softmax
from lintra.generation import generate, generate_reference
from lintra.models import decoder, seq2seq
from lintra.nn import AttentionLayer

TOKENS = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))


def build(attention):
    torch.manual_seed(0)
    config = decoder.Config(vocabulary=11, attention=attention, layers=2, heads=2, width=8)
    return config.build().double().eval()


def steered(module, inputs, y):
    return y + torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)


def doubled(module, inputs):
    return tuple(2 * x for x in inputs)


def with_options(module, inputs, options):
    assert "layout" in options
    return (inputs[0] + 1, *inputs[1:]), options


def steered_by_options(module, inputs, options, y):
    assert "layout" in options
    return 3 * y


def noted(module, inputs):
    """Observe, and replace nothing."""


def add(module, *kinds):
    for kind in kinds:
        if kind in (doubled, noted):
            module.register_forward_pre_hook(kind)
        elif kind is with_options:
            module.register_forward_pre_hook(kind, with_kwargs=True)
        else:
            module.register_forward_hook(kind, with_kwargs=kind is steered_by_options)


@pytest.mark.parametrize("kinds", [(steered,), (doubled, noted), (with_options, steered_by_options)])
@pytest.mark.parametrize("part", ["blocks.0", "blocks.1.attn", "blocks.0.attn.attention"])
@pytest.mark.parametrize("attention", [linear.Config(), softmax.Config()], ids=["linear", "softmax"])
@torch.no_grad()
def test_of_a_decoder(attention, part, kinds):
    model, plain = build(attention), build(attention)
    add(model.get_submodule(part), *kinds)
    whole = model(TOKENS)
    assert not torch.allclose(whole, plain(TOKENS))
    first, state = model.extend(TOKENS[:, :4])
    found = [first]
    for token in TOKENS[:, 4:].split(1, 1):
        params, state = model.extend(token, state)
        found.append(params)
    assert_close(torch.cat(found, 1), whole, rtol=1e-9, atol=1e-9)
    expected = generate_reference(model, TOKENS[:, :3], steps=5, seed=0)
    assert torch.equal(generate(model, TOKENS[:, :3], steps=5, seed=0), expected)


@pytest.mark.parametrize("part", ["blocks.0", "blocks.0.cross_attn", "blocks.1.cross_attn.attention"])
@torch.no_grad()
def test_of_a_decoder_that_reads_a_memory(part):
    torch.manual_seed(0)
    inside = {"layers": 2, "heads": 2, "width": 8}
    config = seq2seq.Config(
        vocabulary=11, encoder=seq2seq.encoder.Config(vocabulary=11, causal=False, **inside), **inside
    )
    model = config.build().double().eval()
    memory = model.encode_memory(TOKENS)
    before = model(TOKENS, memory)
    model.get_submodule(part).register_forward_hook(steered)
    whole = model(TOKENS, memory)
    assert not torch.allclose(whole, before)
    found, _ = model.extend(TOKENS, model.start(memory))
    assert_close(found, whole, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_copy_of_a_compiled_mechanism_is_its_own():
    layer = AttentionLayer(16, linear.Config(feature_map=linear.Hedgehog()), heads=2)
    layer.attention.compile(backend="eager")
    other, x = copy.deepcopy(layer), torch.randn(1, 5, 16)
    for parameter in other.attention.parameters():
        parameter.data.zero_()
    assert not torch.equal(other(x), layer(x))
    pickle.dumps(layer.attention)

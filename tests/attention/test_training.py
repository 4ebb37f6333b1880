"""What a custom training loop calls: features drawn on schedule, parameters exempt from weight decay."""

import pytest
import torch
from torch import nn

from lintra import attention
from lintra.attention import AttentionConfig, bigbird, clustered, delta, linear, lsh, performer, rfa, ssd
from lintra.checkpoint import from_json, to_json
from lintra.nn import AttentionLayer


def network(*configs):
    return nn.Sequential(*(AttentionLayer(16, config, heads=2) for config in configs))


def drawn(model):
    """The buffers of each layer, as one vector per layer."""
    return [torch.cat([torch.empty(0), *(x.flatten() for x in layer.buffers())]) for layer in model]


def redraw(model, step, seed=5):
    attention.redraw(model, step, torch.Generator().manual_seed(seed))
    return drawn(model)


@pytest.mark.parametrize(("step", "changed"), [(0, []), (1, [1]), (2, [1]), (3, [0, 1]), (6, [0, 1])])
def test_features_are_drawn_when_it_is_time(step, changed):
    model = network(
        performer.Config(redraw_every=3), rfa.Config(), rfa.Config(redraw_every=None), linear.Config()
    )
    before = drawn(model)
    after = redraw(model, step)
    assert [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if not x.equal(y)] == changed


@pytest.mark.parametrize(("module", "causal"), [(lsh, True), (clustered, False)])
def test_hashes_are_drawn_at_each_step_unless_they_are_to_stay(module, causal):
    one, kept, some = (module.Config(**each) for each in ({}, {"redraw_every": None}, {"redraw_every": 2}))
    model = nn.Sequential(
        *(AttentionLayer(16, config, heads=2, causal=causal) for config in (one, kept, some))
    )
    before = drawn(model)
    for step, expected in ((0, []), (1, [0]), (2, [0, 2])):
        after = redraw(model, step, seed=step)
        assert [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if not x.equal(y)] == expected
        before = after
    with pytest.raises(ValueError, match="redraw_every must be at least 1, got 0"):
        module.Config(redraw_every=0)


@pytest.mark.parametrize("module", [lsh, clustered])
def test_models_from_before_hashes_were_redrawn_keep_theirs(module):
    older = to_json(module.Config())
    del older["redraw_every"]
    assert from_json(AttentionConfig, older, "attention") == module.Config(redraw_every=None)


@pytest.mark.parametrize("module", [bigbird, clustered, lsh, performer, rfa])
def test_what_is_sampled_is_on_the_default_device(module):
    with torch.device("meta"):
        layer = AttentionLayer(16, module.Config(), heads=2, causal=False)
    assert all(x.is_meta for x in layer.buffers())
    assert [x.dtype for x in layer.buffers()] == [
        x.dtype for x in AttentionLayer(16, module.Config(), heads=2, causal=False).buffers()
    ]


def test_the_same_generator_draws_the_same():
    one, other = network(rfa.Config(seed=0)), network(rfa.Config(seed=1))
    assert redraw(one, 1)[0].equal(redraw(other, 1)[0])
    assert not redraw(one, 1, seed=1)[0].equal(drawn(other)[0])


def test_parameters_that_are_not_decayed():
    model = network(linear.Config(), delta.Config())
    layer = model[1].attention
    assert {id(x) for x in attention.no_weight_decay(model)} == {id(layer.A_log), id(layer.dt_bias)}


def test_a_mechanism_may_lack_what_is_not_to_be_decayed():
    layer = AttentionLayer(16, ssd.Config(skip=False), heads=2).attention
    model = nn.Sequential(layer, *network(delta.Config(decay=False)))
    assert {id(x) for x in attention.no_weight_decay(model)} == {id(layer.A_log), id(layer.dt_bias)}

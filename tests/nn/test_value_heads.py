"""More value heads than key heads in layers and networks."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from lintra import checkpoint
from lintra.attention import delta, gated, kda, retention, ssd
from lintra.generation import generate
from lintra.models import decoder
from lintra.nn import AttentionLayer
from lintra.testing.laws import EXACT, some_masks
from tests.nn.inputs import draw

CONFIGS = [module.Config(value_heads=8) for module in (delta, kda, gated, ssd, retention)]
each = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__module__[17:])
PARTS = {"conv": 3, "qk_norm": "l2", "output_gate": True}


def build(config, **options) -> AttentionLayer:
    torch.manual_seed(0)
    return AttentionLayer(24, config, heads=4, kv_heads=2, rope_base=100.0, **options).double()


@each
@pytest.mark.parametrize("parts", [{}, PARTS], ids=["plain", "parts"])
def test_a_layer_projects_to_all_of_them(config, parts):
    layer, x = build(config, **parts), draw()
    assert layer.widths == [24, 12, 48]
    assert layer.out_proj.in_features == 48
    y, state = layer(x), None
    assert y.shape == x.shape
    for i in range(0, 9, 2):
        found, state = layer.extend(x[:, i : i + 2], state)
        assert_close(found, y[:, i : i + 2], **EXACT)


@each
def test_as_many_as_key_heads_change_nothing(config):
    layers = [build(replace(config, value_heads=heads), **PARTS) for heads in (2, None)]
    first, second = (layer.state_dict() for layer in layers)
    assert list(first) == list(second)
    assert_close(first, second, rtol=0, atol=0)


@each
def test_padding_and_packing_change_nothing(config):
    layer, x = build(config, **PARTS), draw()
    for mask in some_masks(9):
        y = layer(x.masked_fill(~mask[..., None], torch.nan), mask=mask)
        for i, real in enumerate(mask):
            assert_close(y[i, real][None], layer(x[i, real][None]), **EXACT)
            assert not y[i, ~real].any()
    packed = layer(x[:1], cu_seqlens=torch.tensor([0, 4, 4, 9]))
    assert_close(packed, torch.cat((layer(x[:1, :4]), layer(x[:1, 4:])), 1), **EXACT)


def network(config) -> decoder.Decoder:
    torch.manual_seed(0)
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 16}
    return decoder.Config(vocabulary=11, attention=config, **shape).build()


@each
def test_a_decoder_trains_generates_and_is_kept(config, tmp_path):
    model, targets = network(config), torch.arange(24).reshape(2, 12) % 11
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        loss = -model.output.log_prob(model(model.shift(targets)), targets).mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    checkpoint.save(model.eval(), tmp_path / "model")
    loaded = checkpoint.load(tmp_path / "model")
    assert loaded.config == model.config
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert generate(loaded, steps=6, seed=0).shape == (1, 6)


@each
def test_a_configuration_of_before_has_as_many(config):
    content = checkpoint.to_json(config)
    del content["value_heads"]
    assert checkpoint.from_json(type(config), content, "attention").value_heads is None


@each
def test_a_network_refuses_what_does_not_divide(config):
    with pytest.raises(ValueError, match="value_heads must be a multiple of the key heads, got 8 and g=3"):
        AttentionLayer(24, config, heads=3)

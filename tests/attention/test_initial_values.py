"""Initial values that the papers or PyTorch's layers prescribe. Those of delta: test_delta.py."""

import pytest
import torch

from lintra.attention import gated, kda, ssd
from lintra.nn import Learned
from lintra.nn.embedding import TokenEmbedding


@pytest.mark.parametrize(
    ("config", "name"), [(gated.Config(rank=16), "weight"), (kda.Config(rank=16), "decay_weight")]
)
def test_gates_begin_as_a_linear_layer(config, name):
    """Uniform in +-rank^-1/2."""
    weight = getattr(config.build(heads=8, dim=32, causal=True), name)
    assert 0.98 / 4 < weight.abs().max() <= 1 / 4
    assert weight.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.05)


def test_decays_of_ssd_begin_between_1_and_16():
    rates = ssd.Config().build(heads=512, dim=2, causal=True).A_log.exp()
    assert 1 <= rates.min() < 1.5
    assert 15.5 < rates.max() <= 16


@pytest.mark.parametrize(
    ("table", "std"), [(TokenEmbedding(256, 64, start=False).table, 0.5), (Learned(256, 64).table, 0.02)]
)
def test_tables_begin_normal(table, std):
    assert table.weight.std().item() == pytest.approx(std, rel=0.1)
    assert table.weight.mean().abs() < 0.05 * std
    assert torch.isfinite(table.weight).all()

"""Models that use the installed FLA, on the kernels of lintra, without `install`."""

import pytest
import torch
from torch.testing import assert_close

import lintra
from lintra.compat.fla import installed
from tests.compat.fla import real


@pytest.fixture
def model():
    models = real.fla("fla.models")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 8, "vocab_size": 50}
    config = models.GatedDeltaNetConfig(**small, fuse_cross_entropy=False)
    return models.GatedDeltaNetForCausalLM(config).eval()


@torch.no_grad()
def test_a_model_of_fla_runs_whole_and_token_by_token(model):
    tokens = torch.randint(0, 50, (2, 7))
    with lintra.accelerate(model) as found:
        whole = model(tokens).logits
        parts, cache = [], None
        for part in (tokens[:, :4], *tokens[:, 4:].split(1, 1)):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    assert {x.kernel.removeprefix("lintra.compat.") for x in found.replaced} >= {
        "fla.modules.causal_conv1d.ops.causal_conv1d_update",  # and not that of the package causal_conv1d
        "fla.modules.norm.layernorm.rms_norm",
        "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule",
    }
    assert_close(torch.cat(parts, 1), whole)
    installed.wrap()
    try:
        assert_close(model(tokens).logits, whole)
    finally:
        installed.unwrap()


@torch.no_grad()
def test_undo_leaves_what_install_has_wrapped(model):
    tokens = torch.randint(0, 50, (2, 7))
    installed.wrap()
    try:
        expected = model(tokens).logits
        lintra.accelerate(model)
        lintra.accelerate(model, undo=True)
        assert_close(model(tokens).logits, expected)
    finally:
        installed.unwrap()


def test_a_module_of_the_name_of_a_kernel_is_none():
    norm = real.fla("fla.modules").L2Norm()
    x = torch.randn(3, 5)
    with lintra.accelerate(norm):
        assert_close(norm(x), torch.nn.functional.normalize(x, dim=-1))

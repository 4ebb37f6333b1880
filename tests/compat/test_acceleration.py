"""Existing models, switched to the kernels of lintra and back."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import nn
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

import lintra
from benchmarks.families import FAMILIES, GRADIENTS, Outcome, check, fallbacks
from lintra import native
from lintra.compat import kernels

ROOT = Path(__file__).parents[2]
QUICK = ("qwen3_5", "kimi_linear", "mamba2", "mamba")  # a family for each recurrence
pytestmark = pytest.mark.filterwarnings("ignore:Triton is not supported")


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES]
)
def test_a_family_gives_the_same_on_our_kernels(name):
    """Logits of a padded batch, a prefill and single tokens after it, gradients, generated tokens."""
    outcome = check(name)
    assert outcome.passed, outcome
    assert outcome.kernels


@pytest.mark.parametrize("part", ["logits", "cached", "gradients"])
def test_a_family_that_gives_nan_does_not_pass(part):
    errors = {"logits": 0.0, "cached": 0.0, "gradients": 0.0}
    assert Outcome(kernels=["one"], same_tokens=True, **errors).passed
    assert not Outcome(kernels=["one"], same_tokens=True, **errors | {part: float("nan")}).passed


def weight_gradients(model: nn.Module, tokens: torch.Tensor, *pieces: int) -> torch.Tensor:
    """Return the gradients of all weights for a loss of the logits of pieces with a cache; without pieces,
    for the whole sequence."""
    model.zero_grad()
    takes = inspect.signature(model.forward).parameters
    (name,) = {"cache_params", "past_key_values", "cache"} & takes.keys()
    cache, logits = None, []
    places = torch.arange(tokens.shape[1])[None]
    for piece, place in zip(*(x.split(pieces or x.shape[1], 1) for x in (tokens, places)), strict=True):
        given = {name: cache} | ({"position_ids": place} if "position_ids" in takes else {})
        output = model(piece, use_cache=bool(pieces), **given)
        cache = output.get(name)
        logits.append(output.logits)
    torch.cat(logits, 1).logsumexp(2).square().sum().backward()
    return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


@pytest.mark.parametrize(
    ("name", "pieces"),
    [(name, [1] * 6) for name in ("mamba", "mamba2", "bamba", "lfm2", "kimi_linear", "qwen3_5")]
    + [(name, [3, 3]) for name in ("mamba2", "bamba", "kimi_linear", "qwen3_5")],
)
def test_gradients_of_pieces_behind_a_cache_are_those_of_the_whole(name, pieces):
    model = FAMILIES[name].build().eval()
    tokens = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(0))
    with lintra.accelerate(model):
        expected = weight_gradients(model, tokens)
        found = weight_gradients(model, tokens, *pieces)
    assert (found - expected).norm() < GRADIENTS * expected.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_still_asks_for_its_kernels_by_the_names_we_know(name):
    """This fails if a newer transformers looks up its kernels in another way, or under other names."""
    model = FAMILIES[name].build()
    module = sys.modules[type(model).__module__]
    asked = {use.kernel for use in kernels.asked_for(module)}
    needed = {
        "gated delta rule": {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"},
        "KDA": {"chunk_kda", "fused_recurrent_kda"},
        "SSD": {"mamba_chunk_scan_combined", "selective_state_update"},
        "selective scan": {"selective_scan_fn", "selective_state_update"},
        "short convolution": set(),
    }[FAMILIES[name].recurrence]
    assert asked >= {*needed, "causal_conv1d_fn", "causal_conv1d_update"}


def functions(model: nn.Module) -> dict[str, object]:
    return {x: y for x, y in vars(sys.modules[type(model).__module__]).items() if callable(y)}


def test_undo_restores_every_function():
    model = FAMILIES["qwen3_5"].build()
    before = functions(model)
    accelerated = lintra.accelerate(model)
    assert len(accelerated.replaced) == 4
    assert "torch_chunk_gated_delta_rule -> lintra.compat.fla.ops" in repr(accelerated)
    assert functions(model) != before
    assert not lintra.accelerate(model).replaced  # a second call finds nothing left to replace
    undone = lintra.accelerate(model, undo=True)
    assert {x.name for x in undone.replaced} == {x.name for x in accelerated.replaced}
    assert repr(undone).startswith("lintra.accelerate restored:")
    assert functions(model) == before
    accelerated.undo()
    assert functions(model) == before


class Derived(MambaMixer):
    """A mixer of transformers under a name of one's own."""


def test_a_mixer_derived_from_one_of_transformers_is_accelerated():
    mixer = Derived(MambaConfig(hidden_size=32), 0)
    with lintra.accelerate(mixer) as found:
        assert {x.module for x in found.replaced} == {MambaMixer.__module__}


def layer_of(function: FunctionType) -> nn.Module:
    """A function as transformers has it where the package kernels is installed."""
    func = function

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    return Func()


def test_functions_in_layers_are_replaced(monkeypatch):
    model = FAMILIES["mamba2"].build().eval()
    module, tokens = sys.modules[type(model).__module__], torch.randint(64, (2, 7))
    with torch.no_grad(), fallbacks(model):
        expected = model(tokens).logits
    for use in list(kernels.asked_for(module)):
        monkeypatch.setattr(module, use.name, layer_of(use.theirs))
    before = functions(model)
    assert set(kernels.slow(module)) == {"mamba_ssm", "causal_conv1d"}
    with torch.no_grad(), lintra.accelerate(model) as accelerated:
        assert len(accelerated.replaced) == 4
        torch.testing.assert_close(model(tokens).logits, expected)
    assert functions(model) == before


def test_functions_that_apply_a_gradient_of_fla_are_replaced():
    mlp = pytest.importorskip("fla.modules.mlp", reason="no FLA")
    layer, x = mlp.GatedMLP(hidden_size=16, fuse_swiglu=False), torch.randn(2, 5, 16)
    with lintra.accelerate(layer) as accelerated:
        assert "swiglu" in {each.name for each in accelerated.replaced}
        gate, y = layer.gate_proj(x), layer.up_proj(x)
        torch.testing.assert_close(layer(x), layer.down_proj(nn.functional.silu(gate) * y))


def test_undo_done_twice_leaves_what_a_later_call_replaced():
    model = FAMILIES["mamba2"].build()
    first = lintra.accelerate(model)
    first.undo()
    with lintra.accelerate(model):
        accelerated = functions(model)
        first.undo()
        assert functions(model) == accelerated


def test_the_context_ends_also_with_an_error():
    model = FAMILIES["mamba2"].build()
    before = functions(model)
    with pytest.raises(IndexError), lintra.accelerate(model):
        model(torch.tensor([[64]]))  # the vocabulary has 64 tokens
    assert functions(model) == before


def test_a_model_without_such_kernels_is_left_as_it_is_in_words():
    with pytest.warns(UserWarning, match="changed nothing: Linear uses none of the kernels"):
        assert not lintra.accelerate(nn.Linear(2, 2)).replaced


def test_tensors_elsewhere_go_where_they_went():
    calls = []
    elsewhere = torch.empty(2, device="meta")

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> str:
        calls.append(x.device.type)
        return "theirs"

    both = kernels.on_cpu(lambda x, weight: "ours", theirs, drop=True)
    here = torch.empty(2)
    assert both(here, here) == both(here, weight=here, chunk_size=64) == "ours"
    assert both(elsewhere, here) == both(here, weight=elsewhere) == "theirs"
    assert calls == ["meta", "cpu"]
    with pytest.raises(TypeError, match="chunk_size"):
        kernels.on_cpu(lambda x: "ours", theirs, drop=False)(here, chunk_size=64)


PACKED = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "olmo_hybrid",
    "bamba",
    "falcon_h1",
    "zamba2",
    "nemotron_h",
    "lfm2",
    "lfm2_moe",
)


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "sdpa") for name in PACKED]
    + [(name, "lintra") for name in (*PACKED, "granitemoehybrid") if name != "qwen4_exp"],
)
def test_packed_sequences_do_not_see_each_other(name, attention):
    """Packed as by transformers' collator; without the package the call raises ValueError.

    These families pass the bounds of sequences to kernels and, where no cache is made, to masks; not all
    others do. The attention of lintra finds them from the positions, with a cache and for GraniteMoeHybrid,
    whose mask does not get them, too. Qwen4Exp has an attention of its own."""
    model = FAMILIES[name].build()
    if attention == "lintra":
        pytest.importorskip("lintra.hf")
        model.set_attn_implementation("lintra")
    parts = [torch.randint(64, (1, n)) for n in (5, 1, 19)]
    ends = torch.tensor([0, 5, 6, 25], dtype=torch.int32)
    packed = {
        "input_ids": torch.cat(parts, 1),
        "position_ids": torch.cat([torch.arange(x.shape[1]) for x in parts])[None],
        "seq_idx": torch.cat([torch.full((x.shape[1],), i) for i, x in enumerate(parts)])[None].int(),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 19,
        "max_length_k": 19,
    }
    with torch.no_grad(), fallbacks(model):
        alone = torch.cat([model(x, use_cache=False).logits for x in parts], 1)
    with torch.no_grad(), lintra.accelerate(model):
        together = model(**packed, use_cache=attention == "lintra").logits
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not native.available(), reason="no C++")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_a_step_writes_the_state_into_the_cache(name, dtype, monkeypatch):
    torch.manual_seed(0)
    model = FAMILIES[name].build().to(dtype)
    tokens = torch.randint(64, (2, 9))
    with torch.no_grad(), lintra.accelerate(model):
        expected = model(tokens).logits[:, -1]
        cache = model(tokens[:, :-1], use_cache=True).past_key_values
        states = [y for x in cache.layers for y in getattr(x, "recurrent_states", {}).values()]
        assert states
        places, before = [x.data_ptr() for x in states], [x.clone() for x in states]
        copied = []
        copy = torch.Tensor.copy_
        monkeypatch.setattr(torch.Tensor, "copy_", lambda x, y: (copied.append((x, y)), copy(x, y))[1])
        logits = model(tokens[:, -1:], past_key_values=cache, use_cache=True).logits[:, 0]
    for x, place, old in zip(states, places, before, strict=True):
        assert x.data_ptr() == place
        assert not torch.equal(x, old)
        assert any(into is x and given is x for into, given in copied)  # PyTorch then does nothing
    assert torch.allclose(logits, expected, rtol=1e-4 if dtype == torch.float32 else 0.05, atol=1e-2)


@pytest.mark.parametrize("asked", [False, True])
def test_a_state_stays_where_the_one_after_it_is_not_asked_for(asked):
    model = FAMILIES["qwen3_5"].build()
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    options = {"g": -torch.rand(1, 1, 2), "beta": torch.rand(1, 1, 2), "output_final_state": asked}
    state = torch.randn(1, 2, 8, 8)
    before = state.clone()
    with torch.no_grad(), lintra.accelerate(model):
        step = vars(sys.modules[type(model).__module__])["torch_recurrent_gated_delta_rule"]
        _, after = step(q, k, v, initial_state=state, **options)
    assert torch.equal(state, after if asked and native.available() else before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", QUICK)
def test_half_precision(name, dtype):
    """As near to float32 as transformers' own functions with the same weights, within a factor."""
    torch.manual_seed(0)
    model = FAMILIES[name].build()
    tokens = torch.randint(64, (2, 24))
    with torch.no_grad(), fallbacks(model):
        exact = model(tokens).logits
        model.to(dtype)
        theirs = model(tokens).logits
    with torch.no_grad(), lintra.accelerate(model):
        found = model(tokens).logits
    assert found.dtype == theirs.dtype
    assert (found - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean()


@pytest.mark.slow
def test_the_example_prints_its_ratios(tmp_path):
    program = [sys.executable, str(ROOT / "examples" / "faster_qwen.py"), "--quick"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" x\n") == 2
    assert "torch_chunk_gated_delta_rule -> lintra" in done.stdout


def test_functions_without_a_module_are_passed_over():
    found = {}
    exec("def odd(x): return x", found)
    module = sys.modules[__name__]
    module.odd = found["odd"]
    try:
        module.odd.__module__ = None
        with lintra.accelerate(Derived(MambaConfig(hidden_size=32), 0)) as accelerated:
            assert accelerated.replaced
    finally:
        del module.odd

"""What lintra 0.1 wrote still loads (tests/data/v0.1), and names that its programs use still work."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import lintra
import lintra.testing.module
from lintra import checkpoint, legacy, ops, train
from lintra.attention import linear
from lintra.generation import native_decode, sampling
from lintra.models import decoder, encoder, seq2seq
from lintra.nn import MLP, AttentionLayer, Block
from lintra.ops import LinearState, linear_attention

FILES = Path(__file__).parent / "data" / "v0.1"
MODELS = sorted(x.parent.name for x in FILES.glob("*/says.safetensors"))
RUNS = sorted(x.parent.name for x in FILES.glob("*/run.json"))


def test_there_is_a_file_of_every_family_and_mechanism():
    kinds = set(lintra.config.registry.names(lintra.models))
    assert {name.partition("-")[0] for name in MODELS} == kinds - {"forecaster"}  # forecasters are newer
    written = {name.partition("-")[2] for name in MODELS}
    assert written >= {name for name in lintra.attention.names() if name in OLD}
    assert len(RUNS) == 2


OLD = (
    *("aft", "bigbird", "clustered", "cosformer", "delta", "gated", "linear", "linformer", "longformer"),
    *("longshort", "lsh", "nystromformer", "performer", "retention", "rfa", "softmax"),
)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_what_it_said(name, tmp_path):
    model, said = checkpoint.load(FILES / name), load_file(FILES / name / "says.safetensors")
    expected = said.pop("y")

    def says(model):
        with torch.no_grad():
            if "source" in said:
                return model(said["tokens"], model.encode_memory(said["source"]))
            y = model(*said.values())
            return y if isinstance(y, torch.Tensor) else y[0]

    # float32 sums of tens of terms, perhaps on another processor; Nystromformer also has an inverse.
    assert_close(says(model), expected, rtol=2e-3, atol=2e-4)
    checkpoint.save(model, tmp_path / "model")
    assert_close(says(checkpoint.load(tmp_path / "model")), says(model), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_where_it_was(name, tmp_path, one_thread):
    shutil.copytree(FILES / name, tmp_path / "run")
    expected = load_file(tmp_path / "run" / "after.safetensors")
    (tmp_path / "run" / "after.safetensors").unlink()
    train.fit(train.Run.read(tmp_path / "run"))
    after = load_file(tmp_path / "run" / "step-00000008" / "model.safetensors")
    assert after.keys() == legacy.upgrade_tensors(expected).keys()
    for old, x in expected.items():
        (new,) = legacy.upgrade_tensors({old: x})
        # Four steps of float32, perhaps on another processor.
        assert_close(after[new], x, rtol=1e-3, atol=1e-5)


def test_weights_of_parts_keep_loading():
    """A custom network with parts of lintra in it saved its state_dict under the old names."""
    layer = AttentionLayer(8, linear.Config(), heads=2)
    block = Block(AttentionLayer(8, linear.Config(), heads=2), MLP(8), width=8)
    old = {"qkv_proj": "inward", "out_proj": "outward"}
    around = {"attn": "mix", "mlp": "feed", "attn_norm": "norm_mix", "mlp_norm": "norm_feed"}
    for module, names in ((layer, old), (block, old | around)):
        network = torch.nn.ModuleDict({"mix": module, "feed": torch.nn.Linear(2, 2)})
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter)
        new = {name: x.clone() for name, x in network.state_dict().items()}
        written = {}
        for name, x in new.items():
            first, *rest = name.split(".")
            written[".".join([first, *(names.get(part, part) for part in rest)])] = x.clone()
        assert written.keys() != new.keys()
        for parameter in network.parameters():
            torch.nn.init.zeros_(parameter)
        network.load_state_dict(written)
        assert_close(dict(network.state_dict()), new, rtol=0, atol=0)


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: lintra.nn.Heads, "lintra.nn.Heads is now .*AttentionLayer"),
        (lambda: lintra.nn.Feed, "lintra.nn.Feed is now .*MLP"),
        (lambda: decoder.Config(vocabulary=7, feed=2.0), "feed= is now mlp_ratio="),
        (lambda: decoder.Config(vocabulary=7, feed_kind="relu"), "feed_kind= is now activation="),
        (lambda: decoder.Config(vocabulary=7).feed, r"\.feed is now \.mlp_ratio"),
        (lambda: MLP(8, multiple=2.0), "multiple= is now ratio="),
        (lambda: AttentionLayer(8, linear.Config(), heads=2).inward, r"\.inward is now \.qkv_proj"),
        (lambda: AttentionLayer(8, linear.Config(), heads=2, rotary=9.0), "rotary= is now rope_base="),
        (lambda: AttentionLayer(8, linear.Config(), heads=2).rotary, r"\.rotary is now \.rope_base"),
        (lambda: train.Config(schedule="trapezoid"), "'trapezoid' is now schedule='wsd'"),
        (lambda: lintra.generate.generate, r"lintra\.generate\.generate is now lintra\.generation\.generate"),
        (lambda: lintra.generate.begin, r"generate\.begin is now lintra\.generation\.prepare_inputs"),
        (lambda: lintra.generate.Options, r"generate\.Options is now lintra\.generation\.GenerationOptions"),
        (lambda: lintra.beam.beam_search, r"is now lintra\.generation\.beam\.beam_search"),
        (lambda: lintra.transcribe.Search, r"is now lintra\.speech\.transcription\.Search"),
        (lambda: sampling.Sampler, r"sampling\.Sampler is now lintra\.generation\.options\.Sampler"),
        (lambda: native_decode.Fused, r"native_decode\.Fused is now .*\.NativeDecoder"),
        (lambda: lintra.evaluate.UtteranceSet, r"evaluate\.UtteranceSet is now .*\.ScoredUtterance"),
        (lambda: lintra.evaluate.ScoredUtterance("a", "b", "c").said, r"\.said is now \.reference"),
        (lambda: encoder.Config(vocabulary=7, layers=1).build().read, r"\.read is now \.encode"),
        (lambda: lintra.testing.module.check_module, r"is now lintra\.testing\.function_laws\.check_module"),
    ],
)
def test_an_old_name_warns_with_the_new_one(use, message):
    with pytest.raises(DeprecationWarning, match=message):
        use()


def test_the_line_that_uses_an_old_name_is_blamed():
    for use in (
        lambda: decoder.Config(vocabulary=7, feed=2.0),
        lambda: train.Config(steps=1, schedule="trapezoid"),
        lambda: AttentionLayer(8, linear.Config(), heads=2).inward,
    ):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            use()
        assert [x.filename for x in found] == [__file__]


def test_an_old_name_means_what_it_meant():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert lintra.nn.Heads is AttentionLayer
        assert decoder.Config(vocabulary=7, feed=2.0, feed_kind="relu") == decoder.Config(
            vocabulary=7, mlp_ratio=2.0, activation="relu"
        )
        assert decoder.Config(vocabulary=7, mlp_ratio=3.0).feed == 3.0
        layer = AttentionLayer(8, linear.Config(), heads=2)
        assert layer.outward is layer.out_proj
        assert layer.remember == layer.encode_memory
        assert train.Config(schedule="trapezoid") == train.Config(schedule="wsd")
        with pytest.raises(TypeError, match="mlp_ratio is given twice"):
            decoder.Config(vocabulary=7, feed=2.0, mlp_ratio=2.0)
        assert issubclass(seq2seq.Config, decoder.Config)


def test_ops_that_are_arguments_now():
    q = k = v = torch.randn(1, 5, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    beta, state = torch.full((1, 5, 2), 0.3).double(), torch.ones(1, 2, 4, 4).double()
    before = LinearState(state, state.new_empty(1, 2, 0))
    options = {"normalize": False, "state": before}
    with pytest.warns(DeprecationWarning, match="linear_attention.*beta=beta"):
        found = ops.delta_rule(q, k, v, beta, log_decay=-beta, state=state)
    y, after = linear_attention(q, k, v, beta=beta, log_decay=-beta, **options)
    assert_close(found, (y, after.kv))
    with pytest.warns(DeprecationWarning, match="gated_attention"):
        found = ops.gated_attention(q, k, v, -k.abs(), state=state)
    y, after = linear_attention(q, k, v, log_decay=-k.abs(), **options)
    assert_close(found, (y, after.kv))

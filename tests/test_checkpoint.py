"""Models on disk: they load as they were saved, errors name damage, and no existing model is ever lost."""

import json
import pickle
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from lintra import checkpoint, generation, native
from lintra.attention import clustered, leaves, linear, lsh, softmax
from lintra.generation import native_decode
from lintra.io import files
from lintra.models import Decoder, bilstm, decoder, encoder, seq2seq
from lintra.nn import LogisticMixture


def build(**changes):
    torch.manual_seed(0)
    options = {"vocabulary": 11, "layers": 2, "heads": 4, "width": 32} | changes
    return decoder.Config(**options).build()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": linear.Config(feature_map=linear.Dpfp(nu=2), eps=1e-3)},
        {"attention": linear.Config(feature_map=linear.T2R(width=8))},
        {"attention": softmax.Config(window=4)},
        {"tie_embeddings": True},
        {"head_dim": 6},
        {"attention": (softmax.Config(window=4), linear.Config(feature_map=linear.Dpfp(nu=2)))},
        {"output": LogisticMixture(components=3), "position": "learned", "max_length": 20, "kv_heads": 2},
    ],
    ids=str,
)
def test_what_is_saved_comes_back(tmp_path, changes):
    model = build(**changes)
    checkpoint.save(model, tmp_path / "model")
    again = checkpoint.load(tmp_path / "model")
    assert again.config == model.config
    assert not again.training
    tokens = torch.randint(0, 11, (2, 9))
    # The tensors are the same, but not their addresses, and a matrix product may depend on alignment.
    assert_close(again(tokens), model.eval()(tokens), rtol=1e-6, atol=1e-6)
    for name, x in model.state_dict().items():
        assert torch.equal(x, again.state_dict()[name])
    again(tokens).sum().backward()
    assert {x.name for x in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}
    assert [x.name for x in tmp_path.iterdir()] == ["model"]


def test_a_model_saved_before_hashes_were_redrawn(tmp_path):
    """Its configuration lacks the field: it keeps its hashes, and gives the same outputs in evaluation."""
    kind = lsh.Config(chunk=4)
    model = build(attention=kind)
    checkpoint.save(model, tmp_path / "model")
    damage_config(tmp_path / "model", lambda content: content["config"]["attention"].pop("redraw_every"))
    again, tokens = checkpoint.load(tmp_path / "model"), torch.randint(0, 11, (2, 9))
    assert again.config == replace(model.config, attention=replace(kind, redraw_every=None))
    assert_close(again(tokens), model.eval()(tokens), rtol=1e-6, atol=1e-6)


def test_clustered_attention_saved_before_hashes_were_redrawn_keeps_its_own():
    content = checkpoint.to_json(clustered.Config())
    del content["redraw_every"]
    assert checkpoint.from_json(clustered.Config, content, "here") == clustered.Config(redraw_every=None)


READS = {"layers": 1, "heads": 2, "width": 16}


@pytest.mark.parametrize(
    ("config", "draw"),
    [
        (
            encoder.Config(vocabulary=11, outputs=3, pool="last", causal=True, **READS),
            lambda: [torch.randint(0, 11, (2, 9))],
        ),
        (encoder.Config(inputs=5, checkpoint_blocks=True, **READS), lambda: [torch.randn(2, 9, 5)]),
        (bilstm.Config(inputs=5, outputs=3, width=8), lambda: [torch.randn(2, 9, 5)]),
        (
            seq2seq.Config(
                vocabulary=11,
                encoder=encoder.Config(vocabulary=7, attention=softmax.Config(), **READS),
                cross=softmax.Config(scale=0.5),
                **READS,
            ),
            lambda: [torch.randint(0, 11, (2, 9)), torch.randint(0, 7, (2, 5))],
        ),
    ],
    ids=lambda x: getattr(x, "__module__", ""),
)
def test_every_kind_of_model_comes_back(tmp_path, config, draw):
    model, inputs = config.build().eval(), draw()
    checkpoint.save(model, tmp_path / "model")
    again = checkpoint.load(tmp_path / "model")
    assert type(again) is type(model)
    assert again.config == config
    kind = json.loads((tmp_path / "model" / "config.json").read_text())["model"]
    assert kind == type(model).__module__.rpartition(".")[2]
    found = []
    for each in (model, again):
        with torch.no_grad():
            x, *source = inputs
            found.append(each(x, *(each.encode_memory(s) for s in source)))
    assert_close(*found, rtol=1e-6, atol=1e-6)  # as above


def test_a_model_saved_before_there_were_further_options(tmp_path):
    """A decoder's configuration of the first version, to the letter."""
    checkpoint.save(build(), tmp_path / "model")
    attention = {"feature_map": {"name": "EluPlusOne"}, "normalize": True, "eps": 1e-06, "chunk": 64}
    shape = {"layers": 2, "heads": 4, "kv_heads": None, "width": 32, "feed": 4.0, "feed_kind": "gelu"}
    around = {"norm": "pre", "norm_kind": "layer", "position": "sinusoidal", "max_length": None}
    ends = {"embed": "token", "output": {"name": "Logits"}, "start": True, "dropout": 0.0}
    mechanism = {"attention": {"name": "linear", **attention, "impl": "auto"}}
    config = {"name": "decoder", "vocabulary": 11} | mechanism | shape | around | ends
    content = {"format": 1, "model": "decoder", "config": config}
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    assert checkpoint.load(tmp_path / "model").config == build().config


def test_a_state_resumes_elsewhere(tmp_path):
    for attention in (linear.Config(), softmax.Config()):
        model = build(attention=attention).eval()
        tokens = torch.randint(0, 11, (2, 9))
        _, state = model.extend(tokens[:, :8])
        checkpoint.save_state(state, tmp_path / "state.safetensors")
        again = checkpoint.load_state(model.start(2), tmp_path / "state.safetensors")
        assert type(again) is type(state)
        assert_close(model.extend(tokens[:, 8:], again)[0], model.extend(tokens[:, 8:], state)[0])
        with pytest.raises(checkpoint.Error, match=r"a tensor .* where this model's state has"):
            checkpoint.load_state(model.start(3), tmp_path / "state.safetensors")
        with pytest.raises(checkpoint.Error, match="tensors, a state of this model"):
            checkpoint.load_state(build(layers=1).start(2), tmp_path / "state.safetensors")
        with pytest.raises(checkpoint.Error, match=r"of torch\.float32 where .* of torch\.float64"):
            checkpoint.load_state(model.double().start(2), tmp_path / "state.safetensors")


def test_a_state_in_16_bits_resumes(tmp_path):
    """The cache of softmax under autocast, and sums that are kept in bfloat16."""
    tokens = torch.randint(0, 11, (2, 9))
    for attention in (linear.Config(), softmax.Config()):
        model = build(attention=attention).eval()
        with torch.autocast("cpu", torch.bfloat16):
            _, state = model.extend(tokens[:, :8])
            if isinstance(attention, linear.Config):
                state = generation.cast_state(model, state, torch.bfloat16)
            checkpoint.save_state(state, tmp_path / "state")
            again = checkpoint.load_state(model.start(2), tmp_path / "state")
            assert torch.bfloat16 in {x.dtype for x in leaves(again)}
            assert_close(model.extend(tokens[:, 8:], again)[0], model.extend(tokens[:, 8:], state)[0])


def test_a_state_whose_tensors_share_memory(tmp_path):
    """Layers that read the same source with the same mask; the sums of a fused step."""
    encoded = encoder.Config(inputs=3, layers=1, heads=2, width=16)
    reader = seq2seq.Config(vocabulary=11, encoder=encoded, cross=softmax.Config(), **(READS | {"layers": 2}))
    source, mask = torch.randn(2, 4, 3), torch.ones(2, 4, dtype=torch.bool)
    model = reader.build().eval()
    states = [model.start(model.encode_memory(source, mask))]
    if native.available():
        alone, token = build().eval(), torch.zeros(2, 1, dtype=torch.int64)
        step = native_decode.NativeDecoder(alone, alone.start(2))
        states.append(step(token, alone.start(2))[1])
    for state in states:
        checkpoint.save_state(state, tmp_path / "state")
        again = checkpoint.load_state(state, tmp_path / "state")
        assert all(map(torch.equal, leaves(again), leaves(state)))


def damage_config(folder, change):
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))


def damage_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors does not exist"),
        (lambda f: (f / "config.json").unlink(), "holds no model"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
        (lambda f: (f / "config.json").write_text("[]"), "is not a lintra model"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is damaged: .*recursion"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json is damaged"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
            "damaged or not a safetensors",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(pickle.dumps({"head.weight": 1})),
            "damaged or not a safetensors",
        ),
        (lambda f: damage_config(f, lambda c: c.pop("format")), "has no format version"),
        (
            lambda f: damage_config(f, lambda c: c.update(format=9)),
            "format 9, this lintra reads formats 1 and 2",
        ),
        (
            lambda f: damage_config(f, lambda c: c.update(model="gpt")),
            "model must be one of bilstm, ctc, decoder, encoder, forecaster, seq2seq; got 'gpt'",
        ),
        (
            lambda f: damage_config(f, lambda c: c["config"].update(colour=1)),
            "config has the unknown field 'colour'",
        ),
        (
            lambda f: damage_config(f, lambda c: c["config"].update(layers="two")),
            "config.layers must be int, got 'two'",
        ),
        (
            lambda f: damage_config(f, lambda c: c["config"].update(layers=0)),
            "layers must be at least 1, got 0",
        ),
        *(
            (
                lambda f, x=x: damage_config(f, lambda c: c["config"].update(x)),
                r"config.json: the model cannot be built: [^\n]*$",
            )
            for x in ({"mlp_ratio": 1e300}, {"width": 2**62}, {"width": 2**70}, {"vocabulary": 2**62})
        ),
        (
            lambda f: damage_config(f, lambda c: c["config"].pop("vocabulary")),
            "config lacks the field 'vocabulary'$",
        ),
        (
            lambda f: damage_config(f, lambda c: c["config"]["attention"].update(name="magic")),
            r"attention must be one of .*linear, .*; got 'magic'",
        ),
        (
            lambda f: damage_config(f, lambda c: c["config"]["attention"]["feature_map"].update(name="Exp")),
            "config.attention.feature_map must be one of .* got 'Exp'",
        ),
        (
            lambda f: damage_config(f, lambda c: c["config"].update(attention=[{"name": "magic"}])),
            "attention must be one of .*; got 'magic'",
        ),
        (
            lambda f: damage_config(f, lambda c: c["config"].update(attention=[{"name": "gated", "x": 1}])),
            r"config\.attention\[0\] has the unknown field 'x'",
        ),
        (
            lambda f: damage_config(f, lambda c: c["config"].update(attention=[])),
            "attention must be at least one mechanism's configuration",
        ),
        (
            lambda f: damage_config(f, lambda c: c["config"].update(layers=10**9)),
            r"model\.safetensors has \d+ tensors, too few for 1,000,000,000 layers",
        ),
        (lambda f: damage_weights(f, lambda t: t.pop("head.bias")), "lacks tensor 'head.bias'"),
        (
            lambda f: damage_weights(f, lambda t: t.update(extra=torch.zeros(1))),
            "has the unknown tensor 'extra'",
        ),
        (
            lambda f: damage_weights(f, lambda t: t.update({"head.bias": torch.zeros(3)})),
            r"head.bias must be torch.float32 \[11\], got torch.float32 \[3\]",
        ),
        (
            lambda f: damage_weights(f, lambda t: t.update({"head.bias": torch.zeros(11).bfloat16()})),
            r"model.safetensors must hold weights of one type, got .* of torch.float32 and head.bias of "
            r"torch.bfloat16: convert them to one, such as float32",
        ),
        (
            lambda f: damage_weights(
                f, lambda t: t.update({n: x.to(torch.float8_e5m2) for n, x in t.items()})
            ),
            r"is torch.float8_e5m2, in which no model computes: convert it to float32",
        ),
        *(
            (
                lambda f, x=x: damage_config(f, lambda c: c.update(model=x)),
                "model must be one of bilstm, ctc, ",
            )
            for x in (["decoder"] * 1000, {"name": "decoder"}, "x" * 10_000, None)
        ),
        (
            lambda f: damage_config(f, lambda c: c.update(model="encoder")),
            "config must be one of encoder, got",
        ),
        *(
            (lambda f, x=x: damage_config(f, lambda c: c.update(x)), "config.json")
            for x in ({"format": [1] * 1000}, {"config": [1] * 1000}, {"dtype": "x" * 1000})
        ),
        *(
            (lambda f, x=x: damage_config(f, lambda c: c["config"].update(x)), "config.json: config")
            for x in (
                {"layers": [1] * 1000},
                {"x" * 1000: 1},
                {"attention": [1] * 1000},
                {"output": "x" * 1000},
            )
        ),
        (
            lambda f: damage_weights(f, lambda t: t.update({"head.bias": torch.zeros(11).long()})),
            r"head.bias must be torch.float32 \[11\], got torch.int64 \[11\]",
        ),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    checkpoint.save(build(), tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(checkpoint.Error, match=message) as found:
        checkpoint.load(tmp_path / "model")
    sentence = str(found.value).replace(str(tmp_path), "")
    assert "\n" not in sentence
    assert len(sentence) < 450


class Wrapped(torch.nn.Module):
    """A model inside another module that exposes its attributes."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model, self.config = model, model.config


class Mine(linear.LinearAttention):
    """A custom mechanism, in no folder of lintra."""


@dataclass(frozen=True, kw_only=True)
class MineConfig(linear.Config):
    def build(self, **shape):
        return Mine(self, **shape)


class Squared(linear.SquaredRelu):
    """A custom feature map."""


class MyDecoder(Decoder):
    """A custom network with a configuration of lintra."""


def test_numbers_of_numpy_are_numbers(tmp_path):
    """numpy.float64 is a float and is accepted as one, as when settings come from a NumPy grid."""
    model = build(attention=linear.Config(eps=np.float64(1e-3)), dropout=np.float64(0.1))
    checkpoint.save(model, tmp_path / "model")
    again = checkpoint.load(tmp_path / "model").config
    assert again == model.config
    assert type(again.dropout) is type(again.attention.eps) is float


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path):
    """A custom mechanism, feature map or network: no other program knows these names."""
    sentence = r"is a MineConfig of tests\.test_checkpoint, which no saved model can be made of again: call a"
    with pytest.raises(TypeError, match=rf"model\.config\.attention {sentence}"):
        checkpoint.save(build(attention=MineConfig()), tmp_path / "model")
    with pytest.raises(TypeError, match=r"model\.config\.attention\.feature_map is a Squared of tests\.test"):
        checkpoint.save(build(attention=linear.Config(feature_map=Squared())), tmp_path / "model")
    with pytest.raises(TypeError, match=rf"model\.config\.attention\[1\] {sentence}"):
        checkpoint.save(build(attention=(linear.Config(), MineConfig())), tmp_path / "model")
    nested = encoder.Config(vocabulary=3, attention=MineConfig(), layers=1, heads=2, width=16)
    both = seq2seq.Config(vocabulary=11, encoder=nested, cross=softmax.Config(), layers=1, heads=2, width=16)
    with pytest.raises(TypeError, match=rf"model\.config\.encoder\.attention {sentence}"):
        checkpoint.save(both.build(), tmp_path / "model")
    with pytest.raises(TypeError, match=r"model must be a network of lintra\.models, got MyDecoder"):
        checkpoint.save(MyDecoder(build().config), tmp_path / "model")
    mixed = build()
    mixed.head.double()
    with pytest.raises(TypeError, match=r"model must have weights of one type, got .* of torch\.float64"):
        checkpoint.save(mixed, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        checkpoint.save(build().to(dtype), tmp_path / "model")
        assert checkpoint.load(tmp_path / "model").head.weight.dtype == dtype


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (torch.nn.Linear(2, 2), "Linear"),
        ({"weight": torch.zeros(2)}, "dict"),
        (Wrapped(build()), "Wrapped"),  # like torch.compile: the file could not be loaded
        ("model", "str"),
    ],
)
def test_only_what_can_be_loaded_is_saved(tmp_path, model, kind):
    with pytest.raises(TypeError, match=f"model must be a network of lintra.models, got {kind}"):
        checkpoint.save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_device_that_is_not_there(tmp_path, monkeypatch):
    """The error does not blame the file."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checkpoint.save(build(), tmp_path / "model")
    with pytest.raises(
        ValueError, match="device must be one of PyTorch's, such as 'cpu' or 'cuda', got 'gpu'"
    ):
        checkpoint.load(tmp_path / "model", device="gpu")
    with pytest.raises(ValueError, match="device is 'cuda:0', but PyTorch finds no CUDA device here"):
        checkpoint.load(tmp_path / "model", device="cuda:0")
    if not torch.xpu.is_available():
        with pytest.raises(ValueError, match="device is 'xpu', which PyTorch cannot use here: "):
            checkpoint.load(tmp_path / "model", device="xpu")


def test_no_folder(tmp_path):
    with pytest.raises(checkpoint.Error, match="does not exist or is not a folder"):
        checkpoint.load(tmp_path / "nowhere")


def test_a_folder_is_not_replaced_by_a_file(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("kept")
    model = build()
    with pytest.raises(checkpoint.Error, match=r"mine cannot be written: .*it is a folder"):
        checkpoint.save_state(model.start(1), tmp_path / "mine")
    assert (tmp_path / "mine" / "notes").read_text() == "kept"
    with pytest.raises(ValueError, match="out must be a file, got the folder"):
        files.refuse_folder("out", tmp_path / "mine")


def test_a_part_of_a_model_is_not_written_over(tmp_path):
    """A file of such a name elsewhere is not refused, nor is another file in the same folder."""
    checkpoint.save(build(), tmp_path / "run")
    others = ("run.json", "shards.json", "tokenizer.json", "training.json")
    for name in ("config.json", "model.safetensors", *others):
        with pytest.raises(
            ValueError, match=r"json must be a file of its own, got .* a part of a run, model"
        ):
            files.refuse_folder("json", tmp_path / "run" / name)
        files.refuse_folder("json", tmp_path / name)
    files.refuse_folder("json", tmp_path / "run" / "test.json")
    (tmp_path / "run" / "model.safetensors").rename(tmp_path / "run" / "model-00001-of-00002.safetensors")
    for name in ("config.json", "model.safetensors.index.json"):  # a model in several files
        (tmp_path / "run" / "model.safetensors.index.json").touch()
        with pytest.raises(ValueError, match="a part of a run, model or prepared text"):
            files.refuse_folder("json", tmp_path / "run" / name)


def test_links_are_followed(tmp_path):
    """The model is saved at the target of the link, and the link stays."""
    (tmp_path / "there").mkdir()
    (tmp_path / "model").symlink_to("there")
    (tmp_path / "state").symlink_to("file")
    model = build()
    checkpoint.save(model, tmp_path / "model")
    checkpoint.save_state(model.start(1), tmp_path / "state")
    assert (tmp_path / "model").is_symlink()
    assert (tmp_path / "there" / "config.json").exists()
    assert (tmp_path / "state").is_symlink()
    assert (tmp_path / "file").exists()


def test_whoever_may_read_a_new_file_may_read_a_model(tmp_path):
    (tmp_path / "plain").touch()
    mode = (tmp_path / "plain").stat().st_mode
    model = build()
    checkpoint.save(model, tmp_path / "model")
    for name in ("state", "plain"):
        checkpoint.save_state(model.start(1), tmp_path / name)
    for file in (*(tmp_path / "model").iterdir(), tmp_path / "state", tmp_path / "plain"):
        assert file.stat().st_mode == mode, file


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path):
    model, place = build(), tmp_path / "state"
    place.touch(mode=0o600)
    checkpoint.save_state(model.start(1), place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600


def test_the_newest_checkpoint_of_a_run(tmp_path):
    """The highest number wins, even if it has a digit more; a folder without a number is another model."""
    for layers, step in enumerate((20, 99_999_999, 100_000_000), 1):
        checkpoint.save(build(layers=layers), tmp_path / f"step-{step:08d}")
    (tmp_path / "step-100000001").mkdir()  # incomplete: no configuration in it
    checkpoint.save(build(), tmp_path / "step-by-step")
    assert len(checkpoint.load(tmp_path).blocks) == 3


def test_a_checkpoint_that_training_drops_while_it_is_read(tmp_path, monkeypatch):
    """The next one is read instead; where there is none, the error stays."""
    checkpoint.save(build(layers=1), tmp_path / "step-00000001")
    read = checkpoint.read_whole

    def dropped(folder, *args):
        if folder.name == "step-00000001":
            checkpoint.save(build(layers=2), tmp_path / "step-00000002")
            shutil.rmtree(folder)
        return read(folder, *args)

    monkeypatch.setattr(checkpoint, "read_whole", dropped)
    model, found = checkpoint.load_from(tmp_path)
    assert (len(model.blocks), found.name) == (2, "step-00000002")
    (found / checkpoint.WEIGHTS).unlink()
    with pytest.raises(checkpoint.Error, match="step-00000002"):
        checkpoint.load(tmp_path)


def test_what_was_there_survives_a_failing_write(tmp_path, monkeypatch):
    first = build()
    checkpoint.save(first, tmp_path / "model")

    def full(tensors, file):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lintra.io.tensors.save_file", full)
    with pytest.raises(checkpoint.Error, match=r"cannot be written: .*No space left on device"):
        checkpoint.save(build(layers=1), tmp_path / "model")
    monkeypatch.undo()
    assert len(checkpoint.load(tmp_path / "model").blocks) == 2
    assert [x.name for x in tmp_path.iterdir()] == ["model"]


def test_saving_again_replaces_and_nothing_else_is_replaced(tmp_path):
    checkpoint.save(build(), tmp_path / "model")
    checkpoint.save(build(layers=1), tmp_path / "model")
    assert len(checkpoint.load(tmp_path / "model").blocks) == 1
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("x")
    with pytest.raises(checkpoint.Error, match="is not a saved model: choose another folder"):
        checkpoint.save(build(), tmp_path / "photos")
    assert (tmp_path / "photos" / "one.jpg").read_text() == "x"


@pytest.mark.parametrize("config", ['{"model_type": "bert"}', '["format", "model"]', "{", None])
def test_another_program_s_model_is_not_replaced(tmp_path, config):
    """Its files have the same names."""
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"precious")
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(checkpoint.Error, match="is not a saved model: choose another folder"):
        checkpoint.save(build(), folder)
    assert (folder / "model.safetensors").read_bytes() == b"precious"


def test_a_folder_without_anything_takes_a_model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".DS_Store").touch()  # a file manager has visited it
    checkpoint.save(build(), tmp_path / "model")
    assert len(checkpoint.load(tmp_path / "model").blocks) == 2


def test_a_failing_exchange_keeps_the_old_model(tmp_path, monkeypatch):
    """If folders cannot be exchanged and the second rename fails."""
    checkpoint.save(build(), tmp_path / "model")
    monkeypatch.setattr(files.os, "name", "other")
    rename, calls = files.Path.rename, []

    def failing(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(files.Path, "rename", failing)
    with pytest.raises(checkpoint.Error, match="cannot be written"):
        checkpoint.save(build(layers=1), tmp_path / "model")
    monkeypatch.undo()
    assert len(checkpoint.load(tmp_path / "model").blocks) == 2


def test_loading_leaves_the_random_generator_alone(tmp_path):
    checkpoint.save(build(), tmp_path / "model")
    before = torch.get_rng_state()
    checkpoint.load(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("x")
    place = tmp_path / "file" / "model"
    for write in (lambda: checkpoint.save(build(), place), lambda: files.refuse_unwritable(place)):
        with pytest.raises(checkpoint.Error, match="cannot be written"):
            write()
    files.refuse_unwritable(tmp_path / "new" / "model")
    assert not list((tmp_path / "new").iterdir())


def test_half_the_bytes_on_disk_and_float32_again(tmp_path):
    model = build()
    model.head.bias.data[0] = torch.inf  # as for a masked symbol, and not a number that is too large
    checkpoint.save(model, tmp_path / "whole")
    checkpoint.save(model, tmp_path / "half", stored=torch.float16)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")]
    assert sizes[1] < 0.6 * sizes[0]
    loaded = checkpoint.load(tmp_path / "half")
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x.half().float()), name
    damage_config(tmp_path / "half", lambda c: c.update(dtype="int8"))
    with pytest.raises(checkpoint.Error, match="dtype must be 'float32' or absent, got 'int8'"):
        checkpoint.load(tmp_path / "half")


def test_what_does_not_fit_is_not_stored(tmp_path):
    model = build()
    with torch.no_grad():
        model.head.bias[0] = 1e6
    with pytest.raises(ValueError, match=r"head.bias has numbers too large for stored=torch.float16"):
        checkpoint.save(model, tmp_path / "model", stored=torch.float16)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"stored=.* is for models in float32, .* is torch.float64"):
        checkpoint.save(build().double(), tmp_path / "model", stored=torch.float16)


def test_a_refused_type_leaves_the_model_that_is_there(tmp_path):
    """What could not be loaded again never replaces a good model."""
    model = build()
    checkpoint.save(model, tmp_path / "model")
    for stored in (torch.int8, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=f"stored must be a floating type, as weights are, got {stored}"):
            checkpoint.save(model, tmp_path / "model", stored=stored)
    loaded = checkpoint.load(tmp_path / "model").state_dict()
    assert all(torch.equal(loaded[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_that_fit(tmp_path, stored):
    model = build()
    checkpoint.save(model, tmp_path / "model", stored=stored)
    loaded = checkpoint.load(tmp_path / "model").state_dict()
    for name, x in model.state_dict().items():
        assert torch.equal(loaded[name], x.to(stored).float()), name
    with torch.no_grad():
        model.head.bias[0] = 1e6
    with pytest.raises(ValueError, match=r"head.bias has numbers too large for stored"):
        checkpoint.save(model, tmp_path / "model", stored=stored)


def test_a_model_in_parts(tmp_path, monkeypatch):
    model = build()
    monkeypatch.setattr("lintra.io.tensors.PART", 5000)
    checkpoint.save(model, tmp_path / "model")
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 1
    assert_close(checkpoint.load(tmp_path / "model").state_dict(), model.state_dict(), rtol=0, atol=0)
    monkeypatch.undo()
    checkpoint.save(model, tmp_path / "model")  # replaces all files
    assert {x.name for x in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}


def test_models_that_come_with_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path / "weights")
    checkpoint.save(build(), tmp_path / "weights" / "small")
    monkeypatch.chdir(tmp_path)
    assert checkpoint.shipped() == ["small"]
    assert len(checkpoint.load("small").blocks) == 2
    checkpoint.save(build(layers=1), "small")  # a user's model takes precedence
    assert len(checkpoint.load("small").blocks) == 1
    for name in ("large", "other/small"):
        with pytest.raises(checkpoint.Error, match=f"{name} does not exist"):
            checkpoint.load(name)


def test_a_folder_without_a_model_hides_none_that_comes_with_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path / "weights")
    checkpoint.save(build(), tmp_path / "weights" / "small")
    monkeypatch.chdir(tmp_path)
    for inside in ("small", "small/pictures", "small/step-00000001"):  # a checkpoint without a model
        (tmp_path / inside).mkdir()
        assert checkpoint.find("small") == tmp_path / "weights" / "small"
        assert len(checkpoint.load("small").blocks) == 2
    with pytest.raises(checkpoint.Error, match="small holds no model"):
        checkpoint.load(tmp_path / "small")
    checkpoint.save(build(layers=1), "small/step-00000002")
    assert checkpoint.find("small") == Path("small")
    assert len(checkpoint.load("small").blocks) == 1

"""Folders in Hugging Face's format, and the conversion of networks of lintra.models in both directions."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from lintra import attention, checkpoint, hf
from lintra.attention import gated, linear, softmax
from lintra.models import decoder, encoder, seq2seq
from tests.hf.kinds import build, config, mechanism, names, tokens

EVERY = sorted({*names(causal=True), *names(causal=False)})
AUTO = {
    hf.LintraForCausalLM: AutoModelForCausalLM,
    hf.LintraForMaskedLM: AutoModelForMaskedLM,
    hf.LintraForSequenceClassification: AutoModelForSequenceClassification,
    hf.LintraModel: AutoModel,
}
IDS = tokens(2, 9)


@pytest.mark.parametrize("name", [each for each in EVERY if mechanism(each) == attention.load(each).Config()])
def test_a_name_is_the_mechanism_with_its_defaults(name):
    """Not what files had before an option existed."""
    assert hf.LintraConfig(attention=name) == hf.LintraConfig(attention=attention.load(name).Config())


def test_an_option_that_a_saved_configuration_lacks_is_what_it_was():
    saved = config("retention").to_dict()
    del saved["attention"]["decay_per"]
    assert hf.LintraConfig.from_dict(saved).attention["decay_per"] == "kv_head"
    assert hf.LintraConfig(attention={"name": "retention"}).attention["decay_per"] == "head"


def outputs(model):
    found = model(IDS)
    return (
        found.last_hidden_state
        if isinstance(model, hf.LintraModel) and "logits" not in found
        else found.logits
    )


def same_weights(found, wanted) -> bool:
    """Return whether two modules have the same parameters and buffers, bit for bit.

    Their outputs may differ by rounding: products of matrices depend on where in memory the weights begin.
    """
    found, wanted = found.state_dict(), wanted.state_dict()
    return found.keys() == wanted.keys() and all(torch.equal(x, wanted[name]) for name, x in found.items())


def test_heads_of_their_own_size_come_back(tmp_path):
    model = build(head_dim=6)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.network_config().head_dim == 6
    assert same_weights(again, model)
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))
    assert hf.LintraConfig.of(model.network_config()).head_dim == 6


def test_tied_embeddings_come_back(tmp_path):
    model = build(tie_word_embeddings=True)
    assert model.network_config().tie_embeddings
    model.save_pretrained(tmp_path)
    assert not [x for x in load_file(tmp_path / "model.safetensors") if x == "lm_head.weight"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.tie_word_embeddings
    assert same_weights(again, model)
    assert_close(again(IDS).logits, model(IDS).logits)
    whole = hf.from_hf(model)
    assert whole.config.tie_embeddings
    assert_close(whole(IDS), model(IDS).logits)
    assert same_weights(hf.to_hf(whole), model)


def test_a_hybrid_comes_back(tmp_path):
    several = ["gated", {"name": "softmax", "window": 4}]
    model = build(attention=several)
    assert model.network_config().mechanisms == (gated.Config(), softmax.Config(window=4))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same_weights(again, model)
    assert again.network_config().mechanisms == model.network_config().mechanisms
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))
    whole = hf.from_hf(model)
    assert_close(whole(IDS), model(IDS).logits)
    assert same_weights(hf.to_hf(whole), model)
    with pytest.raises(ValueError, match="layers must be a multiple of the mechanisms in attention, got 2"):
        config(attention=["gated", "gated", "softmax"])


@pytest.mark.parametrize("name", names(causal=True))
def test_a_saved_decoder_comes_back(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    assert {x.name for x in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is hf.LintraForCausalLM
    assert again.dtype == torch.float64
    assert same_weights(again, model)
    assert_close(again(IDS).logits, model(IDS).logits)
    assert torch.equal(again.generate(IDS, max_new_tokens=4), model.generate(IDS, max_new_tokens=4))
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == again.config.to_dict()
    assert again.config.attention == config(name).attention


@pytest.mark.parametrize("kind", [hf.LintraForMaskedLM, hf.LintraForSequenceClassification, hf.LintraModel])
@pytest.mark.parametrize("name", EVERY)
def test_a_saved_encoder_comes_back(name, kind, tmp_path):
    model = build(name, kind, num_labels=3)
    model.save_pretrained(tmp_path)
    again = AUTO[kind].from_pretrained(tmp_path)
    assert type(again) is kind
    assert same_weights(again, model)
    assert_close(outputs(again), outputs(model))


def test_a_large_model_is_saved_in_parts(tmp_path):
    model = build()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    again = hf.LintraForCausalLM.from_pretrained(tmp_path)
    assert same_weights(again, model)
    assert same_weights(hf.from_hf(tmp_path), hf.from_hf(model))


@pytest.mark.parametrize("all_of_it", [False, True])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in names(causal=True)),
        ("gated", {"conv": 3, "output_gate": True, "qk_norm": "l2", "position": "rotary"}),
        ("linear", {"start": True, "context": (1, 2)}),
        ("linear", {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_a_decoder_whose_weights_lie_on_disk_generates(name, changes, all_of_it, tmp_path):
    """accelerate loads weights when a module is called, and `extend` is no such call."""
    pytest.importorskip("accelerate")
    model = build(name, dtype=torch.float32, **changes)
    model.save_pretrained(tmp_path)
    where: dict[str, str] = {"": "disk"}
    if not all_of_it:
        others = {x for x, _ in model.model.named_children()} - {"blocks"} | {"blocks.1"}
        where = {"lm_head": "cpu", "model.blocks.0": "disk"} | {f"model.{x}": "cpu" for x in others}
    loaded = hf.LintraForCausalLM.from_pretrained(
        tmp_path, device_map=where, offload_folder=tmp_path / "weights"
    )
    weight = loaded.model.blocks[0].attn.qkv_proj.weight
    assert weight.is_meta
    for use_cache in (False, True):
        assert_close(loaded(IDS, use_cache=use_cache).logits, model(IDS).logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(IDS, **options), model.generate(IDS, **options))
    assert weight.is_meta
    assert all(x.is_meta for x in loaded.model.blocks[0].parameters())


@pytest.mark.parametrize("name", EVERY)
def test_models_load_and_are_built_in_half_precision(name, tmp_path):
    kind = hf.LintraForCausalLM if name in names(causal=True) else hf.LintraForMaskedLM
    model = build(name, kind, torch.float32)
    model.save_pretrained(tmp_path)
    again = AUTO[kind].from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {x.dtype for x in again.parameters()} == {torch.bfloat16}
    # Eight bits of mantissa through two layers; hash bits that come out differently change whole tokens.
    difference = (again(IDS).logits.float() - model(IDS).logits).abs().median()
    assert difference < 0.1
    built = AUTO[kind].from_config(config(name), dtype=torch.bfloat16)
    assert {x.dtype for x in built.parameters()} == {torch.bfloat16}
    assert built(IDS).logits.isfinite().all()


def test_a_new_head_on_a_trained_encoder_is_initialised(tmp_path):
    model = build("performer", hf.LintraForMaskedLM, torch.float32)
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, pool="first")
    for name, x in model.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], x)
    torch.manual_seed(1)
    wanted = hf.LintraForSequenceClassification(loaded.config).classifier
    assert torch.equal(loaded.classifier.weight, wanted.weight)
    assert torch.equal(loaded.classifier.bias, wanted.bias)


def test_an_encoder_of_a_decoders_folder_sees_no_future(tmp_path):
    model = build("linear")
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert_close(model.lm_head(loaded(IDS).last_hidden_state), model(IDS).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert AutoModel.from_pretrained(tmp_path / "again").model.causal
    described = config()
    hf.LintraForCausalLM(described)
    assert not hf.LintraModel(described).model.causal


@pytest.mark.parametrize("name", names(causal=True))
def test_a_decoder_goes_there_and_back(name, tmp_path):
    torch.manual_seed(0)
    shape = {"vocabulary": 11, "layers": 2, "heads": 2, "width": 16}
    model = decoder.Config(attention=mechanism(name), **shape).build().double().eval()
    theirs = hf.to_hf(model)
    assert theirs.dtype == torch.float64
    assert_close(theirs(IDS, use_cache=False).logits, model(IDS))
    start = torch.full((1, 1), model.start_token)
    assert_close(theirs(start, use_cache=False).logits, model(start))
    again = hf.from_hf(theirs)
    assert again.config == model.config
    assert same_weights(again, model)
    checkpoint.save(model, tmp_path / "ours")
    hf.to_hf(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    back = hf.from_hf(tmp_path / "theirs")
    assert back.config == model.config
    assert same_weights(back, model)


@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        ({"outputs": 3, "pool": "last"}, hf.LintraForSequenceClassification),
        ({"outputs": 2, "pool": "mean"}, hf.LintraForSequenceClassification),
        ({"outputs": 11}, hf.LintraForMaskedLM),
        ({}, hf.LintraModel),
    ],
)
@pytest.mark.parametrize("causal", [None, True, False])
def test_an_encoder_goes_there_and_back(ends, kind, causal):
    shape = {"vocabulary": 11, "layers": 2, "heads": 2, "width": 16, "causal": causal}
    model = encoder.Config(attention=linear.Config(chunk=8), **ends, **shape).build().eval()
    theirs = hf.to_hf(model)
    assert type(theirs) is kind
    assert_close(outputs(theirs), model(IDS))
    again = hf.from_hf(theirs)
    assert again.config == model.config
    assert same_weights(again, model)


def test_fields_of_a_network_go_there_and_back():
    layers = {
        "layers": 1,
        "heads": 4,
        "kv_heads": 2,
        "width": 16,
        "conv": 3,
        "qk_norm": "l2",
        "output_gate": True,
    }
    around = {
        "norm_kind": "rms",
        "activation": "swiglu",
        "mlp_ratio": 2.0,
        "dropout": 0.1,
        "checkpoint_blocks": True,
    }
    ends = {
        "context": (1, 4),
        "position": "grid",
        "grid": (5, 4),
        "output": decoder.LogisticMixture(components=3),
    }
    given = decoder.Config(vocabulary=11, **layers, **around, **ends)
    described = hf.LintraConfig.of(given)
    assert described.network(decoder) == given
    again = hf.LintraConfig(**json.loads(described.to_json_string()))
    assert again.network(decoder) == given
    learned = decoder.Config(vocabulary=11, position="learned", max_length=7)
    assert hf.LintraConfig.of(learned).max_position_embeddings == 7
    assert hf.LintraConfig.of(learned).network(decoder) == learned
    assert hf.LintraConfig(width=32, max_length=7, position="learned").hidden_size == 32


def test_what_is_converted_shares_no_memory():
    model = build()
    ours = hf.from_hf(model)
    theirs = hf.to_hf(ours)
    for x in (*ours.parameters(), *theirs.parameters()):
        x.data.zero_()
    assert all(x.any() for x in model.parameters())
    assert all(x.requires_grad for x in (*ours.parameters(), *theirs.parameters()))


@pytest.mark.parametrize("kind", [hf.LintraForCausalLM, hf.LintraForMaskedLM])
def test_symbols_are_added(kind, tmp_path):
    model = build(kind=kind, dtype=torch.float32)
    before = model(IDS).logits
    model.resize_token_embeddings(14, mean_resizing=False)
    assert model.config.vocab_size == model.model.config.vocabulary == 14
    assert_close(model(IDS).logits[..., :11], before)
    more = torch.full((1, 3), 13)
    assert model(more, labels=more).loss.isfinite()
    model.save_pretrained(tmp_path)
    assert same_weights(kind.from_pretrained(tmp_path), model)
    assert_close(hf.from_hf(model)(more), model(more).logits)


def test_a_shipped_model_is_converted():
    theirs = hf.to_hf("mnist-small")
    assert theirs.generate(max_new_tokens=3, do_sample=False).shape == (1, 4)


def test_other_networks_are_refused():
    shape = {"layers": 1, "heads": 2, "width": 8}
    with pytest.raises(ValueError, match=r"the classes read symbols, the encoder features, inputs=5"):
        hf.to_hf(encoder.Config(inputs=5, **shape).build())
    with pytest.raises(ValueError, match=r"no class has outputs=3 of 9 symbols, pool=None"):
        hf.to_hf(encoder.Config(vocabulary=9, outputs=3, **shape).build())
    inner = encoder.Config(vocabulary=9, **shape)
    with pytest.raises(
        TypeError, match=r"model must be a Decoder or an Encoder of lintra\.models, got Seq2Seq"
    ):
        hf.to_hf(seq2seq.Config(vocabulary=9, encoder=inner, **shape).build())
    with pytest.raises(TypeError, match=r"model must be of a class of lintra\.hf, got Linear"):
        hf.from_hf(torch.nn.Linear(1, 1))


def test_folders_of_others_are_refused(tmp_path):
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must hold one of LintraForCausalLM, .*, got none"):
        hf.from_hf(tmp_path)
    with pytest.raises(checkpoint.Error, match=r"does not exist"):
        hf.to_hf(tmp_path / "nothing")


def test_a_folder_that_lacks_weights_is_refused(tmp_path):
    """By itself, transformers would initialise them, as it does a new head."""
    build().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = [name for name in tensors if name.startswith(("model.blocks.1.", "lm_head."))]
    save_file({name: x for name, x in tensors.items() if name not in lost}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="must hold all weights of LintraForCausalLM, but lacks") as error:
        hf.from_hf(tmp_path)
    assert all(name in str(error.value) for name in lost)


def test_an_encoder_whose_head_has_an_activation_goes_there():
    config = encoder.Config(vocabulary=11, outputs=11, width=16, layers=1, heads=2, head_activation="gelu")
    ours, ids = config.build().eval(), torch.randint(11, (2, 5))
    theirs = hf.to_hf(ours)
    assert_close(theirs.eval()(ids).logits, ours(ids))
    with pytest.raises(ValueError, match="head_activation=None"):
        theirs.resize_token_embeddings(13)


def test_attention_may_be_named_after_the_configuration_is_built():
    config = hf.LintraConfig(vocab_size=11, width=16, layers=1, heads=2)
    config.attention = "performer"
    assert hf.LintraForCausalLM(config).model.blocks[0].attn.attention.name == "performer"


def test_entries_that_quantised_layers_add_to_a_state_dict_are_left_alone():
    class Quantised(torch.nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}weight.absmax"] = torch.ones(1)

    model = hf.LintraForCausalLM(hf.LintraConfig(vocab_size=11, width=16, layers=1, heads=2))
    layer = model.model.blocks[0].mlp.up
    layer.__class__, layer._is_hf_initialized = Quantised, True
    before = layer.weight.clone()
    model._initialize_missing_keys(True)
    assert torch.equal(layer.weight, before)


def test_a_model_on_several_devices_has_no_cache():
    model = hf.LintraForCausalLM(hf.LintraConfig(vocab_size=11, width=16, layers=1, heads=2)).eval()
    model.hf_device_map = {"model.blocks.0": 0, "lm_head": 1}
    with pytest.raises(ValueError, match="a model on several devices cannot use a cache"):
        model(torch.randint(11, (1, 3)), use_cache=True)
    assert model(torch.randint(11, (1, 3))).past_key_values is None

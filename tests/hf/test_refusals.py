"""Unsupported calls are refused with a message that says what is supported."""

import re
import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache

from lintra import hf
from tests.hf.kinds import build, config, names, tokens

IDS = tokens(2, 5)
ENCODER_ONLY = sorted({*names(causal=False)} - {*names(causal=True)})


@pytest.mark.parametrize("name", ENCODER_ONLY)
def test_a_mechanism_that_is_not_causal_predicts_no_next_token(name):
    with pytest.raises(ValueError, match=rf"{name}.* has no causal form"):
        hf.LintraForCausalLM(config(name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "perfomer"}, "attention must be one of aft, .* (perhaps performer"),
        ({"attention": {"name": "linear", "chunks": 3}}, "attention has the unknown field 'chunks'"),
        ({"attention": {"name": "linear", "chunk": 0}}, "attention: chunk must be at least 1, got 0"),
        ({"attention": 3}, "attention must be an object, got 3"),
        ({"hidden_size": 15}, "config: width must be a multiple of heads, got 15 and 2"),
        ({"norm": "middle"}, "config.norm must be 'pre' or 'post', got 'middle'"),
        ({"position": "learned"}, "config: max_length goes with position='learned', got None"),
        ({"tie_word_embeddings": True, "embed": "value"}, "config: tie_embeddings needs a vector as wide as"),
    ],
)
def test_configurations_that_make_no_sense(options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message).replace(r"\.\*", ".*")):
        config(**options)


def test_what_tied_embeddings_cannot_do():
    tied = config(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="LintraForMaskedLM has a head of its own: tie_word_embeddings must"):
        hf.LintraForMaskedLM(tied)
    with pytest.raises(ValueError, match=r"resize_token_embeddings needs .* tie_word_embeddings=False"):
        hf.LintraForCausalLM(tied).resize_token_embeddings(20)


def test_a_field_written_wrong():
    with pytest.raises(TypeError, match=r"LintraConfig has no field 'hiden_size' \(perhaps hidden_size\)"):
        hf.LintraConfig(hiden_size=8)


def test_an_option_of_a_mechanism_beside_it():
    message = r"LintraConfig has no field 'features': give attention={'name': 'performer', 'features': 64}"
    with pytest.raises(TypeError, match=message):
        hf.LintraConfig(attention="performer", features=64)
    with pytest.raises(TypeError, match=r"give attention={'name': 'softmax', 'window': 8}"):
        hf.LintraConfig(attention=["linear", "softmax"], window=8)


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_outputs_that_no_call_gives(name):
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        hf.LintraForCausalLM(config(**{name: True}))


def test_a_decoder_that_sees_the_future():
    with pytest.raises(ValueError, match=r"causal must be True or None, got False"):
        hf.LintraForCausalLM(config(causal=False))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_attentions": True}, "output_attentions is not supported: most mechanisms never make"),
        ({"output_hidden_states": True}, "output_hidden_states is not supported: LintraModel gives the last"),
        (
            {"inputs_embeds": torch.zeros(2, 5, 16)},
            "inputs_embeds is not supported: the networks read input_ids",
        ),
        ({"token_type_ids": torch.ones(2, 5)}, "token_type_ids must be 0"),
        (
            {"position_ids": torch.arange(1, 6).expand(2, 5)},
            r"position_ids must be \[1 t\], from 0 in each packed",
        ),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must be \[2 5\], .* got shape \[2, 4\]"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, r"attention_mask must be \[2 5\]"),
        ({"past": 3}, "forward takes no past"),
    ],
)
@pytest.mark.parametrize("kind", [hf.LintraForCausalLM, hf.LintraForSequenceClassification])
def test_inputs_that_nothing_is_done_with(given, message, kind):
    with pytest.raises((TypeError, ValueError), match=message):
        build(kind=kind)(IDS, **given)


def test_inputs_that_are_not_there_or_change_nothing():
    model = build()
    with pytest.raises(ValueError, match="input_ids must be given"):
        model()
    with pytest.raises(ValueError, match="tokens must be between 0 and 10, got 11"):
        model(IDS + 11 - IDS)
    given = {"output_attentions": False, "inputs_embeds": None, "token_type_ids": torch.zeros(2, 5)}
    assert torch.equal(model(IDS, **given).logits, model(IDS).logits)


def test_a_mask_behind_a_cache_has_two_lengths():
    model = build()
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask must be \[2 6\], .* got shape \[2, 3\]"):
        model(IDS[:, :1], attention_mask=torch.ones(2, 3), past_key_values=cache)
    for length in (1, 6):
        model(IDS[:, :1], attention_mask=torch.ones(2, length), past_key_values=cache, use_cache=False)


def test_caches_of_another_kind():
    model = build()
    message = r"(cache|past_key_values) must be a LintraCache, which holds states, got DynamicCache"
    with pytest.raises(TypeError, match=message):
        model(IDS, past_key_values=DynamicCache())
    with pytest.raises(TypeError, match=message):
        model.generate(IDS, past_key_values=DynamicCache(), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"cache_implementation must be None: .*, got 'static'"):
        model.generate(IDS, cache_implementation="static", max_new_tokens=2)
    cache = build("softmax")(IDS, use_cache=True).past_key_values
    with pytest.raises(TypeError, match=r"state must be a LinearState|must be a"):
        model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"state is for 2 sequences, tokens for 1"):
        model(IDS[:1], past_key_values=model(IDS, use_cache=True).past_key_values)


def test_generation_that_needs_the_past():
    model = build()
    with pytest.raises(ValueError, match="not supported with stateful models"):
        model.generate(IDS[:1], assistant_model=build(), max_new_tokens=2)
    with pytest.raises(ValueError, match="output_attentions is not supported"):
        model.generate(IDS, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with pytest.raises(ValueError, match="prefill_chunk_size needs padding at the left"):
        model.generate(IDS, attention_mask=mask, prefill_chunk_size=2, max_new_tokens=2)


def test_packed_sequences_are_not_continued():
    bounds = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="packed sequences cannot be continued: use_cache must be False"):
        build()(IDS[:1], cu_seq_lens_q=bounds, use_cache=True)
    with pytest.raises(ValueError, match="cu_seqlens and mask exclude each other"):
        build()(IDS[:1], cu_seq_lens_q=bounds, attention_mask=torch.tensor([[1, 1, 1, 1, 0]]))


@pytest.mark.parametrize("options", [{"start": True}, {"embed": "value"}, {"start": True, "context": (1,)}])
def test_tables_that_are_not_resized(options):
    with pytest.raises(ValueError, match="resize_token_embeddings needs start=False"):
        build(**options).resize_token_embeddings(20)


def test_lintra_alone_imports_no_transformers():
    program = "import lintra, sys; assert 'transformers' not in sys.modules; import lintra.hf"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_transformers_that_is_not_there():
    program = "import sys; sys.modules['transformers'] = None; import lintra.hf"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "lintra.hf needs transformers: pip install 'lintra[hf]'" in done.stderr


@pytest.mark.parametrize(
    "name",
    ["intermediate_size", "d_model", "num_heads", "n_positions", "rms_norm_eps", "n_layer", "sliding_window"],
)
def test_names_of_other_configurations_are_refused_with_ours(name):
    with pytest.raises(TypeError, match=f"LintraConfig has no field '{name}': give "):
        hf.LintraConfig(vocab_size=11, **{name: 1})

"""`generate` with a state equals `generate` without one, and padding changes nothing."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import GenerationConfig

from lintra import hf
from tests.hf.kinds import build, names, padded, tokens

CAUSAL = names(causal=True)
STEPS = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(params=CAUSAL)
def model(request):
    return build(request.param)


def test_logits_are_those_of_the_decoder(model):
    ids = tokens(2, 9)
    decoder = hf.from_hf(model)
    assert_close(model(ids, use_cache=False).logits, decoder(ids))
    assert_close(model(ids, use_cache=True).logits, decoder.extend(ids)[0])
    assert_close(model(ids, logits_to_keep=2, use_cache=False).logits, decoder(ids)[:, -2:])
    kept = torch.tensor([0, 3])
    assert_close(model(ids, logits_to_keep=kept, use_cache=False).logits, decoder(ids)[:, kept])


def test_positions_that_count_tokens_change_nothing(model):
    ids = tokens(2, 5)
    expected = model.generate(ids, **STEPS)
    assert torch.equal(model.generate(ids, position_ids=torch.arange(5)[None], **STEPS), expected)
    if not model.model.blocks[0].attn.attention.can.lookahead:
        assert model(ids, position_ids=torch.arange(5).expand(2, 5)).past_key_values is not None
    cache = hf.LintraCache()
    model(ids, past_key_values=cache, use_cache=True)
    again = model(expected[:, 5:6], past_key_values=cache, position_ids=torch.tensor([[5]]), use_cache=True)
    assert torch.equal(again.logits[:, -1].argmax(-1), expected[:, 6])
    batch = padded([tokens(3, seed=1), tokens(7, seed=2)], "left")
    places = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with_places = model(**batch, position_ids=places, use_cache=False).logits
    assert torch.equal(with_places, model(**batch, use_cache=False).logits)


def test_a_cache_changes_no_token(model):
    ids = tokens(2, 5)
    assert torch.equal(model.generate(ids, **STEPS), model.generate(ids, use_cache=False, **STEPS))


def test_beams_on_a_cache_are_those_without(model):
    ids = tokens(2, 5)
    options = {"num_beams": 3, "num_return_sequences": 2, **STEPS}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_padded_prompt_is_continued_as_alone(model, side, use_cache):
    rows = [tokens(3, seed=1), tokens(7, seed=2), tokens(1, seed=3)]
    batch = padded(rows, side)
    together = model.generate(**batch, use_cache=use_cache, **STEPS)[:, 7:]
    for row, found in zip(rows, together, strict=True):
        assert torch.equal(found, model.generate(row[None], **STEPS)[0, len(row) :])


def test_beams_of_a_padded_batch_are_those_of_each_prompt():
    model, rows = build(), [tokens(3, seed=1), tokens(7, seed=2)]
    options = {"num_beams": 3, **STEPS}
    together = model.generate(**padded(rows, "left"), **options)[:, 7:]
    for row, found in zip(rows, together, strict=True):
        assert torch.equal(found, model.generate(row[None], **options)[0, len(row) :])


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_samples_are_those_without_a_cache(name):
    model, ids, found = build(name), tokens(2, 5), []
    for use_cache in (True, False):
        torch.manual_seed(3)
        options = {"max_new_tokens": 20, "do_sample": True, "top_k": 5, "temperature": 1.5}
        found.append(model.generate(ids, use_cache=use_cache, num_return_sequences=2, **options))
    assert torch.equal(*found)
    assert len({tuple(row) for row in found[0].tolist()}) == 4


def test_a_long_prompt_goes_in_by_pieces():
    model, rows = build(), [tokens(3, seed=1), tokens(9, seed=2)]
    batch = padded(rows, "left")
    whole = model.generate(**batch, **STEPS)
    assert torch.equal(model.generate(**batch, prefill_chunk_size=4, **STEPS), whole)


def test_a_row_that_has_ended_is_not_continued_with_the_others():
    """The state has read the padding behind it, which a mask cannot hide any more."""
    model, ids = build(), tokens(2, 5)
    first = model.generate(ids, return_dict_in_generate=True, **STEPS)
    longer, cache = torch.cat((first.sequences, tokens(2, 3, seed=9)), 1), first.past_key_values
    mask = torch.ones_like(longer)
    mask[0, 7:11] = 0
    with pytest.raises(ValueError, match=r"\[7, 10\] real tokens .* has read \[10, 10\]"):
        model.generate(longer, attention_mask=mask, past_key_values=cache, **STEPS)


def test_a_conversation_goes_on_from_its_cache(model):
    ids, more = tokens(2, 5), tokens(2, 3, seed=9)
    first = model.generate(ids, return_dict_in_generate=True, **STEPS)
    cache = first.past_key_values
    assert cache.get_seq_length() == 5 + 6 - 1  # the last token has not been read yet
    longer = torch.cat((first.sequences, more), 1)
    assert torch.equal(
        model.generate(longer, past_key_values=cache, **STEPS), model.generate(longer, **STEPS)
    )


def test_a_step_leaves_the_cache_it_was_copied_from(model):
    cache = model(tokens(2, 5), use_cache=True).past_key_values
    kept = copy.copy(cache)
    once, again = (
        model(tokens(2, 1), past_key_values=copy.copy(kept), use_cache=True).logits for _ in range(2)
    )
    assert_close(once, again, rtol=0, atol=0)
    model(tokens(2, 1), past_key_values=cache, use_cache=False)
    assert cache.get_seq_length() == 5
    model(tokens(2, 1), past_key_values=cache, use_cache=True)
    assert (cache.get_seq_length(), kept.get_seq_length()) == (6, 5)


def test_the_sequences_of_a_cache_are_chosen_and_repeated(model):
    ids, one = tokens(3, 5), tokens(3, 1, seed=4)
    order = torch.tensor([2, 0, 0, 1])
    cache = model(ids, use_cache=True).past_key_values
    repeated = copy.copy(cache)
    cache.reorder_cache(order)
    wanted = model(torch.cat((ids, one), 1), use_cache=True).logits[:, -1:]
    assert_close(model(one[order], past_key_values=cache, use_cache=True).logits, wanted[order])
    repeated.batch_repeat_interleave(2)
    twice = one.repeat_interleave(2, 0)
    assert_close(model(twice, past_key_values=repeated).logits, wanted.repeat_interleave(2, 0))


def sizes(model, lengths):
    """The bytes of the state after so many tokens."""
    cache, found = hf.LintraCache(), []
    with torch.no_grad():
        for length in lengths:
            while cache.get_seq_length() < length:
                piece = tokens(1, min(4096, length - cache.get_seq_length()))
                model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            found.append(cache.nbytes)
    return found


def constant(name):
    model = build(name, length=2**16, dtype=torch.float32)
    if model.model.blocks[0].attn.attention.can.state not in ("constant", "window"):
        pytest.skip("its state grows")
    return model


@pytest.mark.parametrize("name", CAUSAL)
def test_the_state_does_not_grow(name):
    first, last = sizes(constant(name), (1024, 4096))
    assert first == last > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_the_state_has_not_grown_after_64k_tokens(name):
    first, last = sizes(constant(name), (1024, 2**16))
    assert first == last > 0


def test_the_keys_and_values_of_softmax_grow():
    first, last = sizes(build("softmax"), (100, 200))
    assert last > 1.5 * first


def test_a_cache_answers_what_transformers_asks():
    cache = hf.LintraCache()
    assert (cache.get_seq_length(), cache.get_max_length(), cache.nbytes) == (0, -1, 0)
    assert not cache.is_croppable
    assert not cache.is_compileable
    build()(tokens(2, 5), past_key_values=cache, use_cache=True)
    assert cache.get_mask_sizes(3, 0) == (3, 5)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"return to a copy\.copy"):
        cache.crop(1)
    cache.reset()
    assert (cache.get_seq_length(), cache.state) == (0, None)


def test_a_call_keeps_a_state_where_one_is_of_use():
    model, ids = build(), tokens(2, 5)
    assert isinstance(model(ids).past_key_values, hf.LintraCache)
    assert model(ids, labels=ids).past_key_values is None
    assert model.train()(ids).past_key_values is None
    assert build(use_cache=False)(ids).past_key_values is None
    assert build("lsh")(ids).past_key_values is None
    assert len(model(ids, return_dict=False)) == 1


def test_a_start_symbol_begins_what_has_no_prompt():
    model = build(start=True)
    text = model.generate(**STEPS)
    assert text.shape == (1, 7)
    assert text[0, 0] == model.model.start_token


def test_other_distributions_have_logits_too():
    model = build(output={"name": "LogisticMixture", "components": 2}, embed="value")
    decoder, ids = hf.from_hf(model), tokens(2, 5)
    assert_close(model(ids).logits, decoder.output.log_probs(decoder(ids)))
    assert torch.equal(model.generate(ids, **STEPS), model.generate(ids, use_cache=False, **STEPS))


def test_generation_stops_at_the_end_of_text():
    model, ids = build(), tokens(2, 5)
    options = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=[3, 5, 7], pad_token_id=0)
    text = model.generate(ids, generation_config=options)
    assert torch.equal(text, model.generate(ids, generation_config=options, use_cache=False))
    assert text.shape[1] < 5 + 30


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_forward_is_one_graph_and_the_forward(backend):
    model, ids = build(dtype=torch.float32), tokens(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for given in ({"use_cache": False}, {"labels": ids, "attention_mask": mask}):
        assert_close(compiled(ids, **given).logits, model(ids, **given).logits)

"""Encoders of Hugging Face classes equal those of lintra.models; their losses; padding."""

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from lintra import hf
from lintra.attention import longformer
from lintra.models import decoder, encoder
from tests.hf.kinds import build, names, tokens

EVERY = sorted({*names(causal=True), *names(causal=False)})
IDS = tokens(3, 7)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("kind", [hf.LintraForMaskedLM, hf.LintraForSequenceClassification, hf.LintraModel])
def test_outputs_are_those_of_the_encoder(name, kind):
    model = build(name, kind, num_labels=3)
    found = model(IDS, attention_mask=MASK)[0]
    wanted = hf.from_hf(model)(IDS, mask=MASK.bool())
    if kind is hf.LintraForMaskedLM:  # its head has a bias even where there is no token
        found, wanted = found[MASK.bool()], wanted[MASK.bool()]
    assert_close(found, wanted)


@pytest.mark.parametrize("name", EVERY)
def test_a_text_is_classified_as_alone_wherever_its_padding_is(name):
    model = build(name, hf.LintraForSequenceClassification, num_labels=3)
    together = model(IDS.masked_fill(MASK == 0, -1), attention_mask=MASK).logits
    for row, mask, found in zip(IDS, MASK.bool(), together, strict=True):
        assert_close(model(row[mask][None]).logits[0], found)


def test_packed_texts_are_classified_as_alone():
    model, rows = build(kind=hf.LintraForSequenceClassification), [tokens(4), tokens(2, seed=1)]
    found = model(torch.cat(rows)[None], cu_seq_lens_q=torch.tensor([0, 4, 6], dtype=torch.int32)).logits
    assert_close(found, torch.cat([model(row[None]).logits for row in rows]))


def test_losses_are_those_of_transformers():
    labels = IDS.masked_fill(MASK == 0, -100)
    model = build(kind=hf.LintraForMaskedLM)
    found = model(IDS, attention_mask=MASK, labels=labels)
    assert_close(found.loss, functional.cross_entropy(found.logits.float().flatten(0, 1), labels.flatten()))
    model, labels = build(kind=hf.LintraForSequenceClassification, num_labels=3), torch.tensor([0, 2, 1])
    found = model(IDS, labels=labels)
    assert_close(found.loss, functional.cross_entropy(found.logits, labels))
    assert_close(model(IDS, labels=labels, num_items_in_batch=6).loss, found.loss / 2)
    model, level = build(kind=hf.LintraForSequenceClassification, num_labels=1), torch.rand(3).double()
    found = model(IDS, labels=level)
    assert_close(found.loss, functional.mse_loss(found.logits[:, 0], level))


def test_types_of_tokens_are_those_of_the_network():
    model = hf.to_hf(encoder.Config(vocabulary=11, width=16, layers=1, heads=2, token_types=2).build())
    types = (IDS % 2).where(MASK == 1, 0)
    network = hf.from_hf(model)
    assert_close(model(IDS, token_type_ids=types)[0], network(IDS, token_types=types))
    assert_close(model(IDS)[0], network(IDS))


def test_tokens_that_see_all_are_those_of_the_mechanism():
    near = longformer.Config(window=1, global_projections=True)
    model = build("longformer", hf.LintraModel, attention=near)
    first = torch.zeros_like(IDS)
    first[:, 0] = 1
    found = model(IDS, global_attention_mask=first).last_hidden_state
    assert_close(found, hf.from_hf(model)(IDS, global_mask=first.bool()))
    assert not torch.equal(found, model(IDS).last_hidden_state)


def test_a_causal_encoder_is_asked_for():
    assert build(kind=hf.LintraModel).model.causal is False
    assert build(kind=hf.LintraModel, causal=True).model.causal is True
    assert build("delta", hf.LintraModel).model.causal is True  # the mechanism is causal only
    assert isinstance(hf.from_hf(build(kind=hf.LintraModel)), encoder.Encoder)


def test_blocks_of_an_encoder_are_recomputed():
    found, calls = [], []
    for recomputed in (False, True):
        model = build(kind=hf.LintraForMaskedLM, checkpoint_blocks=recomputed).train()
        model.model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
        model(IDS, labels=IDS).loss.backward()
        found.append([x.grad for x in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=0, atol=0)
    assert len(calls) == 1 + 2


@pytest.mark.parametrize("kind", [hf.LintraForMaskedLM, hf.LintraForSequenceClassification, hf.LintraModel])
def test_a_trained_decoder_becomes_an_encoder(kind, tmp_path):
    """With the embedding of the start symbol, which decoders of lintra have by default."""
    trained = decoder.Config(vocabulary=11, width=16, layers=1, heads=2).build()
    hf.to_hf(trained).save_pretrained(tmp_path)
    model, found = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert {x.partition(".")[0] for x in found["missing_keys"]} <= {"lm_head", "classifier"}
    wanted = trained.embedding.state_dict()
    assert_close(model.model.embedding.table.weight, next(iter(wanted.values())))
    assert model(torch.tensor([[1, 10, 3]]))[0].isfinite().all()


def test_an_embedding_that_an_encoder_lacks_is_not_lost_in_silence(tmp_path):
    hf.to_hf(
        decoder.Config(vocabulary=11, width=16, layers=1, heads=2, context=(1, 2)).build()
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"embeds tokens alone, got context=\(1, 2\)"):
        hf.LintraForSequenceClassification.from_pretrained(tmp_path)

"""Losses, gradients, Trainer and LoRA."""

import peft
import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from lintra import hf
from tests.hf.kinds import build, names, padded, tokens

CAUSAL = names(causal=True)
# PEFT calls what transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")


def test_the_loss_is_the_cross_entropy_of_the_next_token():
    model, ids = build(), tokens(3, 6)
    labels = ids.clone()
    labels[0, 2:4] = -100
    logits = hf.from_hf(model)(ids)[:, :-1].float()
    wanted = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    assert_close(model(ids, labels=labels).loss, wanted)
    summed = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    assert_close(model(ids, labels=labels, num_items_in_batch=torch.tensor(40)).loss, summed / 40)


def test_gradients_are_those_of_the_decoder():
    model, ids = build(), tokens(3, 6)
    decoder = hf.from_hf(model)
    model(ids, labels=ids).loss.backward()
    loss = functional.cross_entropy(decoder(ids)[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    theirs = dict(model.named_parameters())
    for name, x in decoder.named_parameters():
        own = f"lm_{name}" if name.startswith("head.") else f"model.{name}"
        assert_close(theirs[own].grad, x.grad)


@pytest.mark.parametrize("name", CAUSAL)
def test_recomputed_blocks_have_the_gradients_of_kept_ones(name):
    found, calls = [], []
    for recomputed in (False, True):
        model, ids = build(name, dropout=0.3).train(), tokens(2, 9)
        model.model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert model.is_activation_checkpointing
        torch.manual_seed(1)
        model(ids, labels=ids).loss.backward()
        found.append({name: x.grad for name, x in model.named_parameters()})
    for name, x in found[0].items():
        assert_close(found[1][name], x, rtol=0, atol=0)
    assert len(calls) == 1 + 2
    model.gradient_checkpointing_disable()
    assert not model.is_activation_checkpointing
    assert not model.model.config.checkpoint_blocks


@pytest.mark.parametrize("given", ["cu_seq_lens_q", "position_ids"])
def test_packed_sequences_do_not_see_each_other(given):
    model, rows = build(), [tokens(n, seed=n) for n in (4, 1, 7)]
    collator = DataCollatorWithFlattening(
        return_flash_attn_kwargs=given == "cu_seq_lens_q", return_seq_idx=True
    )
    batch = collator([{"input_ids": row.tolist()} for row in rows])
    found = model(**{name: x for name, x in batch.items() if name != "labels"}).logits
    assert_close(found[0], torch.cat([model(row[None], use_cache=False).logits[0] for row in rows]))
    losses = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows if len(row) > 1]
    assert_close(model(**batch).loss, sum(losses) / 9)
    batch["labels"] = batch["input_ids"]  # as by a caller who does not think of the beginnings
    assert_close(model(**batch).loss, sum(losses) / 9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_a_padded_batch_is_that_of_its_rows(side):
    """Nothing precedes the first token of a row that begins with padding."""
    model, rows = build(), [tokens(n, seed=n) for n in (4, 1, 7)]
    batch = padded(rows, side)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    losses = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows if len(row) > 1]
    for given in (labels, batch["input_ids"]):
        assert_close(model(**batch, labels=given).loss, sum(losses) / 9)


def test_empty_packed_sequences_have_no_loss():
    model, row = build(), tokens(6, seed=0)[None]
    expected = model(row, labels=row, cu_seq_lens_q=torch.tensor([0, 2, 6])).loss
    for bounds in ([0, 2, 6, 6], [0, 0, 2, 2, 6, 6, 6]):
        assert_close(model(row, labels=row, cu_seq_lens_q=torch.tensor(bounds)).loss, expected)


def arguments(folder, **changes):
    options = {
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 5,
    }
    return TrainingArguments(folder, **options | changes)


ROWS = [{"input_ids": row, "labels": row} for row in tokens(20, 8)]


def trained(model, folder, **changes):
    """Train for six steps -> the loss of each."""
    resume = changes.pop("resume", None)
    trainer = Trainer(model, arguments(folder, **changes), train_dataset=ROWS, eval_dataset=ROWS[:4])
    trainer.train(resume_from_checkpoint=resume)
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], trainer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "performer", "delta"])
def test_a_resumed_training_is_the_uninterrupted_one(name, tmp_path):
    def made():
        return build(name, dtype=torch.float32, dropout=0.2).train()

    model, resumed = made(), made()
    losses, trainer = trained(model, tmp_path)
    assert losses[-1] < losses[0]
    assert set(trainer.evaluate()) > {"eval_loss"}
    assert trainer.predict(ROWS[:4]).predictions.shape == (4, 8, 11)  # logits alone
    again, _ = trained(resumed, tmp_path, resume=str(tmp_path / "checkpoint-3"))
    assert again == losses  # those of the first three steps come from the checkpoint
    for name, x in resumed.state_dict().items():
        assert torch.equal(x, model.state_dict()[name]), name


def test_accumulated_batches_have_the_loss_of_one(tmp_path):
    together, _ = trained(build(dtype=torch.float32), tmp_path, per_device_train_batch_size=4)
    apart, _ = trained(build(dtype=torch.float32), tmp_path, gradient_accumulation_steps=2)
    assert_close(torch.tensor(apart), torch.tensor(together), rtol=1e-4, atol=1e-4)  # float32, printed


def lora(model, task="CAUSAL_LM", **options):
    targets = ["qkv_proj", "out_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(task_type=task, target_modules=targets, **options))


@pytest.mark.parametrize("name", CAUSAL)
def test_adapters_alone_are_trained_and_merge(name):
    model = lora(build(name, dtype=torch.float32))
    before = {name: x.clone() for name, x in model.state_dict().items() if "lora_" not in name}
    optimizer, ids = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=1.0), tokens(2, 9)
    for _ in range(2):  # the second matrix of an adapter is 0 at first
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    trainable = {name for name, x in model.named_parameters() if x.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in before.items())
    assert all(x.grad.any() for x in model.parameters() if x.requires_grad)
    model.eval()
    wanted = model(input_ids=ids).logits
    text = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    merged = model.merge_and_unload()
    assert type(merged) is hf.LintraForCausalLM
    assert_close(merged(ids).logits, wanted, rtol=1e-4, atol=1e-4)  # float32, summed otherwise
    assert torch.equal(merged.generate(ids, max_new_tokens=4, do_sample=False), text)
    assert_close(hf.from_hf(merged)(ids), merged(ids, use_cache=False).logits)


def test_adapters_train_with_recomputed_blocks_and_trainer(tmp_path):
    model = lora(build(dtype=torch.float32))
    losses, _ = trained(model, tmp_path, gradient_checkpointing=True)
    assert losses[-1] < losses[0]
    again = peft.PeftModel.from_pretrained(build(dtype=torch.float32), tmp_path / "checkpoint-6")
    assert_close(again.eval()(tokens(2, 5)).logits, model.eval()(tokens(2, 5)).logits)


def test_the_head_of_a_classifier_is_trained_beside_its_adapters():
    model = lora(build(kind=hf.LintraForSequenceClassification), task="SEQ_CLS")
    assert any("classifier" in name for name, x in model.named_parameters() if x.requires_grad)


def test_only_all_blocks_are_recomputed_and_in_memory():
    model = build()
    for options in ({"every_n_layers": 2}, {"offload": True}):
        with pytest.raises(ValueError, match=r"all blocks are recomputed or none, in memory"):
            model.activation_checkpointing_enable(**options)
    assert build(checkpoint_blocks=True).is_activation_checkpointing


def test_trainer_smooths_the_labels_of_the_next_tokens(tmp_path):
    """If they were not shifted, a model would learn to repeat its input."""
    model, batch = build(dtype=torch.float32), {"input_ids": tokens(2, 8), "labels": tokens(2, 8)}
    plain, smoothed = (
        Trainer(model, arguments(tmp_path, label_smoothing_factor=x)).compute_loss(model, dict(batch))
        for x in (0.0, 1e-6)
    )
    assert_close(smoothed, plain, rtol=0, atol=1e-4)

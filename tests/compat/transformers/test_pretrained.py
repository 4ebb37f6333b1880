"""Encoders of transformers in lintra's blocks: equal outputs, and where they deviate from the papers."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from torch.testing import assert_close

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from lintra import checkpoint  # noqa: E402
from lintra.hf import encoder_from_pretrained  # noqa: E402

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 40, "initializer_range": 0.2, "pad_token_id": 1, "max_position_embeddings": 80}
SIZES |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "sep_token_id": 2, "num_labels": 3}
LONGFORMER = {"attention_window": [8, 8], "type_vocab_size": 2}
NYSTROM = {"segment_means_seq_len": 24, "num_landmarks": 6, "conv_kernel_size": 5}
BIGBIRD = {"block_size": 4, "num_random_blocks": 1}
HEADS = [
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForTokenClassification",
]
SAME = {"rtol": 1e-9, "atol": 1e-9}


def build(name, options, head="Model"):
    """A tiny model with random weights, also for biases and norms, in float64."""
    torch.manual_seed(0)
    options = SIZES | options | ({"num_labels": 2} if head == "ForQuestionAnswering" else {})
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}{head}")(config).double().eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x), alpha=0.05)
    return model


def tokens(b, t, seed=1):
    return torch.randint(3, 60, (b, t), generator=torch.Generator().manual_seed(seed))


def types(b, t):
    return torch.randint(0, 2, (b, t), generator=torch.Generator().manual_seed(3))


def output(result):
    if "start_logits" in result:
        return torch.stack((result.start_logits, result.end_logits), -1)
    return result.logits if "logits" in result else result.last_hidden_state


@pytest.fixture
def wide(monkeypatch):
    """Softmax in the dtype of its input: Longformer uses 32 bits whatever the dtype of the model."""
    softmax = functional.softmax
    monkeypatch.setattr(functional, "softmax", lambda x, dim=None, dtype=None: softmax(x, dim=dim))


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("head", HEADS)
def test_longformer(head, side, wide):
    """29 tokens, which its own padding extends to 32; global tokens where the caller says."""
    model = build("Longformer", LONGFORMER, head)
    ours, x, kind = encoder_from_pretrained(model), tokens(2, 29), types(2, 29)
    mask, far = torch.ones_like(x), torch.zeros_like(x)
    if side != "none":
        mask[0, slice(0, 9) if side == "left" else slice(20, None)] = 0
    x = x.masked_fill(mask == 0, 1)
    # A head reads the first place; that of lintra reads the first real token.
    far[0, 9 if side == "left" else 0] = far[1, [0, 5, 17]] = 1
    theirs = output(model(x, attention_mask=mask, global_attention_mask=far, token_type_ids=kind))
    y = ours(x, mask=mask.bool(), global_mask=far.bool(), token_types=kind)
    if theirs.dim() == 3:
        theirs, y = theirs[mask.bool()], y[mask.bool()]
    elif side == "left":
        theirs, y = theirs[1:], y[1:]
    assert_close(y, theirs, **SAME)


def test_longformer_as_it_is_and_without_global_tokens():
    model = build("Longformer", LONGFORMER | {"attention_window": 8})
    ours, x = encoder_from_pretrained(model), tokens(2, 24)
    assert_close(ours(x), model(x).last_hidden_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("landmarks", [6, 24])
def test_nystromformer(head, landmarks):
    """At the length it was made for; with as many landmarks as tokens it is attention without landmarks."""
    model = build("Nystromformer", NYSTROM | {"num_landmarks": landmarks}, head)
    ours, x, kind = encoder_from_pretrained(model), tokens(1, 24), types(1, 24)
    assert_close(ours(x, token_types=kind), output(model(x, token_type_ids=kind)), **SAME)


def test_where_nystromformer_is_not_itself():
    """In a batch, iterations start from the largest norm of all samples. A padded batch is an error or, where
    there are no landmarks, its padding is read by the convolution. Another length is an error or mixes
    samples. In lintra each sample gets the same output as when it is alone."""
    model = build("Nystromformer", NYSTROM)
    ours, x = encoder_from_pretrained(model), tokens(3, 24)
    alone = torch.cat([model(row[None]).last_hidden_state for row in x])
    assert_close(ours(x), alone, **SAME)
    assert (model(x).last_hidden_state - alone).abs().max() > 1e-6
    mask = torch.ones_like(x)
    mask[0, 15:] = 0
    other = torch.where(mask.bool(), x, x.flip(0))
    assert_close(ours(other, mask=mask.bool())[:1, :15], ours(x[:1, :15]), **SAME)
    with pytest.raises(RuntimeError, match="must match the size"):
        model(x, attention_mask=mask)
    with pytest.raises(RuntimeError, match="shape"):
        model(x[:, :23])
    half = [model(x[[0, i], :12]).last_hidden_state[0] for i in (1, 2)]  # two halves fill a length
    assert (half[0] - half[1]).abs().max() > 1e-2
    assert_close(ours(x[:2, :12])[0], ours(x[:1, :12])[0], **SAME)
    model = build("Nystromformer", NYSTROM | {"num_landmarks": 24})
    theirs, again = (model(z, attention_mask=mask).last_hidden_state[0, :15] for z in (x, other))
    assert (theirs - again).abs().max() > 1e-2
    with pytest.raises(TypeError, match="subscriptable"):
        build("Nystromformer", NYSTROM | {"inv_coeff_init_option": True})


FULL = {"attention_type": "original_full", "use_bias": False, "rescale_embeddings": True}


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize("head", [x for x in HEADS if x != "ForQuestionAnswering"])
def test_bigbird_with_full_attention(head, side):
    model = build("BigBird", FULL, head)
    ours, x, kind = encoder_from_pretrained(model), tokens(2, 45), types(2, 45)
    mask = torch.ones_like(x)
    if side == "right":
        mask[0, 30:] = 0
    theirs = output(model(x, attention_mask=mask, token_type_ids=kind))
    y = ours(x, mask=mask.bool(), token_types=kind)
    assert_close(*(z[mask.bool()] if z.dim() == 3 else z for z in (y, theirs)), **SAME)


def take_their_blocks(model, ours, t):
    """Make each layer of lintra read the random blocks that transformers' model samples in training."""
    n = -(-t // 4)
    for i, (theirs, block) in enumerate(zip(model.encoder.layer, ours.blocks, strict=True)):
        attention, mechanism = theirs.attention.self, block.attn.attention
        plan, numbers = attention._get_rand_attn_plan(4 * n, 4, 1)
        np.random.seed(i)
        rows = attention._bigbird_block_rand_mask_with_head(4 * n, 4 * n, 4, 4, 4, plan, numbers)
        rows = functional.pad(torch.tensor(np.stack(rows)).long(), (0, 0, 1, 1))  # [h n r]

        def lists(row, number, own=mechanism.lists, rows=rows):
            blocks, listed = own(row, number)
            blocks[..., -1:] = rows[:, row[0]]
            return blocks, listed

        mechanism.lists = lists


@pytest.mark.parametrize("t", [48, 45])
def test_bigbird_with_the_blocks_of_its_training(t):
    model = build("BigBird", BIGBIRD)
    ours, x = encoder_from_pretrained(model), tokens(2, t)
    state = np.random.get_state()
    model.train()  # no dropout is left in it
    take_their_blocks(model, ours, t)
    theirs = model(x).last_hidden_state
    np.random.set_state(state)
    assert_close(ours(x), theirs, **SAME)


def seen_in_evaluation(n, c, repeats):
    """What transformers' BigBird adds to scores [t t] in evaluation: the log of how often a block is read."""
    row, column = torch.arange(n)[:, None], torch.arange(n)
    often = ((row - column).abs() <= 1) | (column == 0) | (column == n - 1)
    often = often.double() + repeats * (column == 0)
    often[[0, -1]] = 1.0
    return often.repeat_interleave(c, 0).repeat_interleave(c, 1).log()


def test_where_bigbird_is_not_itself(monkeypatch):
    """In evaluation it reads no random block, and the first block that many times more; the last block of a
    padded sample is that of the batch; and one short input switches it to full attention for good."""
    model = build("BigBird", BIGBIRD)
    x = tokens(2, 48)
    first = model(x).last_hidden_state
    exact = build("BigBird", BIGBIRD | {"attention_type": "original_full"})
    exact.load_state_dict(model.state_dict())
    mask = seen_in_evaluation(12, 4, repeats=1)[None, None].expand(2, 1, -1, -1)
    assert_close(exact(x, attention_mask=mask).last_hidden_state, first, **SAME)

    ours, mask = encoder_from_pretrained(model), torch.ones_like(x)
    mask[:, 40:] = 0
    longer = model(x, attention_mask=mask).last_hidden_state[:, :40]
    assert (longer - model(x[:, :40]).last_hidden_state).abs().max() > 1e-2
    assert_close(ours(x, mask=mask.bool())[:, :40], ours(x[:, :40]), **SAME)

    short = model(x[:, :20]).last_hidden_state  # five blocks, so that every set covers all
    assert_close(ours(x[:, :20]), short, **SAME)
    assert (model(x).last_hidden_state - first).abs().max() > 1e-2
    assert model.attention_type == "original_full"


@pytest.mark.parametrize(
    ("name", "options"), [("Longformer", LONGFORMER), ("Nystromformer", NYSTROM), ("BigBird", BIGBIRD)]
)
def test_folders_dtypes_and_our_own_checkpoints(name, options, tmp_path):
    model = build(name, options, "ForTokenClassification").float()
    model.save_pretrained(tmp_path / "theirs")
    ours, x = encoder_from_pretrained(tmp_path / "theirs"), tokens(2, 24)
    assert next(ours.parameters()).dtype == torch.float32
    assert not ours.training
    assert_close(ours(x), encoder_from_pretrained(model)(x), rtol=0, atol=0)
    checkpoint.save(ours, tmp_path / "ours")
    assert_close(checkpoint.load(tmp_path / "ours")(x), ours(x), rtol=0, atol=0)
    ours.train()(x).sum().backward()
    assert all(x.grad is not None for n, x in ours.named_parameters() if "global" not in n)


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize(
    ("name", "options"), [("Longformer", LONGFORMER), ("Nystromformer", NYSTROM), ("BigBird", BIGBIRD)]
)
def test_a_folder_that_lacks_weights_is_refused(name, options, head, tmp_path):
    """All weights except those of a pooler, which lintra does not have."""
    model, file = build(name, options, head).float(), tmp_path / "model.safetensors"
    model.save_pretrained(tmp_path)
    tensors, x = load_file(file), tokens(2, 24)
    without = {name: y for name, y in tensors.items() if "pooler" not in name}
    save_file(without, file, {"format": "pt"})
    assert_close(encoder_from_pretrained(tmp_path)(x), encoder_from_pretrained(model)(x), rtol=0, atol=0)
    lost = [name for name in without if "layer.1.output.dense" in name or "transform" in name]
    assert len(lost) >= 2
    save_file({name: y for name, y in without.items() if name not in lost}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"must hold all weights of {name}{head}, but lacks") as error:
        encoder_from_pretrained(tmp_path)
    assert all(name in str(error.value) for name in lost)
    assert "pooler" not in str(error.value)


@pytest.mark.parametrize(("name", "options"), [("Longformer", LONGFORMER), ("BigBird", BIGBIRD)])
def test_a_folder_of_a_bare_model_has_no_head(name, options, tmp_path):
    build(name, options).float().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [f"{name}ForMaskedLM"]}))
    with pytest.raises(ValueError, match=r"dense\.weight.*; a head alone that is not there"):
        encoder_from_pretrained(tmp_path)
    assert encoder_from_pretrained(transformers.AutoModel.from_pretrained(tmp_path)).config.outputs is None


@pytest.mark.parametrize(
    ("name", "options", "head", "message"),
    [
        (
            "Bert",
            {},
            "Model",
            "must be an encoder, one of longformer, big_bird, nystromformer, got BertModel",
        ),
        ("BigBird", {"is_decoder": True}, "Model", "is_decoder=True"),
        ("BigBird", BIGBIRD, "ForQuestionAnswering", "no head like that of BigBirdForQuestionAnswering"),
        ("Longformer", LONGFORMER, "ForMultipleChoice", "no head like"),
        ("Longformer", {"attention_window": [8, 4]}, "Model", "attention_window must be that of every layer"),
        ("Nystromformer", NYSTROM | {"hidden_act": "silu"}, "Model", "hidden_act must be one of"),
    ],
)
def test_what_cannot_be_is_refused(name, options, head, message):
    model = build(name, options, head)
    with pytest.raises(ValueError, match=message):
        encoder_from_pretrained(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "must be an encoder, one of longformer"),
        ({"model_type": "longformer", "architectures": ["MyLongformer"]}, "got MyLongformer"),
        ({"model_type": "longformer", "architectures": ["Trainer"]}, "got Trainer"),
    ],
)
def test_a_folder_with_another_model_is_refused_before_its_weights_are_read(config, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        encoder_from_pretrained(tmp_path)

"""Token shards at the command line: from texts to a model trained on them."""

import json
import re
import shutil

import pytest

from lintra import train
from lintra.tasks.datasets.token_shards import Shards

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = ["--steps", "2", "--layers", "1", "--heads", "2", "--width", "16", "--precision", "32"]
LEARN = ["train", "text", "--data", "shards", "--length", "16", "--batch-tokens", "64", *FEW, "--dir", "run"]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("".join(f"{i} naïve words and others.\n" for i in range(200)))
    rows = [{"body": f"document {i}, which is short"} for i in range(100)]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"body": ""}])))
    return tmp_path


PREPARE = [
    "prepare",
    "text",
    "texts",
    "b.jsonl",
    "--field",
    "body",
    "--document-bytes",
    "300",
    "-o",
    "shards",
]


def test_from_texts_to_a_model(lintra_says, corpus):
    code, out, err = lintra_says(*PREPARE, "--validate", "0.2", "--shard-tokens", "2000")
    assert (code, err) == (0, "")
    assert re.match(
        r"shards: [\d,]+ documents of [\d,]+ bytes to learn from, [\d,]+ documents of [\d,]+ bytes held out",
        out,
    )
    assert "1 documents are empty: left out\n" in out
    assert not list(corpus.glob(".*"))
    code, out, err = lintra_says("prepare", "check", "shards")
    assert (code, err) == (0, "")
    assert re.match(r"shards: \d shards are as they were written, [\d,]+ bytes", out)
    code, out, err = lintra_says(*LEARN)
    assert (code, err) == (0, "")
    found = Shards(corpus / "shards")
    assert f"shards: {found.train.documents:,} documents of {len(found.train):,} bytes to learn from" in out
    assert re.search(r"validation: \d\.\d+ bits/byte, ", out)
    assert lintra_says("train", "--resume", "run", "--steps", "3")[0] == 0
    code, out, err = lintra_says("evaluate", "--model", "run")
    assert (code, err) == (0, "")
    assert f"all {-(-len(found.validate) // 16)} validation samples" in out
    again = [x.replace("shards", "others") for x in PREPARE]
    assert lintra_says(*again, "--validate", "0.4")[0] == 0
    for data, seen in (("others", Shards(corpus / "others")), (str(corpus / "shards"), found)):
        code, out, err = lintra_says("evaluate", "--model", "run", "--data", data)
        assert (code, err) == (0, ""), data
        assert f"all {-(-len(seen.validate) // 16)} validation samples" in out
    shutil.rmtree("shards")
    assert lintra_says(*PREPARE, "--validate", "0.4")[0] == 0
    for more in ([], ["--data", "shards"]):  # its training had fewer documents held out
        code, _, err = lintra_says("evaluate", "--model", "run", *more)
        assert code == 2
        assert "run was begun with other data or another length" in err


def test_tokens_with_ends(lintra_says, corpus):
    pytest.importorskip("tokenizers")
    learn = ["prepare", "tokenizer", "--data", "texts/a.txt", "--vocabulary", "280", "--out", "t.json"]
    assert lintra_says(*learn)[0] == 0
    flags = ["--tokenizer", "t.json", "--end", "<|endoftext|>", "--validate", "0.2"]
    code, out, err = lintra_says(*PREPARE, *flags, "--quiet")
    assert (code, err) == (0, "")
    assert re.search(r"\d\.\d\d bytes a token, 280 tokens in the vocabulary", out)
    code, out, err = lintra_says(*LEARN)
    assert (code, err) == (0, "")
    assert "tokenizer: 280 tokens, " in out
    shutil.rmtree(corpus / "shards")
    assert train.Run.read("run").model.vocabulary == 280
    code, out, err = lintra_says("generate", "--model", "run", "--samples", "1", "--end", "<|endoftext|>")
    assert (code, err.count("\n")) == (0, 1)  # the speed


def test_bad_input(lintra_says, corpus):
    (corpus / "bad.txt").write_bytes(b"words\nand \xff")
    (corpus / "empty.txt").write_text("")
    (corpus / "t.json").write_text("words")
    for args, message in (
        (PREPARE[:-2], "out must name a new folder for the shards, got none: say --out FOLDER"),
        (["prepare", "text", "-o", "x"], "files must name at least one file or folder to read, got none"),
        ([*PREPARE, "--validate", "1"], "validate must be above 0 and below 1, got 1.0"),
        ([*PREPARE, "--document-bytes", "9"], "document_bytes must be at least 64, got 9"),
        ([*PREPARE, "--tokenizer", "t.json"], r"t\.json is damaged"),
        ([*PREPARE, "--tokenizer", "nowhere.json"], r"nowhere\.json cannot be read"),
        ([*PREPARE, "--end", "x"], "end must be a token of a tokenizer.json, got 'x' of bytes"),
        (
            ["prepare", "text", "nowhere.txt", "-o", "x"],
            "nowhere.txt does not exist: name text files, or folders of them",
        ),
        (["prepare", "text", "texts", "-o", "texts/s"], "texts/s is or would be a part of the text in texts"),
        (["prepare", "text", "texts", "-o", "b.jsonl"], r"b\.jsonl exists: name another folder"),
        (["prepare", "text", "empty.txt", "-o", "x"], "no text to prepare, all 1 documents are empty"),
        (["prepare", "text", "b.jsonl", "-o", "x"], r"b\.jsonl, line 1 has no text in 'text': it has body"),
        (["prepare", "text", "texts", "-o", "x"], "of 1 documents none is held out to validate on"),
        (["prepare", "check", "texts"], "folder must be a folder of shards with index.json, got texts"),
        (["prepare", "words"], "prepare must be followed by tokenizer, text or check, got 'words'"),
    ):
        code, out, err = lintra_says(*args)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert re.search(message, err)
        assert not list(corpus.glob("**/.*"))
    assert not (corpus / "x").exists()
    assert not (corpus / "shards").exists()


def test_bad_text_is_named(lintra_says, corpus):
    pytest.importorskip("tokenizers")
    learn = ["prepare", "tokenizer", "--data", "texts/a.txt", "--vocabulary", "280", "--out", "t.json"]
    assert lintra_says(*learn)[0] == 0
    (corpus / "bad.txt").write_bytes(b"words\nand \xff")
    code, out, err = lintra_says("prepare", "text", "bad.txt", "--tokenizer", "t.json", "-o", "x")
    assert (code, out) == (2, "")
    assert err == "lintra: bad.txt, line 2 is not in UTF-8: it has the byte 255\n"


def test_shards_that_cannot_be_trained_on_claim_no_folder(lintra_says, corpus):
    assert lintra_says(*PREPARE, "--validate", "0.2")[0] == 0
    (corpus / "shards" / "train-00000.ends").unlink()
    code, out, err = lintra_says(*LEARN)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "train-00000.ends is missing, a shard of shards/index.json: copy it from where it was made" in err
    shutil.rmtree(corpus / "shards")
    assert lintra_says(*PREPARE, "--validate", "0.2")[0] == 0
    for flags, message in (
        (["--batch-tokens", "65"], "batch_tokens must be a multiple of length=16, got 65"),
        (["--batch-tokens", "64", "--batch", "8"], "batch and batch_tokens both say how large a step is"),
        (
            ["--batch-tokens", "16", "--devices", "2"],
            "the task's batch (batch_tokens) must be a multiple of devices=2, got 1 sequences",
        ),
    ):
        code, out, err = lintra_says(*LEARN, *flags)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
    assert not (corpus / "run").exists()


def test_a_run_is_resumed_by_processes_that_share_its_own_batch(lintra_says, corpus):
    """Its size comes from --batch-tokens, not from --batch."""
    assert lintra_says(*PREPARE, "--validate", "0.2")[0] == 0
    assert lintra_says(*LEARN, "--batch-tokens", "48")[0] == 0
    before = (corpus / "run" / "run.json").read_bytes()
    code, _, err = lintra_says("train", "--resume", "run", "--devices", "4")
    message = "the task's batch (batch_tokens) must be a multiple of devices=4, got 3 sequences"
    assert (code, err) == (2, f"lintra: {message}\n")
    assert (corpus / "run" / "run.json").read_bytes() == before


def test_a_byte_that_has_changed_is_found(lintra_says, corpus):
    assert lintra_says(*PREPARE, "--validate", "0.2")[0] == 0
    file = corpus / "shards" / "validate-00000.tokens"
    file.write_bytes(b"X" + file.read_bytes()[1:])
    code, out, err = lintra_says("prepare", "check", "shards")
    assert (code, out) == (2, "")
    assert "validate-00000.tokens is damaged: its CRC-32 is" in err

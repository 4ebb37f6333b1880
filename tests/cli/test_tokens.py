"""Subword tokens at the command line: from a text to generation, scores and exports."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lintra import checkpoint, runtime, train
from lintra.tasks.datasets import text_files
from lintra.tokenizer import Tokenizer

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("one_thread")

FEW = ["--steps", "2", "--batch", "4", "--layers", "1", "--heads", "2", "--width", "16", "--precision", "32"]
LEARN = ["train", "text", "--data", "words.txt", "--tokenizer", "t.json", "--length", "6", *FEW]


@pytest.fixture
def prepared(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("".join(f"{i} naïve words and others.\n" for i in range(200)))
    code, out, err = lintra_says(
        "prepare", "tokenizer", "--data", "words.txt", "--vocabulary", "300", "--out", "t.json"
    )
    assert (code, err) == (0, "")
    assert re.match(
        r"t\.json: 300 tokens, learned in .* s\n\d\.\d\d bytes a token in the last tenth of the text", out
    )
    return tmp_path


def test_from_a_text_to_a_text(lintra_says, prepared):
    code, out, err = lintra_says(*LEARN, "--dir", "run")
    assert (code, err) == (0, "")
    assert re.search(r"tokenizer: 300 tokens, \d\.\d\d bytes each", out)
    assert re.search(r"validation: \d\.\d+ bits/byte, \d\.\d+ bits/token, ", out)
    (prepared / "t.json").unlink()  # the run has its own copy
    assert lintra_says("train", "--resume", "run", "--steps", "3")[0] == 0
    code, out, err = lintra_says("evaluate", "--model", "run", "--json", "scores.json")
    assert (code, err) == (0, "")
    assert "bits/byte" in out
    assert "bits/token" in out
    write = ["generate", "--model", "run", "--prompt", "naïve words", "--seed", "1", "--length", "30"]
    code, out, err = lintra_says(*write, "--samples", "2")
    assert (code, err.count("\n")) == (0, 1)  # the speed
    assert len(re.findall("^naïve words", out, re.MULTILINE)) == 2
    code, streamed, _ = lintra_says(*write, "--samples", "1", "--stream")
    assert code == 0
    assert streamed.strip() == lintra_says(*write, "--samples", "1")[1].strip()
    code, _, err = lintra_says(*write[:-2], "--prompt", "naïve words and others", "--length", "2")
    assert code == 2
    assert re.search("length must be more than the [3-9] tokens of the prompt, got 2", err)
    again = [
        "train",
        "text",
        "--config",
        "run/run.json",
        "--data",
        "words.txt",
        "--steps",
        "1",
        "--dir",
        "again",
    ]
    assert lintra_says(*again)[0] == 0
    assert (prepared / "again" / "tokenizer.json").read_bytes() == Path("run/tokenizer.json").read_bytes()


@pytest.mark.parametrize(("data", "out"), [("words.txt", "./words.txt"), (".", "new.json")])
def test_a_tokenizer_takes_no_place_in_the_text(lintra_says, prepared, data, out):
    """It neither replaces the only file of the text nor joins a folder that is read as text."""
    before = (prepared / "words.txt").read_bytes()
    code, said, err = lintra_says("prepare", "tokenizer", "--data", data, "--vocabulary", "300", "--out", out)
    assert (code, said, err.count("\n")) == (2, "", 1)
    assert "is or would be a part of the text in" in err
    assert (prepared / "words.txt").read_bytes() == before
    assert not (prepared / "new.json").exists()


def test_a_byte_order_mark_is_no_part_of_a_tokenizer_or_a_text(lintra_says, prepared):
    """A run stores the tokenizer without the mark, and can be resumed with it."""
    mark, content = b"\xef\xbb\xbf", (prepared / "t.json").read_bytes()
    (prepared / "t.json").write_bytes(mark + content)
    words = (prepared / "words.txt").read_bytes()
    (prepared / "words.txt").write_bytes(mark + words)
    marked = Tokenizer.read("t.json")
    assert (marked.content, marked.sum) == (content, Tokenizer(content).sum)
    code, _, err = lintra_says(*LEARN, "--dir", "run")
    assert (code, err) == (0, "")
    task = train.Run.read("run").task.build()
    assert task.tokenizer.content == content
    seen = bytes(text_files.split("words.txt").train)
    assert seen == words[: len(seen)]
    assert lintra_says("train", "--resume", "run", "--steps", "3")[0] == 0
    code, _, err = lintra_says("export", "--to", "runtime", "--model", "run", "--out", "x.lrt")
    assert (code, err) == (0, "")
    assert Tokenizer.read("x-tokenizer.json").content == content


def test_a_text_ends_at_a_token_or_behind_a_text(lintra_says, prepared):
    """For a model that writes only three tokens, two of which form a stop text."""
    assert lintra_says(*LEARN, "--dir", "run")[0] == 0
    model, tokenizer = checkpoint.load("run"), Tokenizer.read("t.json")
    with torch.no_grad():
        model.head.bias[[*tokenizer.encode("ab"), 0]] += torch.tensor([50.0, 50.0, 49.0])
    checkpoint.save(model, "ab")
    for name in ("run.json", "tokenizer.json"):
        shutil.copy(Path("run") / name, "ab")
    write = [
        "generate",
        "--model",
        "ab",
        "--prompt",
        "few ab ",
        "--samples",
        "5",
        "--batch",
        "2",
        "--length",
        "40",
    ]
    for engine in ("pytorch", "runtime")[: 1 + (runtime.why_not() is None)]:
        for more in ([], ["--stream"]):
            flags = ["--engine", engine, "--seed", "3", *more]
            _, out, err = lintra_says(*write, *flags, "--stop", "ab", "ba", "--end", "<|endoftext|>")
            assert "5 x up to " in err
            texts = [line.removeprefix("few ab ") for line in out.splitlines() if line.startswith("few ab ")]
            assert len(texts) == 5
            assert all(re.fullmatch("(a+b?|b+a?)?", text) for text in texts)
            assert len(set(texts)) > 1
    code, _, err = lintra_says(*write, "--end", "nothing")
    assert (code, err) == (2, "lintra: end must be a token of ab/tokenizer.json, got 'nothing'\n")


@pytest.mark.parametrize(
    ("to", "flags", "out"),
    [
        ("runtime", [], "run-tokenizer.json"),
        ("runtime", ["--out", "a.lrt"], "a-tokenizer.json"),
        pytest.param("onnx", ["--out", "b.onnx"], "b-tokenizer.json", marks=pytest.mark.slow),
    ],
)
def test_a_tokenizer_is_exported_beside_the_model(lintra_says, prepared, to, flags, out):
    assert lintra_says(*LEARN, "--dir", "run")[0] == 0
    code, said, err = lintra_says("export", "--to", to, "--model", "run", *flags)
    assert (code, err) == (0, "")
    assert f"{out}: the tokenizer\n" in said
    assert (prepared / out).read_bytes() == (prepared / "t.json").read_bytes()


@pytest.mark.slow
def test_a_run_is_exported_twice_with_one_tokenizer(lintra_says, prepared):
    assert lintra_says(*LEARN, "--dir", "run")[0] == 0
    for to in ("runtime", "safetensors"):
        assert lintra_says("export", "--to", to, "--model", "run")[::2] == (0, "")
    Path("run-tokenizer.json").write_text("another")
    shutil.rmtree("run-model")
    code, _, err = lintra_says("export", "--to", "safetensors", "--model", "run")
    assert (code, err) == (2, "lintra: run-tokenizer.json exists: say --out run-model to replace it\n")
    assert not Path("run-model").exists()
    code, _, err = lintra_says("export", "--to", "runtime", "--model", "run", "--out", "run.lrt")
    assert code == 2
    assert "run-tokenizer.json exists, where the tokenizer goes: move it, or say another --out" in err
    assert Path("run-tokenizer.json").read_text() == "another"


def test_texts_are_classified(lintra_says, prepared):
    lines = "".join(f"{('no', 'yes')[i % 2]}\t{('bad', 'good')[i % 2] * 3}\n" for i in range(40))
    (prepared / "texts.tsv").write_text(lines)
    learn = [
        "train",
        "text-classification",
        "--data",
        "texts.tsv",
        "--tokenizer",
        "t.json",
        *FEW,
        "--dir",
        "run",
    ]
    code, _, err = lintra_says(*learn)
    assert (code, err) == (0, "")
    assert lintra_says("evaluate", "--model", "run")[0] == 0
    code, out, err = lintra_says("predict", "--model", "run", "--lines", "texts.tsv")
    assert (code, err) == (0, "")
    assert out.count('"label"') == 40
    Path("odd.txt").write_bytes(b"good\ncaf\xe9\nbad\n")
    code, out, err = lintra_says("predict", "--model", "run", "--lines", "odd.txt")
    assert (code, out.count('"label"')) == (1, 2)
    assert "odd.txt, line 2" in err
    assert "it is not in UTF-8: it has the byte 233" in err
    assert train.Run.read("run").model.vocabulary == 300


def test_bad_input(lintra_says, prepared):
    (prepared / "no.json").write_text("words")
    (prepared / "empty.txt").write_text("")
    prepare = ["prepare", "tokenizer", "--data", "words.txt"]
    for args, message in (
        ([*LEARN[:4], "--tokenizer", "no.json"], r"no\.json is damaged"),
        ([*LEARN[:4], "--tokenizer", "nowhere.json"], r"nowhere\.json cannot be read: No such file"),
        ([*LEARN, "--data", "empty.txt"], r"empty\.txt is empty"),
        (
            [*prepare, "--vocabulary", "256"],
            "vocabulary must be at least 257, for all bytes and an end, and at most 4,194,304, got 256",
        ),
        ([*prepare, "--out", "."], "out must be a file, got the folder"),
        (["prepare", "tokenizer"], "which text. Name a text file or a folder of them"),
        (["prepare", "tokenizer", "--data", "empty.txt"], r"empty\.txt is empty"),
        (["prepare", "words"], "prepare must be followed by tokenizer, text or check, got 'words'"),
        (["generate", "--stream"], "stream is for tasks on text, mnist-small is of the task images"),
        (["generate", "--end", "x"], "end is for tasks on text, mnist-small is of the task images"),
        (["train", "digits", "--tokenizer", "t.json"], "unrecognized options: --tokenizer"),
        (["train", "--resume", "run", "--tokenizer", "t.json"], "unrecognized options: --tokenizer"),
    ):
        code, out, err = lintra_says(*args)
        assert (code, out) == (2, "")
        assert re.search(message, err)
        assert err.count("\n") == 1
    assert not (prepared / "runs").exists()
    shutil.copy("t.json", "tokenizer.json")
    code, _, err = lintra_says(*prepare)
    assert (code, err) == (2, "lintra: tokenizer.json exists: say --out tokenizer.json to replace it\n")
    assert lintra_says(*LEARN, "--dir", "run")[0] == 0
    shutil.copy("no.json", "run/tokenizer.json")
    for args in (
        ["train", "--resume", "run"],
        ["generate", "--model", "run"],
        ["evaluate", "--model", "run"],
    ):
        code, out, err = lintra_says(*args)
        assert (code, out) == (2, "")
        assert err.startswith("lintra: run/tokenizer.json is not the tokenizer that the run was begun with")
    code, _, err = lintra_says("export", "--to", "runtime", "--model", "run")
    assert (code, err.count("no tokenizer beside it: run/tokenizer.json is not")) == (0, 1)


def test_weights_are_of_their_tokenizer(lintra_says, prepared):
    """Another tokenizer of the same size has other tokens under the same numbers."""
    assert lintra_says(*LEARN, "--dir", "run")[0] == 0
    (prepared / "other.txt").write_text("".join(f"{i} autres mots, et cetera.\n" for i in range(200)))
    prepare = ["prepare", "tokenizer", "--data", "other.txt", "--vocabulary", "300", "--out", "other.json"]
    assert lintra_says(*prepare)[0] == 0
    start = [*LEARN, "--dir", "next", "--start-from", "run"]
    assert lintra_says(*start)[0] == 0
    start[start.index("t.json")] = "other.json"
    start[start.index("next")] = "third"
    code, _, err = lintra_says(*start)
    assert (code, err.count("\n")) == (2, 1)
    assert "start_from=run was trained with another tokenizer: take run/tokenizer.json, or start from" in err
    assert not (prepared / "third").exists()


def test_bytes_have_no_token_to_end_at(lintra_says, prepared):
    plain = [x for x in LEARN if x not in ("--tokenizer", "t.json")]
    assert lintra_says(*plain, "--dir", "run")[0] == 0
    code, _, err = lintra_says("generate", "--model", "run", "--end", "x")
    assert (code, err) == (
        2,
        "lintra: end is a token of a tokenizer, and run writes bytes: use --stop\n",
    )
    code, out, _ = lintra_says("generate", "--model", "run", "--samples", "2", "--prompt", "é", "--stream")
    assert code == 0
    assert len(re.findall("^é", out, re.MULTILINE)) == 2


def test_without_the_extra(lintra_says, prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, err = lintra_says(*LEARN)
    assert code == 2
    assert err.endswith("which is not installed: pip install 'lintra[tokenizers]'\n")

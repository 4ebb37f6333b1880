"""`lintra predict`: new texts with the scores of their classes, as JSON lines."""

import gzip
import io
import json
import queue
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lintra import checkpoint, train
from lintra.cli import predict_texts
from lintra.tasks import text_classification

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(classifier):
    return classifier


def said(out):
    return [json.loads(line) for line in out.splitlines()]


def test_files_and_lines(lintra_says, run):
    (run.parent / "one.txt").write_text("aaaaaaaaaaaaaaaaaaaa")
    (run.parent / "ended.txt").write_text("aaaaaaaaaaaaaaaaaaaa\r\n")  # which is no part of the text
    (run.parent / "two.txt").write_text("bbb\naa\r\nbbbbbb\n")
    code, out, err = lintra_says("predict", "--model", "run", "one.txt", "two.txt")
    assert (code, err) == (0, "")
    assert [row["file"] for row in said(out)] == ["one.txt", "two.txt"]
    assert said(out)[0]["label"] == "aaa"
    ended = said(lintra_says("predict", "--model", "run", "ended.txt")[1])
    assert ended[0]["scores"] == said(out)[0]["scores"]
    code, out, err = lintra_says("predict", "--model", "run", "two.txt", "--lines", "--batch", "2")
    assert (code, err) == (0, "")
    assert [(row["line"], row["label"]) for row in said(out)] == [(1, "bbb"), (2, "aaa"), (3, "bbb")]
    for row in said(out):
        assert set(row["scores"]) == {"aaa", "bbb"}
        assert sum(row["scores"].values()) == pytest.approx(1, abs=1e-5)
        assert (
            max(row["scores"].values()) == next(iter(row["scores"].values())) == row["scores"][row["label"]]
        )


def test_standard_input_and_python_give_the_same(lintra_says, run, monkeypatch):
    stdin = SimpleNamespace(buffer=io.BytesIO(b"ab\nbb\n"), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = lintra_says("predict", "--model", "run")
    assert (code, err) == (0, "")
    model, task = checkpoint.load(run), train.Run.around(run).task.build()
    expected = task.probabilities(model, [b"ab", b"bb"])
    found = [[row["scores"][label] for label in task.classes] for row in said(out)]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-6)


def test_a_byte_order_mark_is_no_part_of_a_text(lintra_says, run, monkeypatch):
    mark, folder = b"\xef\xbb\xbf", run.parent
    for name, content in (("a.txt", b"ab\nbb\n"), ("b.txt", mark + b"ab\nbb\n")):
        (folder / name).write_bytes(content)
    found = []
    for flags in (["a.txt"], ["b.txt"], ["a.txt", "--lines"], ["b.txt", "--lines"]):
        code, out, err = lintra_says("predict", "--model", "run", *flags)
        assert (code, err) == (0, "")
        found.append([row["scores"] for row in said(out)])
    assert found[0] == found[1]
    assert found[2] == found[3]
    stdin = SimpleNamespace(buffer=io.BytesIO(mark + b"ab\nbb\n"), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert [row["scores"] for row in said(lintra_says("predict", "--model", "run")[1])] == found[2]


def test_what_cannot_be_read_is_named_and_the_others_are_read(lintra_says, run):
    (run.parent / "empty.txt").write_text("")
    (run.parent / "good.txt").write_text("bbb\n\naa")
    code, out, err = lintra_says("predict", "--model", "run", "nowhere.txt", "good.txt", "empty.txt")
    assert (code, len(said(out))) == (1, 1)
    assert err == "lintra: nowhere.txt does not exist\nlintra: empty.txt is empty\n"
    code, _, err = lintra_says("predict", "--model", "run", "-")
    assert code == 2
    assert "leave it out to read standard input" in err
    assert lintra_says("predict", "--model", "run", ".")[::2] == (
        1,
        "lintra: . is a folder: name the files in it\n",
    )
    code, out, err = lintra_says("predict", "--model", "run", "good.txt", "--lines")
    assert [row["line"] for row in said(out)] == [1, 3]
    assert (code, err) == (1, "lintra: good.txt, line 2: the text is empty\n")


def test_a_table_is_read_by_its_column_of_texts(lintra_says, run):
    """A text scores as it does on a line of its own, whatever else its row contains."""
    texts = ["bbb", "a, a", "b", "aa"]
    (run.parent / "lines.txt").write_text("\n".join(texts))
    expected = [
        row["scores"] for row in said(lintra_says("predict", "--model", "run", "lines.txt", "--lines")[1])
    ]
    rows = [f'{i},"{text}"\r\n' for i, text in enumerate(texts)]
    (run.parent / "new.csv").write_text("\ufeffid,text\r\n" + "".join(rows), encoding="utf-8", newline="")
    (run.parent / "new.csv.gz").write_bytes(gzip.compress((run.parent / "new.csv").read_bytes()))
    (run.parent / "new.jsonl").write_text("".join(json.dumps({"said": x, "id": 1}) + "\n" for x in texts))
    for flags, first in ((["new.csv"], 2), (["new.csv.gz"], 2), (["new.jsonl", "--text-column", "said"], 1)):
        code, out, err = lintra_says("predict", "--model", "run", *flags)
        assert (code, err) == (0, "")
        assert [(row["file"], row["line"]) for row in said(out)] == [(flags[0], first + i) for i in range(4)]
        assert [row["scores"] for row in said(out)] == expected
    code, out, err = lintra_says("predict", "--model", "run", "new.jsonl", "new.csv", "--text-column", "id")
    assert (code, len(said(out)), err) == (0, 8, "")


def test_tables_without_such_texts_are_named(lintra_says, run):
    (run.parent / "new.csv").write_text("id,review\n1,aa\n2,\n3,b\n4\n")
    code, out, err = lintra_says("predict", "--model", "run", "new.csv")
    assert (code, out) == (1, "")
    assert "new.csv has no column 'text': its first row names 'id', 'review'" in err
    code, out, err = lintra_says("predict", "--model", "run", "new.csv", "--text-column", "review")
    assert (code, [row["line"] for row in said(out)]) == (1, [2, 4])
    assert "new.csv, line 3: the text is empty\n" in err
    assert "new.csv, line 5: 1 values in 2 columns\n" in err
    (run.parent / "one.txt").write_text("aa")
    code, out, err = lintra_says("predict", "--model", "run", "one.txt", "--text-column", "review")
    assert (code, out) == (1, "")
    assert "one.txt: columns have names in files that end in .csv" in err
    code, out, err = lintra_says("predict", "--model", "run", "--text-column", "review")
    assert (code, out) == (2, "")
    assert "text_column is for the rows of files: name files, without --lines" in err
    code, out, err = lintra_says("predict", "x.wav", "--model", "spoken-digits", "--text-column", "review")
    assert (code, out) == (2, "")
    assert "text_column is for texts, which spoken-digits does not read: leave --text-column out" in err


def test_what_has_nothing_to_say_is_refused(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = ["--steps", "1", "--layers", "1", "--heads", "2", "--width", "16", "--dir", "drawn"]
    assert lintra_says("train", "digits", *tiny)[0] == 0
    code, _, err = lintra_says("predict", "--model", "drawn")
    assert code == 2
    assert (
        "the task digits: predict is for classifiers of texts, series and speech; lintra generate draws"
        in err
    )
    code, _, err = lintra_says("predict", "x.wav", "--model", "spoken-digits", "--horizon", "3")
    assert code == 2
    assert "horizon is for series, which spoken-digits does not read: leave --horizon out" in err
    code, _, err = lintra_says("predict", "--model", "run", "--batch", "0")
    assert (code, err.count("\n")) == (2, 1)
    assert "batch must be at least 1, got 0" in err
    code, _, err = lintra_says("predict", "--model", "spoken-digits")
    assert code == 2
    assert "hears audio files: name them" in err


def test_speech_is_what_transcribe_writes(lintra_says):
    spoken = [str(ROOT / "tests" / "speech" / "data" / name) for name in ("0_nicolas_2.wav", "3_theo_0.wav")]
    code, out, err = lintra_says("predict", *spoken, "--model", "spoken-digits")
    assert (code, err) == (0, "")
    assert out == lintra_says("transcribe", *spoken, "--json")[1]
    code, out, err = lintra_says("predict", "nowhere.wav", spoken[0], "--model", "spoken-digits")
    assert (code, len(said(out))) == (1, 1)
    assert "nowhere.wav" in err


def test_texts_are_cut_to_what_was_learned(run):
    model, task = checkpoint.load(run), train.Run.around(run).task.build()
    assert isinstance(task, text_classification.TextClassification)
    long, short = task.probabilities(model, [b"abababab" + b"b" * 99, b"abababab"])
    torch.testing.assert_close(long, short)


def test_a_line_of_a_pipe_is_answered_before_the_next_one_comes():
    came, asked = queue.Queue(), []

    def lines():
        while (line := came.get()) is not None:
            yield line

    groups = predict_texts._arriving(lines(), 32)
    for word in (b"a", b"b"):
        came.put(word)
        asked.append(next(groups))
    assert asked == [[b"a"], [b"b"]]
    for word in (b"c", None):
        came.put(word)
    assert list(groups) == [[b"c"]]


def test_an_error_of_a_pipe_is_not_lost():
    def lines():
        yield b"a"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(predict_texts._arriving(lines(), 2))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["a signal", "a closed reader"])
def test_it_ends_while_a_pipe_is_open(run, by):
    """As Python ends it must not wait for the thread that reads."""
    command = [sys.executable, "-m", "lintra.cli", "predict", "--model", str(run)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        process.stdin.write(b"aaa\n")
        process.stdin.flush()
        assert b'"label"' in process.stdout.readline()
        if by == "a signal":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
            process.stdin.write(b"bbb\n")
            process.stdin.flush()
        assert process.wait(timeout=60) == (130 if by == "a signal" else 141)
        assert b"Fatal" not in process.stderr.read()

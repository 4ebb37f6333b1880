"""How much commands print: errors and results only, progress as well, or also what is chosen."""

import io
import re
import sys
from pathlib import Path

import pytest

from lintra import cli, demo, train
from lintra.audio.errors import SpeechError
from lintra.cli import progress
from lintra.tasks import copy, digits
from lintra.train.console import LastingConsole, draws_bars

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ["--layers", "1", "--heads", "2", "--width", "16", "--precision", "32", "--batch", "4", "--dir", "run"]


def test_quiet_is_the_result_alone(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = lintra_says("train", "digits", "--steps", "2", *TINY, "--quiet")
    assert (code, err) == (0, "")
    result = r"done: step {}, \d\.\d+ bits/dim, \d\.\d+ nats a symbol, saved in run/step-0000000{}\n"
    assert re.fullmatch(result.format(2, 2), out)
    code, out, err = lintra_says("train", "--resume", "run", "--steps", "3", "--quiet")
    assert (code, err) == (0, "")
    assert re.fullmatch(result.format(3, 3), out)
    assert "quiet" not in (tmp_path / "run" / "run.json").read_text()
    code, out, err = lintra_says("train", "digits", "--steps", "2", *TINY, "--quiet")
    assert (code, out) == (2, "")
    assert "run holds a run already" in err


def test_verbose_says_what_is_chosen(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["--attention", "gated,softmax", "--warmup", "1", "--steps", "2", *TINY]
    sizes[sizes.index("--layers") + 1] = "2"
    code, said, err = lintra_says("train", "digits", *sizes, "--verbose")
    assert (code, err) == (0, "")
    model = train.Run.read("run").model
    assert f"width 16, layers 2, 2 heads of 8, attention gated, softmax, {model.vocabulary} symbols\n" in said
    (parts,) = re.findall("parameters: (.*)", said)
    counts = [int(x.replace(",", "")) for x in re.findall(r" ([\d,]+)(?:, |$)", parts)]
    assert sum(counts) == sum(x.numel() for x in model.build().parameters())
    assert re.search("1,500 samples to learn from, .* up to 64 tokens each", said)
    assert "2 of 4 sequences, radam, learning rate 0.004 cosine after 1 steps of warm-up" in said
    assert re.search(r"threads of the CPU, torch .*: linear_attention \w+, recurrence \w+", said)
    code, plain, _ = lintra_says("train", "--resume", "run", "--steps", "3")
    assert "parameters: " not in plain
    assert "step 3  validation" in plain


def test_parts_that_share_are_counted_once(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a few words, and then the same again. " * 40)
    text = ["train", "text", "--data", "words.txt", "--length", "8", "--steps", "1", "--tie-embeddings"]
    code, said, err = lintra_says(*text, *TINY, "--verbose")
    assert (code, err) == (0, "")
    assert "256 symbols, embeddings tied\n" in said
    assert ", head 256\n" in said  # the bias of the head


def test_both_are_none(lintra_says):
    for args in (["train", "digits"], ["train", "--resume", "run"]):
        code, out, err = lintra_says(*args, "--quiet", "--verbose")
        assert (code, out) == (2, "")
        assert "quiet and verbose are opposites: choose one" in err


def test_quiet_drawing_and_scoring(lintra_says, folder):
    folder("run", copy.Config(length=8))
    length = copy.Config(length=8).build().length
    code, out, err = lintra_says("generate", "--model", "run", "--samples", "3", "--quiet")
    assert (code, err) == (0, "")
    assert [len(line.split()) for line in out.splitlines()] == [length] * 3
    folder("drawn", digits.Config())
    code, out, err = lintra_says("evaluate", "--model", "drawn", "--limit", "3", "--quiet")
    assert (code, err) == (0, "")
    assert out.startswith("digits: ")


def test_quiet_transcripts_are_texts_alone(lintra_says):
    file = str(Path(__file__).parents[1] / "speech" / "data" / "0_nicolas_2.wav")
    _, text, _ = lintra_says("transcribe", file)
    code, out, err = lintra_says("transcribe", file, "--stream")
    assert (code, out) == (0, text)
    assert "real-time factor" in err
    assert lintra_says("transcribe", file, "--stream", "--quiet") == (0, text, "")


@pytest.mark.slow
def test_a_quiet_demo_prints_its_results_alone(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_best_threads", lambda task: 1)
    short = ["demo", "--seconds", "0.01", "--longest", "32"]
    code, out, err = lintra_says(*short)
    assert code == 0
    assert "step 1 " in out
    code, out, err = lintra_says(*short, "--quiet")
    assert (code, err) == (0, "")
    assert re.match(r"time is up, .*\n\nafter \d+ seconds:\n\n  parameters ", out)


def test_a_quiet_tokenizer_is_its_file_alone(lintra_says, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a few words, and then the same again. " * 40)
    learn = ["prepare", "tokenizer", "--data", "words.txt", "--vocabulary", "260", "--quiet"]
    code, out, err = lintra_says(*learn)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"tokenizer\.json: 260 tokens, learned in .* s\n", out)


def test_every_command_that_shows_how_far_it_is_can_be_quiet(lintra_says):
    for command in (["generate"], ["evaluate"], ["transcribe"], ["demo"], ["prepare", "tokenizer"]):
        assert "--quiet " in lintra_says(*command, "--help")[1], command
    assert "--quiet " in lintra_says("bench", "attention", "--help")[1]


def test_weights_and_biases_without_its_package(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, out, err = lintra_says("train", "digits", "--steps", "1", *TINY, "--wandb", "tests")
    assert (code, out) == (2, "")
    assert err.endswith("needs wandb, which is not installed: pip install 'lintra[wandb]'\n")
    assert not (tmp_path / "run").exists()
    assert lintra_says("train", "digits", "--steps", "1", *TINY)[0] == 0
    code, _, err = lintra_says("train", "--resume", "run", "--steps", "2", "--wandb", "tests")
    assert code == 2
    assert err.endswith("pip install 'lintra[wandb]'\n")
    assert train.Run.read("run").train.steps == 1


def test_what_the_outputs_encoding_lacks_is_replaced(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "cp1252", write_through=True))
    assert cli.run(lambda args: print("naïve \ufffd 日") or 0, []) == 0
    assert written.getvalue() == "naïve ? ?\n".encode("cp1252")


def test_an_error_of_a_process_that_reads_ahead_is_one_sentence():
    from torch._utils import ExceptionWrapper

    try:
        raise SpeechError("utterance u7: a.wav does not exist")
    except SpeechError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(SpeechError) as found:
        wrapped.reraise()
    assert cli._one_line(found.value) == "utterance u7: a.wav does not exist"


@pytest.mark.parametrize("out", ["a-long-folder/" * 12 + "x.txt", "x.png..", "."])
def test_an_error_has_what_was_written(lintra_says, out):
    _, _, err = lintra_says("web", "--out", out)
    assert f"got {out} (see lintra web --help)" in err


def test_help_fits_any_terminal(lintra_says, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    code, out, err = lintra_says("web", "--help")
    assert (code, err) == (0, "")
    assert "--port" in out
    assert lintra_says("help", "web") == (code, out, err)


@pytest.mark.parametrize(("name", "value"), [("FORCE_COLOR", "1"), ("TTY_COMPATIBLE", "1")])
def test_a_log_gets_lines_whatever_is_said_of_colours(capsys, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    with progress.progress("reading", 2, "rows") as show:
        show(1)
    said = capsys.readouterr().err
    assert said.startswith("reading 1/2 rows")
    assert said.count("\n") == 1


def test_a_dumb_terminal_draws_no_bars(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    assert draws_bars(LastingConsole(file=stream))
    monkeypatch.setenv("TERM", "dumb")
    assert not draws_bars(LastingConsole(file=stream))


def test_train_has_no_device(lintra_says):
    code, out, err = lintra_says("train", "digits", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "with CUDA_VISIBLE_DEVICES= before the command it trains on the CPU" in err

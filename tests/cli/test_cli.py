"""The command line: what it prints, what it refuses in one line, with which exit code."""

import json
import os
import subprocess
import sys

import pytest

import lintra
from lintra import attention
from lintra.cli import COMMANDS, main

KEYS = ["name", "paper", "causal", "bidirectional", "cross", "recurrent", "state", "cost"]
TINY = ["--layers", "1", "--heads", "2", "--width", "16", "--precision", "32", "--dir", "run"]


@pytest.fixture
def lintra_says(capsys):
    """Runs the program -> (exit code, standard output, standard error)."""

    def run(*args: str) -> tuple[int, str, str]:
        try:
            code = main(list(args))
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return run


def test_help_and_version(lintra_says):
    code, out, _ = lintra_says()
    assert code == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert lintra_says("--help")[1] == out
    assert lintra_says("--version")[1] == f"lintra {lintra.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_short_help(lintra_says, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = lintra_says(command, "--help")
    assert (code, err) == (0, "")
    assert 1 <= out.count("\n") <= 30
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize("task", ["copy", "digits", "images"])
def test_training_help_fits_a_screen(lintra_says, task, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = lintra_says("train", task, "--help")
    assert (code, err) == (0, "")
    assert out.count("\n") <= 38
    assert all(len(line) <= 80 for line in out.splitlines())
    for flag in ("--steps", "--attention {linear,softmax}", "--max-minutes FLOAT", "--dir"):
        assert f"  {flag} " in out


def test_list(lintra_says):
    code, out, _ = lintra_says("list", "--json")
    assert code == 0
    mechanisms = json.loads(out)
    assert [m["name"] for m in mechanisms] == attention.names()
    assert all(list(m)[: len(KEYS)] == KEYS for m in mechanisms)
    table = lintra_says("list")[1].splitlines()
    assert table[0].split() == KEYS
    assert len(table) == 1 + len(mechanisms)


def test_info(lintra_says):
    code, out, _ = lintra_says("info")
    assert code == 0
    assert lintra.__version__ in out
    assert "linear_attention" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["jump"], "there is no command 'jump'"),
        (["list", "--yaml"], "list takes only --json or --markdown, got '--yaml'"),
        (["info", "x"], "info takes no arguments, got 'x'"),
        (["train", "juggling"], "task must be one of copy, digits, images; got 'juggling'"),
        (["train", "digits", "--bath", "3"], "perhaps you meant --batch"),
        (["train", "digits", "--batch", "x"], "--batch"),
        (["train", "digits", "--batch", "0"], "batch must be at least 1, got 0"),
        (["train", "digits", "--attention", "magic"], "'magic'"),
        (["train", "digits", "--heads", "5"], "width must be a multiple of heads"),
        (["train", "--resume", "nowhere"], "nowhere holds no run"),
        (["train", "images", "--data-dir", "nowhere"], "nowhere"),
        (["generate"], "--model"),
        (["generate", "--model", "nowhere"], "nowhere"),
        (["generate", "--model", "x", "--samples", "-1"], "samples must not be negative, got -1"),
        (["bench", "everything"], "bench must be one of attention, train, decode; got 'everything'"),
        (["demo", "--seconds", "0"], "seconds must be positive, got 0"),
    ],
)
def test_one_line_for_bad_input(lintra_says, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = lintra_says(*args)
    assert (code, out) == (2, "")
    assert err.startswith("lintra: ")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_traceback_only_with_debug(lintra_says):
    assert "Traceback" not in lintra_says("train", "--resume", "nowhere")[2]
    code, _, err = lintra_says("train", "--resume", "nowhere", "--debug")
    assert code == 2
    assert "Traceback" in err


def test_without_the_extra(monkeypatch, lintra_says):
    """`list`, `info` and the first help work; the other commands name the extra."""
    for name in ("tyro", "rich", "lightning", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    for args in (["list"], ["info"], ["--help"]):
        assert lintra_says(*args)[0] == 0
    code, _, err = lintra_says("generate", "--model", "x")
    assert code == 2
    assert err == "lintra: this command needs tyro, which is not installed: pip install 'lintra[train]'\n"


def test_what_the_core_imports():
    """In a process of its own: the core and the commands of a bare install load nothing of the extra."""
    program = (
        "import sys, lintra.cli; lintra.cli.main(['list']); lintra.cli.main(['info']);"
        "print({'tyro', 'rich', 'lightning', 'matplotlib', 'tensorboard', 'pooch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.usefixtures("one_thread")
def test_train_then_generate(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = lintra_says("train", "digits", *TINY, "--steps", "3")
    assert (code, err) == (0, "")
    assert "step 3/3" in out
    assert "bits/dim" in out
    code, _, err = lintra_says("train", "digits", *TINY)
    assert code == 2
    assert "run holds a run already" in err
    code, out, _ = lintra_says("train", "--resume", "run", "--steps", "4")
    assert code == 0
    assert "step 4/4" in out

    draw = ["generate", "--model", "run", "--samples", "2", "--complete", "2", "--out", "a/b.png"]
    code, out, err = lintra_says(*draw)
    assert (code, err) == (0, "")
    assert "a second" in out
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"b.png", "b-completions.png"}
    for bad, message in [
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-k", "0"], "top_k must be at least 1"),
        (["--complete", "999"], "n must lie in 1 .. 297"),
        (["--fraction", "1.5"], "fraction must lie between 0 and 1"),
    ]:
        code, _, err = lintra_says(*draw, *bad)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.usefixtures("one_thread")
def test_sequences_are_printed(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lintra_says("train", "copy", *TINY, "--length", "16", "--steps", "1", "--batch", "4")[0] == 0
    code, out, _ = lintra_says("generate", "--model", "run", "--samples", "2")
    assert code == 0
    rows = [line.split() for line in out.splitlines()[-2:]]
    assert [len(row) for row in rows] == [16, 16]


@pytest.mark.parametrize("command", ["list", "--help"])
def test_a_closed_pipe_is_no_error(command):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "lintra.cli", command], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")

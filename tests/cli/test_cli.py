"""The command line: what it prints, what it refuses in one line, with which exit code."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

import lintra
from lintra import attention, checkpoint, runtime, train
from lintra.attention import retention
from lintra.cli import COMMANDS, bench, memory
from lintra.cli.arguments import UsageError
from lintra.cli.mechanism import mechanism
from lintra.io.files import locked
from lintra.tasks import copy, images, speech
from lintra.train import data_checks
from lintra.train.schedule import learning_rate

KEYS = ["name", "paper", "causal", "bidirectional", "cross", "recurrent", "state", "cost"]
TINY = ["--layers", "1", "--heads", "2", "--width", "16", "--precision", "32", "--dir", "run"]


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
    assert 1 <= out.count("\n") <= 36
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "  " not in out.partition("\n\n")[0]  # the description, a paragraph


@pytest.mark.parametrize(
    "task",
    [
        *("copy", "digits", "image-classification", "image-folder", "images", "listops", "pathfinder"),
        *("recall", "selective-copying", "series", "speech", "state-tracking", "text", "text-classification"),
    ],
)
def test_training_help_fits_a_screen(lintra_says, task, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = lintra_says("train", task, "--help")
    assert (code, err) == (0, "")
    assert out.count("\n") <= {"speech": 74, "series": 62}.get(task, 58)
    assert all(len(line) <= 80 for line in out.splitlines())
    for flag in ("--steps", "--attention STR", "--max-minutes FLOAT", "--dir"):
        assert f"  {flag} " in out


@pytest.mark.parametrize(
    ("args", "settings"),
    [
        (["speech"], speech.PRESETS["small", "transformer"]),
        (["speech", "--steps", "9", "--encoder=bilstm"], speech.PRESETS["small", "bilstm"]),
        (["images", "--preset", "paper", "--data", "cifar10"], images.PAPER["cifar10"]),
        (["images", "--preset", "paper", "--data", "nothing"], images.PRESETS["best"]),
        (["copy", "--length", "1"], copy.Config().training_preset()),
    ],
)
def test_training_help_shows_what_the_settings_of_the_task_preset(lintra_says, args, settings):
    """Invalid flags are left out: without --help they are an error."""
    _, out, _ = lintra_says("train", *args[:1], "--help", *args[1:])
    for name, value in settings.items():
        told = out.partition(f"\n  --{name.replace('_', '-')} ")[2].partition("\n  --")[0]
        assert told.endswith(f"({value})")


@pytest.mark.parametrize("command", ["export", "generate"])
@pytest.mark.parametrize("columns", ["70", "80", "100"])
def test_help_that_begins_a_line_with_a_dash_is_no_flag(lintra_says, command, columns, monkeypatch):
    """Parts of file names such as "-completions" and "-step.onnx" would, depending on where lines break."""
    monkeypatch.setenv("COLUMNS", columns)
    out = lintra_says(command, "--help")[1]
    assert not re.search(r"^  -[^-]", out, re.MULTILINE)
    assert "(default" not in out


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
        (["list", "--yaml"], "list takes only --json, --markdown or --families, got '--yaml'"),
        (["info", "x"], "info takes no arguments, got 'x'"),
        (
            ["train", "juggling"],
            "task must be one of copy, digits, image-classification, image-folder, images, listops, ",
        ),
        (["train", "digits", "--bath", "3"], "perhaps you meant --batch"),
        (["train", "digits", "--batch", "x"], "batch must be a whole number, got 'x' (see"),
        (["train", "digits", "--steps", "1e4"], "steps must be a whole number, got '1e4' (see"),
        (["train", "digits", "--layers", "1.5"], "layers must be a whole number, got '1.5' (see"),
        (["train", "digits", "--max-minutes", "5m"], "max-minutes must be a number, got '5m' (see"),
        (["train", "speech", "--speeds", "fast"], "speeds must be a number, got 'fast' (see"),
        (["export"], "lintra: --to {runtime,onnx,safetensors} is missing (see"),
        (["train", "digits", "--batch", "0"], "batch must be at least 1, got 0"),
        (["train", "digits", "--batch", "1000000000"], "a batch of 1,000,000,000 sequences needs at least"),
        (["train", "digits", "--seed", "9" * 23], f"seed must lie in 0 .. 2^64 - 1, got {'9' * 23}"),
        (
            ["train", "text", "--data", os.devnull],
            f"{os.devnull} is not a regular file, but a pipe or a device",
        ),
        (["train", "digits", "--attention", "magic"], "got 'magic'"),
        (["train", "digits", "--attention", "sofmax"], "got 'sofmax' (perhaps softmax"),
        (
            ["train", "digits", "--attention", "linformer"],
            "'linformer' (Wang et al. 2020, arXiv:2006.04768) has no causal form",
        ),
        (
            ["train", "digits", "--attention-options", "eps"],
            "attention-options must be FIELD=VALUE ..., got 'eps'",
        ),
        (["train", "digits", "--drop-at", "2"], "drop_at is for --schedule step, got cosine"),
        (["train", "digits", "--patience", "2"], "patience is for --schedule plateau, got cosine"),
        (["train", "digits", "--head-dim", "0"], "head_dim must be at least 1, got 0"),
        (
            ["train", "digits", "--tie-embeddings"],
            "tie_embeddings needs a vector as wide as the network for each",
        ),
        (
            ["train", "--resume", "x", "--tie-embeddings"],
            "a run keeps its tie_embeddings, and --resume changes",
        ),
        (["train", "digits", "--paper-block"], "paper_block is for delta, gated, kda, retention, ssd: leave"),
        (
            ["train", "digits", "--attention", "gated,softmax", "--paper-block"],
            "paper_block is the block of one mechanism, attention has several: leave it out",
        ),
        (
            ["train", "digits", "--attention", "gated,softmax", "--layers", "3"],
            "layers must be a multiple of the mechanisms in attention, got 3 layers and 2 mechanisms",
        ),
        (["train", "digits", "--attention", "gated,softmx"], "got 'softmx' (perhaps softmax"),
        (
            ["train", "digits", "--attention", "gated,softmax", "--attention-options", "delta.chunk=4"],
            "attention-options must be of gated or softmax, got 'delta.chunk=4'",
        ),
        (
            ["train", "digits", "--attention", "gated,softmax", "--attention-options", "window=4"],
            "attention gated has the unknown field 'window'",
        ),
        (["train", "digits", "--attention-options", "ep=1"], "attention linear has the unknown field 'ep'"),
        (["train", "digits", "--attention-options", "eps=x"], "attention linear.eps must be float, got 'x'"),
        (["train", "digits", "--attention-options", "eps=-1"], "eps must be at least 0 and finite, got -1"),
        (["train", "digits", "--attention-options", "feature_map=Exp"], "Hedgehog, T2R, got 'Exp'"),
        (["train", "series", "--season", "99"], "season must be at most the context of 96 rows, got 99"),
        (["train", "series", "--head", "normal"], "invalid choice"),
        (["train", "series", "--data", "nowhere"], "data nowhere does not exist: name a CSV file"),
        (["train", "text"], "which text? Name a text file or a folder of them with --data PATH"),
        (["train", "text-classification", "--data", "nowhere"], "data nowhere does not exist"),
        (["train", "digits", "--devices", "3"], "batch must be a multiple of devices=3, got 16"),
        (["train", "digits", "--heads", "5"], "width must be a multiple of heads"),
        (["train", "--resume", "nowhere"], "nowhere holds no run"),
        (["train", "--resume", "x", "--lr", "0.1.2"], "lr must be a number, got '0.1.2'"),
        (
            ["train", "--resume", "x", "--batch=8"],
            "a run keeps its batch, and --resume changes only --steps, --max-minutes, --lr, --nodes, "
            "--devices, --strategy, --accumulate, --checkpoint-blocks, --save-every, --timeout, --wandb: "
            "leave",
        ),
        (["train", "--resume", "x", "--paper-block"], "a run keeps its paper_block, and --resume changes"),
        (["train", "digits", "--resume", "x"], "the run knows its task: leave 'digits' out before --resume"),
        (["train", "digits", "--config", "nowhere.json"], "config nowhere.json is not a file"),
        (["train", "images", "--data-dir", "nowhere"], "nowhere"),
        (["evaluate", "--model", "x", "--limit", "0"], "limit must be at least 1, got 0"),
        (["evaluate", "--model", "nowhere"], "nowhere"),
        (["evaluate", "--json", "."], "json must be a file, got the folder"),
        (["evaluate", "--pictures", os.devnull], f"pictures must be a folder, got the file {os.devnull}"),
        (["generate", "--model", "nowhere"], "nowhere"),
        (["generate", "--model", "x", "--samples", "-1"], "samples must be at least 0, got -1"),
        (
            ["bench", "everything"],
            f"bench must be one of {', '.join(bench.BENCHES)}; got 'everything'",
        ),
        (["demo", "--seconds", "0"], "seconds must be above 0 and finite, got 0"),
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--width", "1000000"], "M parameters need at least "),
        (["--layers", "1000000000000"], "2.0 GB are free: take fewer --layers or a smaller --width"),
        (["--width", str(2**62)], "the model cannot be built: "),
        (["--width", str(2**70)], "the model cannot be built: "),
    ],
)
def test_a_model_that_finds_no_room_claims_no_folder(lintra_says, tmp_path, monkeypatch, flags, message):
    """If it began, it would fill the memory until the system kills it without a message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "available", lambda device: 2_000_000_000)
    code, out, err = lintra_says("train", "digits", *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not list(tmp_path.iterdir())


def test_training_needs_weights_gradients_and_a_moment(monkeypatch):
    """12 bytes for each weight."""
    monkeypatch.setattr(memory, "available", lambda device: 12_000)
    memory.check_training(1_000, torch.device("cpu"))
    with pytest.raises(UsageError, match="0 M parameters need at least"):
        memory.check_training(1_001, torch.device("cpu"))


def test_room_for_a_batch_is_looked_for_once(lintra_says, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(data_checks, "available", asked.append)  # which returns None: the memory is not known
    small = ["--layers", "1", "--heads", "2", "--width", "16", "--batch", "8", "--precision", "32"]
    code, _, _ = lintra_says("train", "digits", "--steps", "1", *small, "--dir", str(tmp_path / "run"))
    assert (code, len(asked)) == (0, 1)


def test_blocks_may_be_those_of_the_paper(lintra_says, tmp_path):
    options = ["--attention", "ssd", "--paper-block", "--steps", "1", "--layers", "1", "--precision", "32"]
    assert lintra_says("train", "digits", *options, "--dir", str(tmp_path / "run"))[0] == 0
    model = json.loads((tmp_path / "run" / "run.json").read_text())["model"]
    assert (model["norm"], model["norm_kind"], model["mlp_ratio"]) == ("pre", "rms", 0)
    options = ["--config", str(tmp_path / "run" / "run.json"), "--attention", "retention", *options[2:]]
    assert lintra_says("train", "digits", *options, "--dir", str(tmp_path / "other"))[0] == 0
    model = json.loads((tmp_path / "other" / "run.json").read_text())["model"]
    block = attention.mechanism("retention").paper_block  # not that of ssd, which the file names
    assert {name: model[name] for name in block} == block


def test_a_traceback_only_with_debug(lintra_says):
    assert "Traceback" not in lintra_says("train", "--resume", "nowhere")[2]
    code, _, err = lintra_says("train", "--resume", "nowhere", "--debug")
    assert code == 2
    assert "Traceback" in err


def test_without_the_extra_of_speech(monkeypatch, lintra_says, tmp_path):
    """For the code that reads audio and computes features, the message names the right extra."""
    monkeypatch.setitem(sys.modules, "soundfile", None)
    for i in range(10):
        (tmp_path / f"{i}.wav").write_bytes(b"RIFF")
    lines = (f'{{"audio": "{i}.wav", "text": "A"}}\n' for i in range(10))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    code, _, err = lintra_says("train", "speech", "--manifest", str(tmp_path / "a.jsonl"))
    assert code == 2
    needed = "this command needs soundfile, which is not installed: pip install 'lintra[speech]'"
    assert err == f"lintra: {needed}\n"


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
    """In a separate process: the core and the commands of a bare install import nothing of the extra."""
    program = (
        "import sys, lintra.cli; lintra.cli.main(['list']); lintra.cli.main(['info']);"
        "extra = {'tyro', 'rich', 'lightning', 'matplotlib', 'tensorboard', 'pooch', 'triton'};"
        "print(extra & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"


@contextlib.contextmanager
def _changed_meanwhile(run):
    """Lock a run that another process changes between its reading and the lock."""
    run.changed(lr=2e-3)
    with locked(run.folder):
        yield


def _refused_to_others(run, task, verbosity):
    """Show that another process gets no lock between the changes and the training."""
    assert run.train.steps == 5
    with pytest.raises(checkpoint.Error, match="by another process"), locked(run.folder):
        pass


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
    with train.Run.read("run").locked():  # as while another process trains it
        code, _, err = lintra_says("train", "--resume", "run", "--steps", "7")
    assert code == 2
    assert "is being trained by another process" in err
    assert train.Run.read("run").train.steps == 3
    with monkeypatch.context() as another:
        another.setattr(train.Run, "locked", _changed_meanwhile)
        another.setattr("lintra.train.loop.fit_locked", Mock(side_effect=_refused_to_others))
        assert lintra_says("train", "--resume", "run", "--steps", "5")[0] == 0
    assert (train.Run.read("run").train.steps, train.Run.read("run").train.lr) == (5, 2e-3)
    code, out, _ = lintra_says("train", "--resume", "run", "--steps", "4")
    assert code == 0
    assert "step 4/4" in out
    assert lintra_says("train", "--resume", "run", "--steps", "4")[0] == 0  # no more than it has
    assert lintra_says("train", "--resume", "run", "--steps", "10", "--lr", "7e-3")[0] == 0
    run = train.Run.read("run")
    assert run.train.lr == 7e-3
    assert train.curves(run.folder)["lr"][10] == pytest.approx(learning_rate(run.train, 9))
    for args, message in (
        (["--lr", "0"], "lr must be above 0"),
        (["--devices", "3"], "batch must be a multiple of devices=3, got"),
        (["--strategy", "fsdp"], "strategy='fsdp' needs devices > 1, got devices=1"),
    ):
        code, _, err = lintra_says("train", "--resume", "run", *args)
        assert code == 2
        assert message in err
    assert train.Run.read("run") == run
    with monkeypatch.context() as full:
        full.setattr("lintra.cli.train.check_room", Mock(side_effect=ValueError("no room")))
        assert lintra_says("train", "--resume", "run", "--steps", "99")[::2] == (2, "lintra: no room\n")
    assert train.Run.read("run") == run
    shared = run.changed(devices=2, strategy="ddp")  # trained by two processes so far
    assert lintra_says("train", "--resume", "run", "--steps", "11", "--devices", "1")[0] == 0
    alone = train.Run.read("run").train
    assert (alone.devices, alone.strategy, shared.train.strategy) == (1, "auto", "ddp")
    spread = train.Run.read("run").changed(nodes=2, devices=2, strategy="fsdp")
    code, _, err = lintra_says("train", "--resume", "run", "--devices", "1")
    assert code == 2  # nothing says where the other node is
    assert "nodes=2 needs MASTER_ADDR" in err
    assert train.Run.read("run").train == spread.train
    spread.changed(nodes=None, devices=1, strategy="auto")

    draw = ["generate", "--model", "run", "--samples", "2", "--complete", "2", "--out", "a/b.png"]
    code, out, err = lintra_says(*draw)
    assert code == 0
    assert "a second" in err
    assert "a second" not in out
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"b.png", "b-completions.png"}
    for bad, message in [
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-k", "0"], "top_k must be at least 1"),
        (["--complete", "999"], "complete must lie in 1 .. 150, the test images"),
        (["--fraction", "1.5"], "fraction must lie between 0 and 1"),
    ]:
        code, _, err = lintra_says(*draw, *bad)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_read_back_as_settings(lintra_says, tmp_path, monkeypatch):
    """A new run with the same settings; flags override those of the file."""
    monkeypatch.chdir(tmp_path)
    options = ["--attention", "retention", "--attention-options", "value_heads=2"]
    assert lintra_says("train", "digits", *TINY, *options, "--steps", "2", "--lr", "7e-3")[0] == 0
    first = train.Run.read("run")
    assert lintra_says("train", "digits", "--config", "run/run.json", "--dir", "same")[0] == 0
    same = train.Run.read("same")
    assert (same.task, same.model, same.train) == (first.task, first.model, first.train)
    flags = ["--config=run/run.json", "--steps", "1", "--layers", "2", "--attention", "linear"]
    assert lintra_says("train", "digits", *flags, "--dir", "other")[0] == 0
    other = train.Run.read("other")
    assert other.train == dataclasses.replace(first.train, steps=1)
    assert other.model == dataclasses.replace(
        first.model, layers=2, attention=attention.load("linear").Config()
    )
    out = lintra_says("train", "digits", "--help", "--config", "run/run.json")[1]
    assert "(retention)" in out
    assert "(0.007)" in out


@pytest.mark.usefixtures("one_thread")
def test_settings_in_yaml(lintra_says, tmp_path, monkeypatch):
    """Parts may be left out; the defaults of the task then apply."""
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    network = "name: decoder, attention: {name: retention}, vocabulary: 11, width: 8, layers: 1, heads: 1"
    Path("mine.yaml").write_text(
        "task:\n  length: 8\ntrain:\n  steps: 1\n  batch: 4\n  lr: 7e-4\n  precision: 32\n"
        f"model: {{{network}}}\n"
    )
    assert lintra_says("train", "copy", "--config", "mine.yaml", *TINY)[0] == 0
    run = train.Run.read("run")
    assert run.model.attention == retention.Config()  # not what files had before an option existed
    assert (run.task, run.train.steps, run.train.batch) == (copy.Config(length=8), 1, 4)
    assert run.train.lr == 7e-4  # PyYAML alone reads it as a string
    assert run.train.schedule == copy.Config(length=8).training_preset()["schedule"]


@pytest.mark.parametrize("content", ["train: {steps: 2024-13-45}", "[" * 3_000, "a: b: c"])
def test_damaged_yaml_is_named(lintra_says, tmp_path, content):
    pytest.importorskip("yaml")
    (tmp_path / "mine.yaml").write_text(content)
    code, _, err = lintra_says("train", "copy", "--config", str(tmp_path / "mine.yaml"))
    assert (code, err.count("\n")) == (2, 1)
    assert "mine.yaml is damaged" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[]", "a.json holds no settings: it is not an object"),
        ('{"training": {}}', "a.json has the unknown key 'training'; settings are in task, model, train"),
        ('{"train": {"pace": 1}}', "a.json: train has the unknown field 'pace'; the fields are steps"),
        ('{"task": {"pace": 1}}', "a.json: task has the unknown field 'pace'"),
        ('{"task": {"name": "copy"}}', "a.json: task must be one of digits, got 'copy'"),
        ('{"train": 3}', "a.json: train must be an object, got 3"),
        ('{"model": {"layers": 3}}', "a.json: model must be one of"),
        ('{"format": 9}', "a.json has format 9"),
    ],
)
def test_damaged_settings(lintra_says, tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(content)
    code, out, err = lintra_says("train", "digits", "--config", "a.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not Path("runs").exists()


@pytest.mark.usefixtures("one_thread")
def test_sequences_are_printed(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lintra_says("train", "copy", *TINY, "--length", "16", "--steps", "1", "--batch", "4")[0] == 0
    code, out, _ = lintra_says("generate", "--model", "run", "--samples", "2")
    assert code == 0
    rows = [line.split() for line in out.splitlines()[-2:]]
    assert [len(row) for row in rows] == [16, 16]


@pytest.mark.parametrize("command", ["list", "--help"])
def test_a_closed_pipe_ends_a_command_quietly(command):
    """With the code of SIGPIPE: `set -o pipefail` must not take what was cut off for a success."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "lintra.cli", command], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(os.name != "posix", reason="a shell closes them")
def test_closed_streams_are_no_error():
    program = f"{shlex.quote(sys.executable)} -m lintra.cli list <&- >&-"
    done = subprocess.run(program, shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def reviews(tmp_path):
    """A file of 40 texts that name their own labels."""
    lines = [f"{i % 2}\t{i}_7\t{('bad', 'good')[i % 2] * (i + 1)}\n" for i in range(40)]
    (tmp_path / "reviews.tsv").write_text("".join(lines))
    return tmp_path / "reviews.tsv"


FEW = ["--steps", "2", "--batch", "4", *TINY]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", attention.names())
def test_each_mechanism_trains_on_texts(lintra_says, tmp_path, monkeypatch, reviews, name):
    """Each that has a causal form also trains on digits; the others are refused in one line."""
    monkeypatch.chdir(tmp_path)
    texts = ["train", "text-classification", "--data", str(reviews), "--length", "32", "--attention", name]
    code, out, err = lintra_says(*texts, *FEW)
    assert (code, err) == (0, "")
    assert "% right" in out
    code, out, err = lintra_says("train", "digits", "--attention", name, *FEW[:-1], "digits")
    if attention.mechanism(name).can.causal:
        assert (code, err) == (0, "")
        assert lintra_says("train", "--resume", "digits", "--steps", "3")[0] == 0
    else:
        assert (code, out) == (2, "")
        assert re.match(rf"lintra: .*{name}.* has no causal form", err)
        assert err.count("\n") == 1
        assert not (tmp_path / "digits").exists()


def write_texts(file, labels, count=20):
    """This many lines of each label; the text repeats the label."""
    Path(file).write_text("".join(f"{label}\t{label * 8}\n" * count for label in labels))


@pytest.mark.usefixtures("one_thread")
def test_images_of_a_folder_are_learned_drawn_and_scored(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    for i in range(12):
        Image.new("RGB", (9 + i, 12), (20 * i, 0, 99)).save(f"own/{i:02}.png")
    own = ["train", "image-folder", "--data", "own", "--size", "6"]
    code, out, err = lintra_says(*own, *FEW)
    assert (code, err) == (0, "")
    assert lintra_says("train", "--resume", "run", "--steps", "3")[0] == 0
    code, out, err = lintra_says("evaluate", "--model", "run")
    assert (code, err) == (0, "")
    assert "all 2 validation samples" in out
    code, _, err = lintra_says("generate", "--model", "run", "--samples", "2")  # completes both held-out ones
    assert code == 0
    assert {"samples.png", "samples-completions.png"} <= {path.name for path in Path().iterdir()}
    code, out, err = lintra_says("generate", "--model", "run", "--samples", "1", "--complete")  # no files
    assert code == 0
    assert "completions" not in out
    for command in (
        ["generate", "--samples", "1", "--out", "own/new.png"],  # it would be learned from
        ["generate", "--samples", "1", "--out", "own/sub/03.png"],
        ["evaluate", "--pictures", "own"],
        ["evaluate", "--json", "own/03.png"],
    ):
        code, _, err = lintra_says(*command, "--model", "run")
        assert (code, err.count("\n")) == (2, 1)
        assert "would be among the data of run: write to another folder" in err
    Path("run").rename("own/run")  # its pictures are no data, though it lies among them
    assert lintra_says("generate", "--samples", "1", "--out", "own/run/new.png", "--model", "own/run")[0] == 0
    Path("own/run").rename("run")
    assert lintra_says("evaluate", "--model", "run", "--json", "own/score.json")[0] == 0
    Image.new("RGB", (9, 12)).save("own/a.png")  # which moves others between the parts
    code, _, err = lintra_says("evaluate", "--model", "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "run was begun with other data" in err
    Path("own/05.png").write_bytes(b"no image")
    code, _, err = lintra_says("evaluate", "--model", "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "05.png cannot be read as an image" in err


@pytest.mark.usefixtures("one_thread")
def test_a_class_keeps_its_number_whatever_is_read(lintra_says, tmp_path, monkeypatch):
    """Otherwise a correct model would be judged wrong, or trained further with its classes exchanged."""
    monkeypatch.chdir(tmp_path)
    write_texts("abc.tsv", "abc")
    write_texts("bc.tsv", "bc")
    quickly = ["--steps", "60", "--lr", "3e-2", "--warmup", "0", "--dropout", "0"]
    learn = ["train", "text-classification", "--data", "abc.tsv", "--length", "8", *quickly, *TINY]
    assert lintra_says(*learn)[0] == 0
    assert train.Run.read("run").task.classes == ("a", "b", "c")
    assert lintra_says(*learn[:-1], "tested", "--test", "abc.tsv")[0] == 0
    for run, data, count in (("run", "abc.tsv", 6), ("run", "bc.tsv", 40), ("tested", "bc.tsv", 40)):
        code, out, err = lintra_says("evaluate", "--model", run, "--data", data)
        assert (code, err) == (0, "")
        split = "validation" if data == "abc.tsv" else "test"  # held-out lines, or all of another file
        assert f"all {count} {split} samples" in out
        assert re.search(r"accuracy +1\.0000", out)
    write_texts("abc.tsv", "bc")
    code, _, err = lintra_says("train", "--resume", "run", "--steps", "61")
    assert (code, err.count("\n")) == (2, 1)
    assert "other data" in err
    code, _, err = lintra_says("evaluate", "--model", "run")  # other lines are held out now
    assert (code, err.count("\n")) == (2, 1)
    assert "run was begun with other data" in err
    write_texts("abc.tsv", "abcd")
    for args in (["evaluate", "--model", "run"], ["train", "--resume", "run", "--steps", "62"]):
        code, _, err = lintra_says(*args)
        assert (code, err.count("\n")) == (2, 1)
        assert "abc.tsv has the label 'd', which is none of the 3 to learn" in err


@pytest.mark.usefixtures("one_thread")
def test_a_run_of_before_classes_were_kept(lintra_says, tmp_path, monkeypatch, reviews):
    monkeypatch.chdir(tmp_path)
    assert lintra_says("train", "text-classification", "--data", "reviews.tsv", *FEW)[0] == 0
    content = json.loads(Path("run/run.json").read_text())
    del content["task"]["classes"]
    Path("run/run.json").write_text(json.dumps(content))
    assert lintra_says("evaluate", "--model", "run")[0] == 0
    reviews.write_text(reviews.read_text() + "2\ta third\n")
    code, _, err = lintra_says("evaluate", "--model", "run")
    assert code == 2
    assert "the data have 3 classes, and the model was made for 2" in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("one_thread")
def test_value_heads_are_an_option_of_a_mechanism(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn = ["train", "copy", "--length", "8", "--attention", "delta", "--attention-options"]
    assert lintra_says(*learn, "value_heads=4", *FEW)[0] == 0
    found = train.Run.read("run").model
    assert found.attention == attention.load("delta").Config(value_heads=4)
    code, out, err = lintra_says(*learn, "value_heads=3", *FEW)
    assert (code, out) == (2, "")
    assert err == "lintra: value_heads must be a multiple of the key heads, got 3 and g=2\n"


@pytest.mark.usefixtures("one_thread")
def test_layers_of_several_mechanisms(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn = ["train", "copy", "--length", "8", "--attention", "gated,gated,linear", "--attention-options"]
    few = [*FEW]
    few[few.index("--layers") + 1] = "3"  # the model has 4
    code, _, err = lintra_says(*learn, "linear.eps=0.5", "chunk=4", *few)
    assert (code, err) == (0, "")
    gated, linear = (attention.load(name).Config for name in ("gated", "linear"))
    expected = (gated(chunk=4), gated(chunk=4), linear(chunk=4, eps=0.5))
    assert train.Run.read("run").model.attention == expected
    assert lintra_says("train", "--resume", "run", "--steps", "3")[0] == 0
    model = checkpoint.load(tmp_path / "run")
    assert model.config.attention == expected
    assert [block.attn.attention.config for block in model.blocks] == [*expected]
    code, out, err = lintra_says("generate", "--model", "run", "--samples", "2")
    assert (code, out.count("\n")) == (0, 2)
    assert "2 x 8 tokens" in err


@pytest.mark.usefixtures("one_thread")
def test_heads_of_another_size_and_one_table(lintra_says, tmp_path, monkeypatch, reviews):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a few words, and then the same again. " * 40)
    learn = ["train", "text", "--data", "words.txt", "--length", "24", *FEW]
    code, _, err = lintra_says(*learn, "--head-dim", "5", "--tie-embeddings")
    assert (code, err) == (0, "")
    model = checkpoint.load("run")
    assert (model.config.dim, model.config.tie_embeddings) == (5, True)
    assert "head.weight" not in model.state_dict()
    assert lintra_says("train", "--resume", "run", "--steps", "3")[0] == 0
    again = ["train", "text", "--config", "run/run.json", "--dir", "again", "--steps", "1"]
    assert lintra_says(*again)[0] == 0
    assert train.Run.read("again").model == model.config
    code, _, err = lintra_says("train", "text-classification", "--data", str(reviews), "--tie-embeddings")
    assert (code, err) == (
        2,
        "lintra: this model has no tie_embeddings: leave --tie-embeddings out\n",
    )


@pytest.mark.usefixtures("one_thread")
def test_layers_that_alternate(lintra_says, tmp_path, monkeypatch, reviews):
    """An encoder of a causal-only mechanism reads both sides; a decoder has no such layers."""
    monkeypatch.chdir(tmp_path)
    learn = ["train", "text-classification", "--data", str(reviews), "--length", "12", *FEW]
    code, _, err = lintra_says(*learn, "--alternating", "--attention", "gated", "--layers", "2")
    assert (code, err) == (0, "")
    assert checkpoint.load("run").config.alternating
    assert lintra_says("train", "--resume", "run", "--steps", "3")[0] == 0
    code, _, err = lintra_says(*learn, "--alternating", "--layers", "1")
    assert code == 2
    assert "alternating layers read in both directions: they can be neither" in err
    (tmp_path / "words.txt").write_text("a few words, and then the same again. " * 40)
    code, _, err = lintra_says("train", "text", "--data", "words.txt", "--length", "24", "--alternating")
    assert code == 2
    assert "this model has no alternating: leave --alternating out" in err


@pytest.mark.usefixtures("one_thread")
def test_text_is_written(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a few words, and then the same again. " * 40)
    learn = ["train", "text", "--data", "words.txt", "--length", "24", "--attention", "softmax"]
    code, out, err = lintra_says(*learn, "--attention-options", "window=8", "scale=None", *FEW)
    assert (code, err) == (0, "")
    assert "bits/byte" in out
    found = train.Run.read("run").model
    assert found.attention == attention.load("softmax").Config(window=8)
    code, out, err = lintra_says("generate", "--model", "run", "--samples", "2", "--prompt", "a few")
    assert (code, err.count("\n")) == (0, 1)  # the speed
    assert len(re.findall("^a few", out, re.MULTILINE)) == 2
    code, _, err = lintra_says("generate", "--model", "run", "--prompt", "caf\udce9")
    assert (code, err) == (2, "lintra: prompt is not in UTF-8\n")
    code, _, err = lintra_says("generate", "--model", "run", "--prompt", "x" * 24)
    assert (code, err) == (
        2,
        "lintra: length must be more than the 24 bytes of the prompt, got 24: say --length N\n",
    )
    code, _, err = lintra_says(
        "generate", "--model", "run", "--samples", "1", "--prompt", "x" * 24, "--length", "30"
    )
    assert code == 0
    assert "1 x 6 tokens" in err


@pytest.mark.usefixtures("one_thread")
def test_a_text_ends_where_it_says(lintra_says, tmp_path, monkeypatch):
    """For a model that writes only a and b, in batches of different lengths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a few words, and then the same again. " * 40)
    assert lintra_says("train", "text", "--data", "words.txt", "--length", "24", *FEW)[0] == 0
    model = checkpoint.load("run")
    with torch.no_grad():
        model.head.bias[list(b"ab")] += 50
    checkpoint.save(model, "ab")
    shutil.copy("run/run.json", "ab/run.json")
    write = ["generate", "--model", "ab", "--prompt", "few ", "--samples", "5", "--batch", "2", "--seed", "1"]
    for engine in ("pytorch", "runtime")[: 1 + (runtime.why_not() is None)]:
        for stop in (["bb", "ba"], ["aab"]):
            code, out, err = lintra_says(*write, "--engine", engine, "--stop", *stop)
            assert code == 0
            assert "5 x up to 20 tokens" in err
            texts = [line.removeprefix("few ") for line in out.splitlines() if line.startswith("few ")]
            assert len(texts) == 5
            assert len(set(map(len, texts))) > 1
            for text in texts:
                places = [text.find(each) + len(each) for each in stop if each in text]
                assert len(text) == min(places, default=20)
    code, out, err = lintra_says("generate", "--model", "ab", "--stop", "")
    assert code == 2
    assert "stop must be texts of at least one character, got ''" in err
    code, out, err = lintra_says("generate", "--stop", "x")
    assert (code, out) == (2, "")
    assert "stop is for tasks on text, mnist-small is of the task images" in err


@pytest.mark.usefixtures("one_thread")
def test_a_run_whose_text_has_moved(lintra_says, tmp_path, monkeypatch):
    """No flag of --resume says where the text is now: the message says what to do instead."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "words.txt"
    text.write_text("a few words, and then the same again. " * 40)
    assert lintra_says("train", "text", "--data", "words.txt", "--length", "24", *FEW)[0] == 0
    run = tmp_path / "run" / "run.json"
    before = run.read_text()
    text.write_text("other words, of which there are as many. " * 40)
    code, out, err = lintra_says("train", "--resume", "run", "--steps", "3", "--lr", "0.5")
    assert (code, out) == (2, "")
    assert "was begun with other data" in err
    text.rename(tmp_path / "elsewhere.txt")
    code, out, err = lintra_says("train", "--resume", "run", "--steps", "3")
    assert (code, out) == (2, "")
    assert run.read_text() == before, "a command that is refused changes nothing"
    file = Path("run/run.json")
    assert err == f"lintra: data {text} does not exist: put it back, or say in {file} where it is now\n"
    (tmp_path / "elsewhere.txt").write_text("a few words, and then the same again. " * 40)
    run.write_text(before.replace("words.txt", "elsewhere.txt"))
    assert lintra_says("train", "--resume", "run", "--steps", "3")[0] == 0


@pytest.mark.usefixtures("one_thread")
def test_what_draws_nothing_is_not_asked_to(lintra_says, tmp_path, monkeypatch, reviews):
    monkeypatch.chdir(tmp_path)
    assert lintra_says("train", "text_classification", "--data", str(reviews), *FEW)[0] == 0
    code, _, err = lintra_says("generate", "--model", "run")
    assert (code, err) == (
        2,
        "lintra: run is a model of the task text_classification, and generate needs a decoder\n",
    )
    assert lintra_says("train", "digits", *FEW[:-1], "digits")[0] == 0
    code, _, err = lintra_says("generate", "--model", "digits", "--prompt", "x")
    assert (code, err) == (2, "lintra: prompt is for tasks on text, digits is of the task digits\n")
    code, _, err = lintra_says("generate", "--model", "digits", "--length", "9")
    assert (code, err) == (2, "lintra: length is for tasks on text, digits is of the task digits\n")


def test_options_of_a_mechanism():
    linear = attention.load("linear")
    for options, expected in (
        ([], linear.Config()),
        (
            ["eps=1e-3", "normalize=false", "impl=torch"],
            linear.Config(eps=1e-3, normalize=False, impl="torch"),
        ),
        (["feature_map=Relu", "normalize=True"], linear.Config(feature_map=linear.Relu())),
        (['feature_map={"name": "Dpfp", "nu": 2}'], linear.Config(feature_map=linear.Dpfp(nu=2))),
    ):
        assert mechanism("linear", options, 64) == expected
    assert mechanism("linformer", [], 64).max_length == 64
    assert mechanism("linformer", ["max_length=99"], 64).max_length == 99

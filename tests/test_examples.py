"""The examples run, and end with a picture or a trained model; all Python examples are tested here."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image

from lintra import checkpoint, generation

EXAMPLES = Path(__file__).parents[1] / "examples"
PICTURES = ("complete_digits", "nanogpt_swap", "stream_speech")
TRAINED = ("classify_digits", "train_hybrid", "train_text")
ELSEWHERE = {
    "draw_onnx",  # tests/export/test_onnx_description.py
    "faster_qwen",  # tests/compat/test_acceleration.py
    "long_sequence",  # tests/distributed/test_context.py
}


def ended(name: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run an example in a folder, as a program."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def said(name: str, folder: Path, *options: str) -> str:
    """Run an example in a folder, as a program; return its output."""
    done = ended(name, folder, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(name: str, folder: Path, *options: str) -> str:
    """Run an example, check that it leaves a picture, and return its output."""
    lines = said(name, folder, "--out", "picture.png", *options)
    assert [x.name for x in folder.iterdir()] == ["picture.png"]
    with Image.open(folder / "picture.png") as picture:
        assert min(picture.size) > 100
        assert len(picture.convert("L").getcolors()) > 2, "nothing is drawn"
    return lines


@pytest.mark.parametrize("name", PICTURES)
def test_an_example_ends_in_a_picture(name, tmp_path):
    run(name, tmp_path, "--quick")


def test_spoken_digits_are_written_while_they_are_said(tmp_path):
    """Each word comes before the next recording begins, not at the end."""
    lines = [line.split() for line in run("stream_speech", tmp_path).splitlines()]
    assert [word for *_, word in lines] == ["zero", "three", "seven"]
    seconds = [float(line[0]) for line in lines]
    assert seconds[0] < 1
    assert min(after - before for before, after in pairwise(seconds)) > 0.3


def test_a_text_is_learned_and_continued(tmp_path):
    """A user's text with few different bytes, better than chance; the saved model wrote the text."""
    (tmp_path / "own.txt").write_text("abcdefgh" * 200)
    lines = said("train_text", tmp_path, "--quick", "--text", "own.txt", "--prompt", "abc").splitlines()
    assert float(re.search(r"held out ([\d.]+) bits", lines[0])[1]) < 7
    assert lines[1].startswith("abc")
    model = checkpoint.load(tmp_path / "text-model")
    written = generation.generate(model, torch.tensor([list(b"abc")]), steps=20, temperature=0.8, seed=0)
    assert "\n".join(lines[1:]) == (b"abc" + bytes(written[0].tolist())).decode(errors="replace").strip("\n")


@pytest.mark.parametrize("mechanism", ["linear", "nystromformer"])
def test_digits_are_classified_better_than_by_chance(tmp_path, mechanism):
    last = said("classify_digits", tmp_path, "--quick", "--attention", mechanism).splitlines()[-1]
    assert float(last.split()[0]) > 20, last


def test_digits_are_not_classified_by_a_causal_mechanism(tmp_path):
    done = ended("classify_digits", tmp_path, "--attention", "gated")
    assert done.returncode == 2
    assert "--attention must be one of aft, bigbird," in done.stderr


@pytest.mark.slow
def test_a_hybrid_is_trained_and_its_window_keeps_the_state_small(tmp_path):
    """The same command again reports a finished run."""
    first, again = (said("train_hybrid", tmp_path, "--quick", "--dir", "own").splitlines() for _ in range(2))
    assert again[-5:] == first[-5:]
    before, after = (float(re.search(rf"([\d.]+) {x}", first[-5])[1]) for x in ("bits", "in the end"))
    assert after < before
    layers = [
        re.fullmatch(r"(\w+): ([\d,]+) bytes after 100 tokens, ([\d,]+) after 1,000", x) for x in first[-4:]
    ]
    names, few, many = zip(*(layer.groups() for layer in layers), strict=True)
    assert names == ("gated", "gated", "gated", "softmax")
    assert few[:3] == many[:3]
    (tmp_path / "other.txt").write_text("abcdefgh" * 200)
    for options in (("--quick", "--text", "other.txt"), ()):
        done = ended("train_hybrid", tmp_path, "--dir", "own", *options)
        assert done.returncode == 1
        assert "own holds another run than this one: choose another --dir" in done.stderr


def test_every_example_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*PICTURES, *TRAINED, *ELSEWHERE}

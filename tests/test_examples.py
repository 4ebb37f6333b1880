"""The examples run and end in a picture; all of them that are Python are here."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
PICTURES = ("complete_digits", "nanogpt_swap", "stream_speech")
ELSEWHERE = {
    "draw_onnx",  # tests/export/test_onnx.py
    "faster_qwen",  # tests/compat/test_acceleration.py
    "long_sequence",  # tests/distributed/test_context.py
}


def run(name: str, folder: Path, *options: str) -> str:
    """Run an example in a folder, as a program; return what it says and check that it leaves a picture."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--out", "picture.png", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [x.name for x in folder.iterdir()] == ["picture.png"]
    with Image.open(folder / "picture.png") as picture:
        assert min(picture.size) > 100
        assert len(picture.convert("L").getcolors()) > 2, "nothing is drawn"
    return done.stdout


@pytest.mark.parametrize("name", PICTURES)
def test_an_example_ends_in_a_picture(name, tmp_path):
    run(name, tmp_path, "--quick")


def test_spoken_digits_are_written_while_they_are_said(tmp_path):
    """Each word before the next recording begins, not at the end."""
    lines = [line.split() for line in run("stream_speech", tmp_path).splitlines()]
    assert [word for *_, word in lines] == ["zero", "three", "seven"]
    seconds = [float(line[0]) for line in lines]
    assert seconds[0] < 1
    assert min(after - before for before, after in pairwise(seconds)) > 0.3


def test_every_example_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*PICTURES, *ELSEWHERE}

"""Completion of commands and flags, as the shell performs it."""

import shutil
import subprocess

import pytest

from lintra import tasks
from lintra.cli import COMMANDS
from lintra.cli.completion import words


@pytest.fixture(scope="module")
def found():
    return words()


def test_what_there_is_to_complete(found):
    assert set(COMMANDS) <= set(found)
    assert {name.replace("_", "-") for name in tasks.names()} <= set(found["train"])
    assert {"--resume", "--help"} <= set(found["train"])
    assert {"--steps", "--attention", "--max-minutes"} <= set(found["train digits"])
    assert "--manifest" in found["train speech"]
    assert "--manifest" not in found["train digits"]
    assert "--temperature" in found["generate"]
    assert {"--json", "--families"} <= set(found["list"])
    assert "--quick" in found["bench scaling"]
    assert "--vocabulary" in found["prepare tokenizer"]
    assert {"--tokenizer", "--tie-embeddings", "--head-dim"} <= set(found["train text"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes(lintra_says, tmp_path):
    file = tmp_path / "completion.sh"
    code, out, err = lintra_says("completion", "bash")
    assert (code, err) == (0, "")
    file.write_text(out)

    def completed(*line: str) -> list[str]:
        program = f'source {file}; shift 0; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _lintra; '
        done = subprocess.run(
            ["bash", "-c", program + "printf '%s\\n' \"${COMPREPLY[@]}\"", "bash", *line],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.split()

    assert completed("lintra", "tra") == ["train", "transcribe"]
    assert completed("lintra", "train", "dig") == ["digits"]
    assert completed("lintra", "train", "digits", "--steps", "9", "--max-m") == ["--max-minutes"]
    assert completed("lintra", "train", "--resume", "x", "--max") == ["--max-minutes"]
    assert completed("lintra", "train", "text", "--classes") == []
    assert completed("lintra", "generate", "--temp") == ["--temperature"]
    assert completed("lintra", "completion", "z") == ["zsh"]
    assert completed("lintra", "nothing", "--") == []
    assert completed("lintra", "train", "text", "--data", "") == []  # bash then completes files
    assert completed("lintra", "train", "text", "--data", "--st") != []


def test_other_shells_are_refused(lintra_says):
    code, out, err = lintra_says("completion", "fish")
    assert (code, out, err) == (2, "", "lintra: completion is for bash or zsh, got 'fish'\n")

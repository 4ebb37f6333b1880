"""benchmarks/gpu.sh, with a Python that pretends to have GPUs and only notes what it is asked to run."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
PYTHON = """#!/bin/bash
case "$*" in
    *device_count*) echo 2 ;;
    *get_device_name*) echo a-gpu ;;
    -c*) ;;
    -m*)
        echo "$TRITON_CACHE_DIR python $*" >>"$LOG"
        for word in "$@"; do [ "$word" != "$FAILING" ] || exit 1; done ;;
esac
"""
TIMEOUT = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
echo "seconds $1" >>"$LOG"
shift
exec "$@"
"""
PARTS = ("tests", "ranks", "measure", "recurrence")


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def run(tmp_path):
    """Run the script with these arguments -> its end, its commands, and the seconds that they may take."""
    executable(tmp_path / "timeout", TIMEOUT)
    variables = {
        "PYTHON": str(executable(tmp_path / "python", PYTHON)),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "OUT": str(tmp_path / "out"),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "LOG": str(tmp_path / "log"),
        "TMPDIR": str(tmp_path),
    }

    def call(*parts, failing="nothing"):
        log = tmp_path / "log"
        log.write_text("")
        environment = os.environ | variables | {"FAILING": failing}
        done = subprocess.run(["bash", SCRIPT, *parts], env=environment, capture_output=True, text=True)
        lines = re.sub(r"/tmp\.\w+/", "/", log.read_text()).splitlines()  # the names of mktemp
        commands = [line for line in lines if not line.startswith("seconds ")]
        assert all(line.startswith(f"{tmp_path}/cache python ") for line in commands)
        return done, commands, [int(line.split()[1]) for line in lines if line.startswith("seconds ")]

    return call


@pytest.mark.parametrize("part", PARTS)
def test_a_part_fits_into_eight_minutes(run, part):
    """The second of the tests' commands has what the first leaves of its time, which here is all of it."""
    done, commands, seconds = run(part)
    assert done.returncode == 0, done.stderr
    assert len(commands) == len(seconds) == {"tests": 2, "ranks": 2}.get(part, 1)
    assert (max(seconds) if part == "tests" else sum(seconds)) <= 460


def test_all_parts_run_in_order_even_where_one_fails(run):
    _, every, _ = run()
    assert every == [command for part in PARTS for command in run(part)[1]]
    done, commands, _ = run(failing="pytest")
    assert commands == every
    assert done.returncode == 1
    assert "failed, or out of time: tests (quick); tests (slow); ranks (above)" in done.stderr
    done, commands, _ = run("recurrence", failing="gpu_recurrence")
    assert done.returncode == 1
    assert "failed, or out of time: python -m benchmarks gpu_recurrence (above)" in done.stderr


def test_warnings_of_other_versions_fail_no_test(run):
    for command in run("tests")[1] + run("ranks")[1][:1]:
        assert "-m pytest -vv" in command
        assert "-W default" in command


def test_the_tests_that_it_names_exist(run):
    for command in run("tests")[1]:
        for path, _, name in re.findall(r"(tests/\S+\.py)(::(\w+))?", command):
            assert (f"def {name}(" if name else "def test_") in (ROOT / path).read_text()


def test_an_unknown_part_is_refused_at_once(run):
    done, commands, _ = run("tests", "measures")
    assert (done.returncode, commands) == (1, [])
    assert "a part must be tests, ranks, measure or recurrence; got 'measures'" in done.stderr

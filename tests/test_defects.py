"""Each of 25 known defects has a test with its number in the name that fails once the defect is put in."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lintra import native
from tests.defects import DEFECTS, Defect

ROOT = Path(__file__).parents[1]
HERE = [each for each in DEFECTS if native.available() or not each.file.startswith("lintra/native")]
# Without site, whose startup files would make an editable install point back to ROOT.
PYTEST = [sys.executable, "-S", "-m", "pytest", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider"]


def name(defect: Defect) -> str:
    return f"{defect.number:02} {defect.what}"


def copy(folder: Path) -> None:
    """Copy the package and its tests, and nothing else."""
    for part in ("lintra", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def run(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest in a copy that precedes everything else that this process can import."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*PYTEST, *tests], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_table_has_all_numbers():
    assert {defect.number for defect in DEFECTS} == set(range(1, 26))


def test_every_test_of_a_defect_has_a_number():
    for file in (ROOT / "tests").rglob("test_*.py"):
        for rest in re.findall(r"^def test_defect_(\w*)", file.read_text(), re.MULTILINE):
            assert re.match(r"(0[1-9]|1\d|2[0-5])_", rest), f"{file}: test_defect_{rest}"


@pytest.mark.parametrize("defect", DEFECTS, ids=name)
def test_the_table_is_of_this_code(defect):
    assert (ROOT / defect.file).read_text().count(defect.right) == 1
    assert defect.tests
    for test in defect.tests:
        file, function = test.partition("[")[0].split("::")
        assert function.startswith(f"test_defect_{defect.number:02}_")
        assert f"\ndef {function}(" in (ROOT / file).read_text()


@pytest.mark.slow
def test_without_a_defect_all_pass(tmp_path):
    copy(tmp_path)
    done = run(tmp_path, sorted({test for defect in HERE for test in defect.tests}))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("defect", HERE, ids=name)
def test_a_defect_is_noticed(defect, tmp_path):
    copy(tmp_path)
    file = tmp_path / defect.file
    file.write_text(file.read_text().replace(defect.right, defect.wrong))
    done = run(tmp_path, defect.tests)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    for test in defect.tests:
        assert any(each == test or each.startswith(f"{test}[") for each in failed), done.stdout

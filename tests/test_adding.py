"""The page on adding a mechanism: its two files are enough."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tests.attention
from lintra import attention
from lintra.cli import main
from lintra.testing import laws
from lintra.testing.laws import Case

PAGE = Path(__file__).parents[1] / "docs" / "adding.md"


@pytest.fixture
def average(tmp_path, monkeypatch):
    """The two files of the page, in folders next to the real ones for the duration of a test."""
    files = re.findall(r"^`(\S+\.py)`:\n\n```python\n(.*?)```", PAGE.read_text(), re.M | re.S)
    assert [name for name, _ in files] == ["lintra/attention/average.py", "tests/attention/test_average.py"]
    for package, (name, code) in zip((attention, tests.attention), files, strict=True):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(code)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(file.parent)])
    yield import_module("tests.attention.test_average")
    for name in ("lintra.attention.average", "tests.attention.test_average"):
        del sys.modules[name]
    del attention.average, tests.attention.test_average


def test_the_folder_finds_it(average, capsys):
    assert "average" in attention.names()
    assert main(["list"]) == 0
    assert "Zhang et al. 2018" in capsys.readouterr().out


def test_it_obeys_every_law(average):
    (config,) = average.VARIANTS
    case = Case("average", config, causal=True)
    applied = [law for law in laws.LAWS if laws.APPLIES.get(law, laws.always)(case)]
    assert len(applied) > 15
    for law in applied:
        law(case)
    for law in laws.WITH_DEFINITION:
        law(case, average.dense)


def test_its_own_tests_pass(average):
    own = [test for name, test in vars(average).items() if name.startswith("test_")]
    assert len(own) == 2
    for test in own:
        test()


def test_a_model_trains_with_it(average, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = [
        "--steps",
        "2",
        "--batch",
        "2",
        "--precision",
        "32",
        "--layers",
        "1",
        "--width",
        "16",
        "--heads",
        "2",
    ]
    assert main(["train", "digits", "--attention", "average", "--dir", "run", *small]) == 0
    assert main(["generate", "--model", "run", "--out", "image.png"]) == 0

"""The comparison with an older checkout, for which the current one serves here. No time is judged."""

import sys

import pytest

from benchmarks import checkout, regression
from lintra import attention


def test_a_checkout_needs_its_own_python(tmp_path):
    with pytest.raises(ValueError, match="against must be a checkout"):
        checkout.Options(against=str(tmp_path))


def test_an_older_checkout_has_to_be_named():
    with pytest.raises(ValueError, match="against must name a checkout"):
        regression.run(regression.QUICK, lambda done: None)


def test_a_program_that_ends_is_reported(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("def server(n):\n    return {'one': n + 1}.__getitem__\n")
    with checkout.serving(checkout.ROOT, sys.executable, program, 6) as ask:
        assert ask("one") == 7
        with pytest.raises(RuntimeError, match="failed"):
            ask("another")


@pytest.mark.slow
def test_every_mechanism_is_compared(monkeypatch):
    here = checkout.ROOT, sys.executable
    monkeypatch.setattr(regression, "checkouts", lambda against: {"": here, checkout.OLD: here})
    rows, _ = regression.run(regression.Sizes(against=".", tokens=64, rounds=2, seconds=0), lambda done: None)
    compared = {row.what for row in rows if row.unit == "x"}
    assert all(any(what.startswith(f"{name}, ") for what in compared) for name in attention.names())
    assert all(row.figure > 0 for row in rows)

"""The benchmarks run, count right and write down where their figures come from. No time is judged here."""

import functools
import itertools
import json
import statistics
import subprocess
import time
from pathlib import Path

import pytest

import lintra
from lintra.attention import delta, linear
from lintra.bench import attention, mechanisms, next_token, reports, scaling, training_step
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.cli import bench, main


def test_every_contestant_runs_once_a_round_in_changing_order():
    order = []
    contestants = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = interleaved(contestants, rounds=6, at_least=0)
    turns = order[6::2]  # after two calls of each, every turn has one untimed and one timed call
    assert turns == order[7::2]
    rounds = [tuple(turns[3 * i : 3 * i + 3]) for i in range(6)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1
    assert all(len(timing.seconds) == 6 and timing.calls == 1 for timing in timings.values())


def test_short_contestants_are_called_often(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) / 16_384)
    timing = interleaved({"nothing": lambda: None}, rounds=2, at_least=0.001)["nothing"]
    assert timing.calls == 16


def test_long_contestants_are_not_called_untimed():
    order = []
    timings = interleaved({"long": lambda: order.append("long")}, rounds=3, at_least=1.0, settle=0.0)
    assert len(order) == 1 + 3
    assert timings["long"].calls == 1


def test_median_and_quartiles():
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0), calls=1)
    assert timing.median == 3
    assert timing.as_json()["quartiles"] == [2, 4]


def test_targets():
    rows = [Row("a", 2, "x", at_least=2), Row("b", 2, "x", at_most=1), Row("c", 1234.5, "GFLOP/s")]
    rows += [Row("d", figure, "x", at_least=1, at_most=2) for figure in (0.9, 1.5, 2.1)]
    assert [row.met for row in rows] == [True, False, None, False, True, False]
    table = reports.table(rows).splitlines()
    assert table[0].endswith(">= 2 x         met")
    assert table[1].endswith("<= 1 x         MISSED")
    assert table[4].endswith("1 to 2 x       met")


def begin(monkeypatch):
    """Forget at which commit this program began, as another one does."""
    monkeypatch.setattr(reports, "_first_commit", functools.cache(reports._commit))


def test_a_checkout_around_an_installed_lintra_is_not_its_own(tmp_path, monkeypatch):
    package = tmp_path / ".venv" / "lintra" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.setattr(lintra, "__file__", str(package))

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "one")
    begin(monkeypatch)
    assert reports.commit() is None
    git("add", "-f", ".")
    git("commit", "-m", "two")
    begin(monkeypatch)
    told = reports.commit()
    assert told is not None
    assert len(told) == 40
    for name in ("experiments/a/run.py", "benchmarks/a.py", "CMakeLists.txt", ".venv/lintra/new.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        assert reports.commit() == told + "+", name
        file.unlink()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "a.json").touch()
    (tmp_path / "experiments" / "a" / "outcome.json").touch()
    assert reports.commit() == told
    package.write_text("# changed")
    assert reports.commit() == told + "+"
    git("add", "-f", ".")
    git("commit", "-m", "three")  # of code that this program has not loaded
    assert reports.commit() == told + "+"
    begin(monkeypatch)
    assert reports.commit() not in (told, told + "+")


def test_a_report_says_where_it_comes_from(tmp_path):
    timing = Timing((1.0, 2.0, 3.0), calls=7)
    reports.write(tmp_path / "deep" / "a.json", [Row("a", 2, "x", at_least=2)], {"a": timing}, sizes={"n": 1})
    report = json.loads((tmp_path / "deep" / "a.json").read_text())
    assert report["rows"][0]["met"] is True
    assert report["timings_in_seconds"]["a"] == {
        "median": 2,
        "quartiles": [1.5, 2.5],
        "calls": 7,
        "seconds": [1, 2, 3],
    }
    assert report["machine"]["cores"] >= 1
    assert {"lintra", "torch", "python"} <= report["versions"].keys()
    assert report["command"].startswith("lintra")
    assert report["sizes"] == {"n": 1}


def test_a_change_by_hand_is_seen(tmp_path):
    """A changed figure is seen, and an added or removed field; the layout of the JSON does not count."""
    reports.write(tmp_path / "a.json", [Row("a", 0.1 + 0.2, "x")], {}, scores={3: (1e-300, "é")})
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["checksum"] == reports.checksum(report)
    assert reports.checksum(dict(reversed(report.items()))) == report["checksum"]
    report["rows"][0]["figure"] = 0.3  # another float64 than 0.1 + 0.2
    assert reports.checksum(report) != report["checksum"]
    report["rows"][0]["figure"] = 0.1 + 0.2
    assert reports.checksum(report | {"redraw_every": None}) != report["checksum"]
    assert (
        reports.checksum({name: x for name, x in report.items() if name != "command"}) != report["checksum"]
    )


def test_what_is_no_number_is_not_written(tmp_path):
    """JSON has no such numbers: readers other than that of Python stop at them."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        reports.write(tmp_path / "a.json", [Row("a", float("nan"), "x")], {})
    assert not list(tmp_path.iterdir())


def test_operations_of_a_training_step():
    sizes = training_step.Sizes(layers=1, width=32, batch=2, tokens=10)
    for mechanism in (linear.Config(), delta.Config()):
        config = training_step.model(mechanism, sizes)
        parameters = sum(p.numel() for p in config.build().parameters())
        assert training_step.operations(config, sizes) == 6 * parameters * 20


def test_lines_over_positions():
    sizes = next_token.QUICK
    ways = (next_token.RNN, next_token.CACHED, next_token.RECOMPUTED)
    timings = {f"{way} at {p}": Timing((p / 1e3,), 1) for way in ways for p in sizes.positions}
    expected = pytest.approx([float(p) for p in sizes.positions])
    assert next_token.milliseconds(timings, sizes) == dict.fromkeys(ways, expected)


def test_the_clock_waits_for_what_was_begun():
    events = []
    call, wait = (lambda: events.append("call")), (lambda: events.append("wait"))
    interleaved({"a": call}, rounds=2, at_least=0, finish=wait)
    timed = ["wait", "call", "wait"]
    assert events == timed * 2 + ["call", *timed] * 2  # to estimate; then each turn once untimed, once timed


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "what", ["mechanisms", *(pytest.param(x, marks=pytest.mark.slow) for x in ("attention", "scaling"))]
)
def test_the_command_writes_what_it_prints(what, tmp_path, capsys):
    path = tmp_path / "result.json"
    assert main(["bench", *what.split(), "--quick", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert str(path) in printed
    assert all(row["what"] in printed and row["figure"] == row["figure"] for row in report["rows"])
    for timing in report["timings_in_seconds"].values():
        assert timing["median"] == statistics.median(timing["seconds"])


def test_what_is_elsewhere_is_said(capsys):
    for name in bench.ELSEWHERE:
        assert main(["bench", name, "--quick"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert f"python -m benchmarks {name}, in a checkout of the repository" in err


@pytest.mark.parametrize("module", [attention, mechanisms, scaling])
def test_what_a_benchmark_measures_is_there(module):
    assert all((Path(lintra.__file__).parents[1] / path).exists() for path in module.MEASURES)

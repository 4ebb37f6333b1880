"""The benchmarks run, count right and write down where their figures come from. No time is judged here."""

import json
import statistics

import pytest

from lintra.bench import _report, attention, decode, roofline, train
from lintra.bench._report import Row
from lintra.bench._timing import Timing, interleaved
from lintra.cli import main


def test_every_contestant_runs_once_a_round_in_changing_order():
    order = []
    contestants = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = interleaved(contestants, rounds=6, at_least=0)
    turns = order[6::2]  # after two calls each, every turn is one call untimed and one timed
    assert turns == order[7::2]
    rounds = [tuple(turns[3 * i : 3 * i + 3]) for i in range(6)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1
    assert all(len(timing.seconds) == 6 and timing.calls == 1 for timing in timings.values())


def test_short_contestants_are_called_often():
    timing = interleaved({"nothing": lambda: None}, rounds=2, at_least=0.001)["nothing"]
    assert timing.calls > 10


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
    table = _report.table(rows).splitlines()
    assert table[0].endswith(">= 2 x         met")
    assert table[1].endswith("<= 1 x         MISSED")
    assert table[4].endswith("1 to 2 x       met")


def test_a_report_says_where_it_comes_from(tmp_path):
    timing = Timing((1.0, 2.0, 3.0), calls=7)
    _report.write(tmp_path / "deep" / "a.json", [Row("a", 2, "x", at_least=2)], {"a": timing}, sizes={"n": 1})
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


def test_operations_of_a_training_step():
    sizes = train.Sizes(layers=1, width=32, batch=2, tokens=10)
    model = train.model(attention.linear.Config(), sizes).build()
    assert train.operations(sizes) == 6 * sum(p.numel() for p in model.parameters()) * 20


def test_lines_over_positions():
    sizes = decode.QUICK
    ways = (decode.RNN, decode.CACHED, decode.RECOMPUTED)
    timings = {f"{way} at {p}": Timing((p / 1e3,), 1) for way in ways for p in sizes.positions}
    expected = pytest.approx([float(p) for p in sizes.positions])
    assert decode.milliseconds(timings, sizes) == dict.fromkeys(ways, expected)


@pytest.mark.usefixtures("one_thread")
def test_a_computation_is_held_against_what_bounds_it():
    """Per float32 number of a head of d: d operations on 4 tensors, 3.5 d on 12; softmax, t / 2 for d; in
    decoding two for each number of a state read and written."""
    sizes = roofline.QUICK
    rows, _ = roofline.run(sizes, lambda done: None)
    figures = {row.what: row.figure for row in rows}
    d, t = sizes.dim, sizes.tokens
    assert figures["forward: intensity"] == d / 4
    assert figures["forward + backward: intensity"] == pytest.approx(14 * d / 48)
    assert figures["softmax, forward: intensity"] == (t + 1) / 8
    for batch in sizes.batches:
        assert figures[f"decode, {batch}: intensity"] == 0.5
    for name in ("forward", "softmax, forward + backward", "decode, 2"):
        bound = min(figures["matmul"], figures["copy"] * figures[f"{name}: intensity"])
        assert figures[f"{name}: of its bound"] == pytest.approx(100 * figures[f"{name}: rate"] / bound)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "what", ["train", "decode", "attention", "mechanisms", "model", "roofline", "scaling --peers"]
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

"""`lintra train series`, `predict` and `evaluate`: what they return, and what they refuse."""

import io
import json
import math
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from lintra import checkpoint, evaluate, train
from lintra.generation.forecasting import quantiles, sample_paths
from lintra.tasks import series
from lintra.tasks.datasets.seasons import seasonal_series

TINY = ["--layers", "1", "--heads", "2", "--width", "16", "--precision", "32"]
SHORT = ["--context", "24", "--horizon", "6"]


def write(file, rows=200, first=0):
    """Write two hourly series and a constant one."""
    a, b = (seasonal_series(rows, 12, seed) for seed in (0, 1))
    hours = np.datetime64("2024-01-01T00:00") + np.arange(first, first + rows) * np.timedelta64(1, "h")
    lines = [f"{hour},{x},{y},5" for hour, x, y in zip(hours, a, b, strict=True)]
    file.write_text("\n".join(['\ufeffwhen,a,"b, c",same', *lines]) + "\n")


@pytest.fixture
def run(lintra_says, tmp_path, monkeypatch, one_thread):
    """A small model of the series in data.csv, in ./run."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data.csv")
    learn = ["train", "series", "--data", "data.csv", "--time-column", "when", "--steps", "3", "--dir", "run"]
    code, out, err = lintra_says(*learn, *SHORT, *TINY)
    assert (code, err) == (0, "")
    assert "3 series, 600 rows, a season of 12 rows (estimated)" in out
    assert re.search(r"validation: scaled_error [\d.]+, -?[\d.]+ nats a row", out)
    return tmp_path / "run"


def said(out):
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("head", ["gaussian", "student-t", "quantile"])
def test_made_up_series_are_learned_and_scored(lintra_says, tmp_path, monkeypatch, head):
    monkeypatch.chdir(tmp_path)
    code, out, err = lintra_says(
        "train", "series", "--head", head, "--steps", "2", "--dir", "run", *SHORT, *TINY
    )
    assert (code, err) == (0, "")
    assert "a row" in out if head != "quantile" else "pinball loss" in out
    run = train.Run.read("run")
    assert run.task.season == run.task.build().season
    assert lintra_says("train", "--resume", "run", "--steps", "3")[0] == 0
    code, out, err = lintra_says("evaluate", "--model", "run", "--limit", "4", "--json", "a.json")
    assert (code, err) == (0, "")
    assert "4 of 128 test windows, each 6 rows ahead, 100 paths" in out
    found = json.loads((tmp_path / "a.json").read_text())["scores"]
    task = run.task.build()
    chosen = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:4].sort().values.tolist()
    for name, scores in evaluate.forecast_scores(checkpoint.load("run"), task, chosen, batch=32).items():
        for what, estimate in scores._asdict().items():
            assert found[name][what]["mean"] == pytest.approx(estimate.mean)
            assert found[name][what]["error"] == pytest.approx(estimate.error)
        assert re.search(rf"{name} +{scores.weighted_quantile_loss.mean:.4f} \+- ", out)
    assert re.search(r"(below that of|does not beat) the \w+ ?\w* forecast", out)


@pytest.mark.parametrize(("attention", "prefix"), [("aft", ""), ("linear,aft", "aft.")])
def test_what_could_not_forecast_is_not_trained(lintra_says, tmp_path, monkeypatch, attention, prefix):
    """Refused for the reason that predict gives, before a folder is created."""
    monkeypatch.chdir(tmp_path)
    learn = ["train", "series", "--steps", "1", "--dir", "run", *SHORT, *TINY, "--attention", attention]
    options = ["--attention-options", f"{prefix}window=4", f"{prefix}max_length=30"]
    code, _, err = lintra_says(*learn, "--layers", "2", *options)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert re.match(r"lintra: attention 'aft' has no recurrent form with .*: take another mechanism\n", err)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_short_training_beats_the_season_before(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn = ["train", "series", "--steps", "300", "--dir", "run", "--context", "48", "--precision", "32"]
    assert lintra_says(*learn)[0] == 0
    out = lintra_says("evaluate", "--model", "run")[1]
    assert "below that of the seasonal naive forecast" in out


def test_files_are_continued(lintra_says, run):
    """Each series with its name and times; the numbers are those of Python."""
    write(run.parent / "new.csv", rows=50, first=7)
    asked = [
        "predict",
        "--model",
        "run",
        "new.csv",
        "--horizon",
        "3",
        "--samples",
        "20",
        "--seed",
        "4",
        "--paths",
    ]
    code, out, err = lintra_says(*asked, "--quantiles", "0.25", "0.9", "--batch", "2")
    assert (code, err) == (0, "")
    rows = said(out)
    assert [row["series"] for row in rows] == ["a"] * 3 + ["b, c"] * 3 + ["same"] * 3
    assert [row["step"] for row in rows] == [1, 2, 3] * 3
    assert [row["time"] for row in rows[:2]] == ["2024-01-03T09:00:00", "2024-01-03T10:00:00"]
    model, task = checkpoint.load(run), train.Run.around(run).task.build()
    history = torch.stack([torch.from_numpy(x.values[-24:]) for x in task.read(run.parent / "new.csv")])
    paths = sample_paths(model, history, horizon=3, samples=20, seed=4)
    found = torch.tensor([row["paths"] for row in rows]).double().unflatten(0, (3, 3)).movedim(-1, 1)
    torch.testing.assert_close(found, paths, rtol=1e-5, atol=1e-5)
    for i, row in enumerate(rows):
        path = paths[i // 3, :, i % 3].numpy()
        assert row["median"] == pytest.approx(np.median(path), rel=1e-5)
        assert row["quantiles"] == {
            "0.25": pytest.approx(np.quantile(path, 0.25), rel=1e-5),
            "0.9": pytest.approx(np.quantile(path, 0.9), rel=1e-5),
        }
    again = lintra_says(*asked, "--columns", "a")[1]
    assert [row["step"] for row in said(again)] == [1, 2, 3]
    assert len(said(lintra_says("predict", "--model", "run", "new.csv")[1])) == 18


def test_columns_of_another_file(lintra_says, run):
    rows = [{"who": "xy"[i % 2], "t": i // 2, "v": float(i)} for i in range(60)]
    (run.parent / "long.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    named = ["--id-column", "who", "--time-column", "t", "--columns", "v"]
    code, out, err = lintra_says("predict", "--model", "run", "long.jsonl", *named, "--horizon", "1")
    assert (code, err) == (0, "")
    assert [(row["series"], row["time"]) for row in said(out)] == [("x", 30), ("y", 30)]


def stream(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False))


def test_a_stream_is_forecast_row_by_row(lintra_says, run, monkeypatch):
    """The forecasts equal those of the whole series, although each line is read by itself."""
    values = seasonal_series(40, 12, 5)
    stream(monkeypatch, "".join(f"{x}\n" for x in values).encode())
    code, out, err = lintra_says("predict", "--model", "run", "--quantiles", "0.1", "0.9")
    assert (code, err) == (0, "")
    rows = said(out)
    assert [row["value"] for row in rows] == values.tolist()
    assert [row["median"] for row in rows[:11]] == [None] * 11
    assert [row["needs"] for row in rows[:11]] == list(range(11, 0, -1))
    model = checkpoint.load(run)
    with torch.no_grad():
        expected = quantiles(model, model(torch.from_numpy(values)[None]), (0.5, 0.1, 0.9))[0]
    found = [[row["median"], row["quantiles"]["0.1"], row["quantiles"]["0.9"]] for row in rows[11:]]
    torch.testing.assert_close(torch.tensor(found).double(), expected[11:], rtol=1e-4, atol=1e-4)


def test_a_stream_of_several_series(lintra_says, run, monkeypatch):
    a, b = (seasonal_series(30, 12, seed).round(3) for seed in (5, 6))
    alone = []
    for values in (a, b):
        stream(monkeypatch, "".join(f"{x}\n" for x in values).encode())
        alone.append(said(lintra_says("predict", "--model", "run")[1])[-1])
    stream(monkeypatch, "".join(f"{x}, {y}\n" for x, y in zip(a, b, strict=True)).encode())
    rows = said(lintra_says("predict", "--model", "run")[1])
    assert [row["series"] for row in rows] == [1, 2] * 30
    for both, one in zip(rows[-2:], alone, strict=True):
        assert both["median"] == pytest.approx(one["median"], rel=1e-5)


def test_a_byte_order_mark_is_no_part_of_a_stream(lintra_says, run, monkeypatch):
    for content in (b"\xef\xbb\xbf1.5\n2\n", b"1.5\n2\n"):
        stdin = SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", stdin)
        code, out, err = lintra_says("predict", "--model", "run")
        assert (code, err) == (0, "")
        assert [row["value"] for row in said(out)] == [1.5, 2.0]


def test_lines_that_are_no_numbers_are_left_out(lintra_says, run, monkeypatch):
    stream(monkeypatch, b"1\nx\n\n2,3\nnan\n\xff\n2\n")
    code, out, err = lintra_says("predict", "--model", "run")
    assert code == 1
    assert [(row["line"], row["value"]) for row in said(out)] == [(1, 1.0), (7, 2.0)]
    lines = err.splitlines()
    assert [int(re.search(r"line (\d)", line)[1]) for line in lines] == [2, 3, 4, 5, 6]
    assert (
        "stdin, line 2: expected a number up to 1e+30, or one for each series with commas between, got 'x'"
        in err
    )
    assert "stdin, line 4: 2 numbers where the first line has 1: the line is left out" in err


def test_files_that_cannot_be_continued_are_named(lintra_says, run):
    folder = run.parent
    write(folder / "short.csv", rows=11)
    write(folder / "good.csv", rows=12)
    (folder / "other.csv").write_text("when,x\n2024-01-01,1\n2024-01-02,\n")
    (folder / "gap.csv").write_text("when,x\n2024-01-01,1\n2024-01-02,1\n2024-01-04,1\n2024-01-05,1\n")
    files = ["short.csv", "good.csv", "other.csv", "gap.csv", "nowhere.csv"]
    code, out, err = lintra_says("predict", "--model", "run", *files, "--horizon", "1")
    assert (code, len(said(out))) == (1, 3)
    assert err.splitlines() == [
        "lintra: short.csv: the series 'a' has 11 rows, and a forecast needs 12, half of the context",
        "lintra: other.csv, line 3, column 'x': the cell is empty: fill it in, or name the columns of values "
        "with --columns, and one of times with --time-column",
        "lintra: gap.csv, line 4: '2024-01-04' is 2 days, 0:00:00 after the row above, others are "
        "1 day, 0:00:00 apart: fill in what is missing, resample the series, or leave --time-column out if "
        "rows are to count as equally far apart",
        "lintra: nowhere.csv does not exist",
    ]
    code, out, err = lintra_says("predict", "--model", "run", "good.csv", "--columns", "z")
    assert (code, out) == (1, "")
    assert "good.csv has no column 'z': its first row names 'when', 'a', 'b, c', 'same'" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--horizon", "0"], "horizon must be at least 1, got 0"),
        (["--samples", "0"], "samples must be at least 1, got 0"),
        (["--quantiles", "1.5"], "quantiles must be above 0 and below 1, got (1.5,)"),
        (["--seed", "-1"], "seed must be between 0 and 2^63 - 1, got -1"),
        (["--lines"], "lines is for texts, which run does not read: leave --lines out"),
        (["--horizon", "3"], "horizon is for series in files, and standard input is read without one: leave"),
        (["--id-column", "x"], "id_column is for series in files, and .* leave --id-column out"),
    ],
)
def test_flags_that_do_not_fit(lintra_says, run, args, message):
    code, out, err = lintra_says("predict", "--model", "run", *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), err)


def test_the_scores_of_another_file_and_what_evaluation_refuses(lintra_says, run):
    write(run.parent / "other.csv", rows=60)
    code, out, err = lintra_says("evaluate", "--model", "run", "--data", "other.csv")
    assert (code, err) == (0, "")
    assert "all 3 test windows, each 6 rows ahead, 100 paths, a season of 12 rows" in out
    write(run.parent / "other.csv", rows=41)
    code, out, err = lintra_says("evaluate", "--model", "run", "--data", "other.csv")
    assert (code, out) == (2, "")
    assert "the series 'a' has 41 rows, and a context of 24 and a horizon of 6 need 42: take more rows" in err
    code, _, err = lintra_says("evaluate", "--model", "run", "--pictures", "x")
    assert (code, err) == (2, "lintra: pictures is for models of images, run is of the task series\n")
    code, _, err = lintra_says("evaluate", "--model", "run", "--beam", "3")
    assert (code, err) == (2, "lintra: beam is for speech, run is of the task series\n")
    code, _, err = lintra_says("evaluate", "--model", "run", "--limit", "99")
    assert (code, err) == (2, "lintra: limit must be at most the 9 samples there are, got 99\n")
    code, _, err = lintra_says("generate", "--model", "run")
    assert (code, err) == (2, "lintra: run is a model of the task series, and generate needs a decoder\n")


def test_what_was_scored_before_it_was_stopped(lintra_says, run, monkeypatch):
    from lintra.evaluate import forecasts

    paths = forecasts.sample_paths

    def stopped(*args, **settings):
        signal.raise_signal(signal.SIGINT)
        return paths(*args, **settings)

    monkeypatch.setattr(forecasts, "sample_paths", stopped)
    code, out, err = lintra_says("evaluate", "--model", "run", "--batch", "4", "--json", "a.json")
    assert (code, err) == (130, "")
    assert "Stopped: these are scores of the first 4 of 9 windows" in out
    assert json.loads((run.parent / "a.json").read_text())["partial"]


@pytest.mark.usefixtures("one_thread")
def test_series_that_do_not_vary_are_learned(lintra_says, tmp_path, monkeypatch):
    """Nothing is divided by 0, and a series of zeros has no relative scores."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("a,b\n" + "0,0\n" * 100)
    code, out, err = lintra_says(
        "train", "series", "--data", "data.csv", "--steps", "2", "--dir", "run", *SHORT, *TINY
    )
    assert (code, err) == (0, "")
    code, out, err = lintra_says("evaluate", "--model", "run", "--json", "a.json")
    assert (code, err) == (0, "")
    assert re.search(r"naive +- +- +100.0%", out)
    assert "All values are 0: there is nothing to compare" in out
    assert json.loads((tmp_path / "a.json").read_text())["scores"]["model"]["mase"] is None
    code, out, err = lintra_says("predict", "--model", "run", "data.csv", "--horizon", "2")
    assert (code, err) == (0, "")
    assert all(math.isfinite(row["median"]) for row in said(out))


@pytest.mark.parametrize("name", ["mine.json", "mine.yaml"])
def test_settings_with_a_byte_order_mark(lintra_says, run, name):
    content = json.loads((run / "run.json").read_text())
    written = yaml.safe_dump(content) if name.endswith(".yaml") else json.dumps(content)
    (run.parent / name).write_bytes(b"\xef\xbb\xbf" + written.encode())
    again = ["train", "series", "--config", name, "--steps", "1", "--dir", "other"]
    code, _, err = lintra_says(*again)
    assert (code, err) == (0, "")
    assert train.Run.read("other").task == train.Run.read("run").task


def test_settings_of_a_run_begin_another(lintra_says, run):
    again = ["--config", "run/run.json", "--dir", "again", "--steps", "2"]
    assert lintra_says("train", "series", *again)[0] == 0
    assert train.Run.read("again").model == train.Run.read("run").model
    assert train.Run.read("again").task == train.Run.read("run").task
    assert isinstance(train.Run.read("again").task, series.Config)


def test_an_output_that_ends_is_no_fault_of_the_files(lintra_says, run, monkeypatch):
    """`| head -1` ends it without a message; a full disk is reported once."""

    def ended(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    predict = predicting("data.csv", "data.csv")
    monkeypatch.setattr("lintra.cli.predict_series.print_json", ended)
    with pytest.raises(BrokenPipeError):
        predict()
    monkeypatch.setattr("lintra.cli.predict_series.print_json", full)
    with pytest.raises(OSError, match="No space left"):
        predict()


def predicting(*files):
    from lintra.cli.predict import predict_command

    return lambda: predict_command(["--model", "run", "--time-column", "when", *files])


def test_more_paths_than_there_is_memory_for(lintra_says, run):
    code, out, err = lintra_says(
        "predict", "--model", "run", "data.csv", "--time-column", "when", "--samples", str(10**11)
    )
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert re.search(
        r"100,000,000,000 paths of 6 rows for each of 3 series need about .* take fewer --samples", err
    )


def test_quantiles_have_the_names_that_were_asked_for(lintra_says, run):
    levels = ["0.1234561", "0.1234562"]
    code, out, _ = lintra_says(
        "predict", "--model", "run", "data.csv", "--time-column", "when", "--quantiles", *levels
    )
    assert code == 0
    assert list(said(out)[0]["quantiles"]) == levels


def test_names_that_are_no_text_are_written_as_escapes(lintra_says, run):
    """Undecodable bytes in a file name, and lone surrogates in JSON, which no encoding can represent."""
    rows = "".join(json.dumps({"when": i, "\ud800": i % 5}) + "\n" for i in range(30))
    file = run.parent / "\udcff.jsonl"
    file.write_text(rows)
    program = [sys.executable, "-m", "lintra.cli", "predict", "--model", "run", str(file), "--horizon", "1"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert said(done.stdout)[0] | {"time": 0, "median": 0, "quantiles": 0} == {
        "file": str(file),
        "series": "\ud800",
        "step": 1,
        "time": 0,
        "median": 0,
        "quantiles": 0,
    }


def test_scores_do_not_replace_the_data(lintra_says, run):
    data, kept = run.parent / "data.csv", (run / "run.json").read_bytes()
    before = data.read_bytes()
    code, out, err = lintra_says("evaluate", "--model", "run", "--json", "./data.csv")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "data.csv would be among the data of run: write to another folder" in err
    code, out, err = lintra_says("evaluate", "--model", "run", "--json", "run/run.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "run/run.json, which is a part of a run, model or prepared text" in err
    assert (data.read_bytes(), (run / "run.json").read_bytes()) == (before, kept)

"""Series in tables: what is read, and errors that name the line."""

import json
import lzma

import pytest

from lintra.tasks import DataError
from lintra.tasks.datasets.time_series import Columns, read
from lintra.tasks.datasets.time_steps import TimeError, time_steps


@pytest.fixture
def write(tmp_path):
    def file(content, name="data.csv"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / name

    return file


def found(path, **columns):
    return {x.name: x.values.tolist() for x in read(path, Columns(**columns))}


def test_a_column_is_a_series(write):
    """Whatever spreadsheets write: a byte order mark, quotes, semicolons, an unnamed index column."""
    path = write('\ufeff"",day,"a, first",b\r\n0,x,"1.5",2\r\n1,y,-3e2,4\r\n')
    assert found(path, values=("a, first", "b")) == {"a, first": [1.5, -300.0], "b": [2.0, 4.0]}
    assert found(path, values=("b",)) == {"b": [2.0, 4.0]}
    path = write("a;b;c\n1;2;3\n4;5;6\n")
    assert found(path) == {"a": [1.0, 4.0], "b": [2.0, 5.0], "c": [3.0, 6.0]}
    assert (
        found(path, values=("c,a",)) == found(path, values=("c", "a")) == {"c": [3.0, 6.0], "a": [1.0, 4.0]}
    )
    assert found(path, time="b") == {"a": [1.0, 4.0], "c": [3.0, 6.0]}
    assert found(write(",a\n7,1\n8,2\n")) == {"a": [1.0, 2.0]}


def test_numbers_may_be_names_if_they_are_said_to_be(write):
    path = write("2023,2024\n1,1e-40\n3,1e30\n")
    assert found(path, values=("2023", "2024")) == {"2023": [1.0, 3.0], "2024": [1e-40, 1e30]}
    assert found(write("day,2024\n1,5\n"), time="day") == {"2024": [5.0]}


def test_json_lines_and_compressed_files(write):
    rows = [{"t": i, "y": i / 4, "note": "x"} for i in range(5)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    expected = {"y": [i / 4 for i in range(5)]}
    assert found(write(lines, "data.jsonl"), time="t", values=("y",)) == expected
    assert found(write(lzma.compress(b"y\n0\n1\n"), "data.csv.xz")) == {"y": [0.0, 1.0]}


def test_an_id_is_a_series(write):
    """Rows of several series may alternate; each series has its own times."""
    path = write("id,day,y,z\nb,2024-01-01,1,5\na,2024-02-01,2,6\nb,2024-01-02,3,7\na,2024-02-08,4,8\n")
    assert found(path, id="id", time="day", values=("y",)) == {"b": [1.0, 3.0], "a": [2.0, 4.0]}
    series = read(path, Columns(id="id", time="day"))
    assert [x.name for x in series] == ["b/y", "b/z", "a/y", "a/z"]
    assert [x.times.after(1) for x in series] == ["2024-01-03", "2024-01-03", "2024-02-15", "2024-02-15"]


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ("a,b\n1,2\n", {"values": ("c",)}, "has no column 'c': its first row names 'a', 'b'"),
        ("a,b\n1,2\n", {"values": ("a,c",)}, "has no column 'c': its first row names 'a', 'b'"),
        ("a,b\n1,2\n", {"time": "when"}, "has no column 'when': its first row names 'a', 'b'"),
        ("a,a\n1,2\n", {}, "has several columns 'a'"),
        ("t\n1\n", {"time": "t"}, "has no column of values beside 't'"),
        ("a,b\n1,2\n3,\n", {}, r"line 3, column 'b': the cell is empty: fill it in, or name the columns"),
        ("a,b\n1,2\n3, \n", {}, "line 3, column 'b': the cell is empty"),
        ("a,b\n1,2\n3,NaN\n", {}, "line 3, column 'b': 'NaN' is not a finite number"),
        ("a,b\n1,inf\n", {}, "line 2, column 'b': 'inf' is not a finite number"),
        (
            "a,b\n1,two\n",
            {},
            "line 2, column 'b': 'two' is not a finite number: .* one of times with --time-column",
        ),
        ("a;b\n1;2,5\n", {}, "line 2, column 'b': '2,5' is not a finite number: write a point before"),
        ('a,b\n1,"2,500.5"\n', {}, "'2,500.5' is not a finite number: .* and nothing between thousands"),
        ("a\n1\n\n3\n", {}, "line 3 is empty: fill in the value"),
        ("a,b\n1,2\n3\n", {}, "line 3: 1 values in 2 columns"),
        ("a,b\n", {}, "holds no rows"),
        ("id,y\na,1\n,2\n", {"id": "id"}, "line 3 has no id in 'id'"),
        ("t,y\n3,1\n2,1\n", {"time": "t"}, "line 3: '2' is before the row above: sort the rows"),
        ("t,y\n3,1\n3,1\n", {"time": "t"}, "line 3: '3' is the time of the row above, too: sort the rows"),
        (
            "t,y\n1,0\n2,0\n4,0\n5,0\n",
            {"time": "t"},
            "line 4: '4' is 2 after the row above, others are 1 apart",
        ),
        ("t,y\n1,0\n,0\n", {"time": "t"}, "line 3: the time is missing: expected a number or a date"),
        ("t,y\n1,0\nsoon,0\n", {"time": "t"}, "line 3: 'soon' is not a time"),
        ("t,y\n1,0\nnan,0\n", {"time": "t"}, "line 3: 'nan' is not a time"),
        ("t,y\n1,0\n2024-01-01,0\n", {"time": "t"}, "line 3: '2024-01-01' is not written as '1' is"),
        ("t,y\n0001-01-01T00:00+14:00,0\n,0\n", {"time": "t"}, "line 2: .* is not a time"),
        ("a,b\n1,2\n", {"values": ("b,a", "b")}, "the column 'b' is named twice"),
        ("1.5,2\n3,4\n", {}, "begins with numbers, 1.5, 2, and not with the names of its columns"),
        ("\n", {}, "has no column of values: its first row names the columns"),
        ('a,"b\n1,2\n', {}, "line 1 is not CSV: unexpected end of data"),
        ("a\n1\n-1e200\n", {}, "line 3, column 'a': '-1e200' is beyond 1e.30: take a larger unit"),
        ("a\n0\n1e-170\n", {}, "series 'a' are below 1e-30 in size: take a smaller unit"),
        (b"a\n\xff\n", {}, "is not in UTF-8: byte 3 is 255. Save it as UTF-8"),
        ("\ufeffa,b\n1,2\n".encode("utf-16-le"), {}, "is in UTF-16: save it as UTF-8"),
        ("\ufeffa,b\n1,2\n".encode("utf-16-be"), {}, "is in UTF-16: save it as UTF-8"),
        ("", {}, "is empty"),
    ],
)
def test_what_is_no_series_is_refused_by_its_line(write, content, columns, message):
    with pytest.raises(DataError, match=message):
        read(write(content), Columns(**columns))


def test_json_without_a_value_and_other_files(write, tmp_path):
    with pytest.raises(DataError, match="line 2 has 'y', and no text or number as 'y'"):
        read(write('{"y": 1}\n{"y": null}\n', "data.jsonl"), Columns())
    with pytest.raises(DataError, match="line 1: expected an object with columns by name"):
        read(write("[1]\n", "data.jsonl"), Columns())
    with pytest.raises(DataError, match="line 1 is not JSON"):
        read(write("[" * 100_000, "data.jsonl"), Columns())
    with pytest.raises(DataError, match=r"data\.txt must be a file that ends in \.csv or \.jsonl"):
        read(write("y\n1\n", "data.txt"), Columns())
    with pytest.raises(DataError, match="must be a file that ends in"):
        read(tmp_path, Columns())


@pytest.mark.parametrize(
    ("texts", "following"),
    [
        (["1990", "1991", "1992"], [1993, 1994]),
        (["0.1", "0.2", "0.3"], [pytest.approx(0.4), pytest.approx(0.5)]),
        (["1e-9", "2e-9", "3e-9"], [pytest.approx(4e-9), pytest.approx(5e-9)]),
        (["2024-02-27", "2024-02-28"], ["2024-02-29", "2024-03-01"]),
        (["2024/02/28", "2024/03/06"], ["2024-03-13", "2024-03-20"]),
        (["2024-01-01T22:00", "2024-01-01T23:00"], ["2024-01-02T00:00:00", "2024-01-02T01:00:00"]),
        (["2024-01-01 00:00:00", "2024-01-02 00:00:00"], ["2024-01-03T00:00:00", "2024-01-04T00:00:00"]),
        (
            ["2024-01-01T22:00Z", "2024-01-01T23:30Z"],
            ["2024-01-02T01:00:00+00:00", "2024-01-02T02:30:00+00:00"],
        ),
        (["20240130", "20240131"], ["2024-02-01", "2024-02-02"]),
        (["20240101", "20240108"], ["2024-01-15", "2024-01-22"]),
        (["20231130", "20231231", "20240131"], ["2024-02-29", "2024-03-31"]),
        (["202311", "202312", "202401"], ["2024-02-01", "2024-03-01"]),
        (["20240130", "20240230", "20240330"], [20240430, 20240530]),  # not dates: February has no 30th
        (["10100110", "10100220", "10100330"], [10100440, 10100550]),  # as dates they are irregular
        (["200010", "200011", "200012", "200013"], [200014, 200015]),
        (["2023-11", "2023-12", "2024-01"], ["2024-02-01", "2024-03-01"]),
        (["2023-11-30", "2023-12-31", "2024-01-31"], ["2024-02-29", "2024-03-31"]),
        (["2023-03-15", "2023-06-15"], ["2023-09-15", "2023-12-15"]),
    ],
)
def test_the_times_that_follow(texts, following):
    """Numbers, dates with and without hours, and months of different lengths."""
    steps = time_steps(texts, range(2, len(texts) + 2))
    assert [steps.after(1), steps.after(2)] == following


@pytest.mark.parametrize("texts", [["9999-12-30", "9999-12-31"], ["9999-11", "9999-12"]])
def test_no_time_follows_the_last_year(texts):
    with pytest.raises(TimeError, match=r"2 rows after 9999-12-\d\dT00:00:00 is after the year 9999"):
        time_steps(texts, [2, 3]).after(2)


def test_a_missing_day_is_told_as_of_dates():
    texts = ["20240130", "20240131", "20240202", "20240203", "20240204"]
    with pytest.raises(TimeError, match="line 4: '20240202' is 2 days, 0:00:00 after the row above"):
        time_steps(texts, range(2, 7))


def test_daylight_saving_is_told():
    days = ["2024-03-30T00:00:00+01:00", "2024-03-31T00:00:00+01:00", "2024-04-01T00:00:00+02:00"]
    with pytest.raises(TimeError, match=r"Their offset from UTC changes.*write local times without it"):
        time_steps(days, [2, 3, 4])
    hours = ["2024-03-31T01:00:00+01:00", "2024-03-31T03:00:00+02:00", "2024-03-31T04:00:00+02:00"]
    assert time_steps(hours, [2, 3, 4]).step == 3_600
    with pytest.raises(TimeError, match=r"if rows are to count as equally far apart$"):
        time_steps([*hours[1:], "2024-03-31T06:00:00+02:00"], [2, 3, 4])


def test_a_missing_hour_is_told():
    texts = [f"2024-01-01T{hour:02}:00" for hour in (0, 1, 2, 4, 5)]
    with pytest.raises(
        TimeError, match="line 5: '2024-01-01T04:00' is 2:00:00 after the row above, others are 1:"
    ):
        time_steps(texts, range(2, 7))
    texts = ["2024-01-01", "2024-02-01", "2024-04-01", "2024-05-01", "2024-06-01"]
    with pytest.raises(TimeError, match="line 4: '2024-04-01' is 60 days, 0:00:00 after the row above"):
        time_steps(texts, range(2, 7))


def test_times_after_the_last_keep_its_offset_from_utc():
    days = [f"2024-01-0{i}T00:00:00+01:00" for i in range(1, 9)]
    assert time_steps(days, range(2, 10)).after(1) == "2024-01-09T00:00:00+01:00"
    months = [f"2024-0{i}-01T00:00:00+01:00" for i in range(1, 5)]
    assert time_steps(months, range(2, 6)).after(1) == "2024-05-01T00:00:00+01:00"


def test_numbers_after_the_last_have_no_noise():
    assert time_steps(["0.1", "0.2", "0.3"], [2, 3, 4]).after(1) == 0.4


def test_a_name_with_spaces_around_it_is_found(tmp_path):
    (tmp_path / "x.csv").write_text("t, v\n1, 5\n2, 6\n")
    (found,) = read(tmp_path / "x.csv", Columns(("v",), "t"))
    assert found.values.tolist() == [5, 6]


def test_a_column_of_times_is_no_series_whatever_spaces_are_around_it(tmp_path):
    (tmp_path / "x.csv").write_text("sales, t\n5, 1\n6, 2\n7, 3\n")
    assert [x.name for x in read(tmp_path / "x.csv", Columns(time="t"))] == ["sales"]


def test_times_of_many_digits_are_whole():
    times = [f"17000000000001{x}" for x in (25, 50, 75)]
    assert time_steps(times, [2, 3, 4]).after(2) == 1700000000000225


def test_an_empty_line_between_lines_of_json_is_none(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"v": 1}\n\n{"v": 3}\n')
    assert read(tmp_path / "x.jsonl", Columns())[0].values.tolist() == [1, 3]

import pytest

from lintra import train

ROWS = ["minutes,step,train_loss,validate_loss", "0.5,10,2.25,", "0.75,12,,2.125", "1.25,20,1.75,"]


@pytest.fixture
def log(tmp_path):
    def log(version, content):
        file = tmp_path / "logs" / "csv" / f"version_{version}" / "metrics.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    return log


def test_a_log_that_was_cut_keeps_its_complete_rows(tmp_path, log):
    """Wherever a killed run cut it off; a resumed run continues from there."""
    content = "".join(f"{row}\r\n" for row in ROWS).encode()
    minutes, validate = {10: 0.5, 12: 0.75, 20: 1.25}, {12: 2.125}
    log(1, b"minutes,step,train_loss\r\n2.0,30,1.5\r\n")
    for cut in range(len(content) + 1):
        log(0, content[:cut])
        rows = content[:cut].count(b"\r") - 1  # below the header
        kept = dict(list(minutes.items())[: max(rows, 0)])
        curves = train.curves(tmp_path)
        assert curves["minutes"] == {**kept, 30: max(kept.values(), default=0) + 2}, cut
        assert curves["train_loss"] == {
            **{x: y for x, y in {10: 2.25, 20: 1.75}.items() if x in kept},
            30: 1.5,
        }
        assert curves.get("validate_loss", {}) == {x: y for x, y in validate.items() if x in kept}


def test_the_minutes_of_all_parts_add_up(tmp_path, log):
    for version, step in enumerate((10, 20, 30)):
        log(version, f"minutes,step\n1.5,{step}\n".encode())
    log("0_backup", b"minutes,step\n9.5,99\n")  # a copy, made by hand
    assert train.curves(tmp_path)["minutes"] == {10: 1.5, 20: 3.0, 30: 4.5}


def test_a_row_that_is_damaged_is_left_out(tmp_path, log):
    for damaged in ("1,x,2.0,", "1,,2.0,", "1,15,two,", "1", "1,15,2.0,2.0,2.0"):
        log(0, "\n".join([*ROWS[:2], damaged, *ROWS[2:], ""]).encode())
        curves = train.curves(tmp_path)
        assert list(curves["minutes"]) == [10, 12, 20], damaged
        assert curves["train_loss"] == {10: 2.25, 20: 1.75}

"""Texts with labels: how lines are read, what is held out, padding, errors about files."""

import codecs
import csv
import dataclasses
import io
import json
import lzma
import math

import pytest
import torch

from lintra.attention import linear
from lintra.checkpoint import from_json, to_json
from lintra.models import bilstm, encoder
from lintra.tasks import DataError, text_classification


def line(label, *columns):
    return "\t".join([label, *columns]).encode() + b"\n"


LINES = [line("good" if i % 3 else "bad", f"{i}_7", f"text {i} " * (i + 1)) for i in range(40)]


@pytest.fixture
def file(tmp_path):
    (tmp_path / "train.tsv").write_bytes(b"".join(LINES))
    return tmp_path / "train.tsv"


def task(path, **settings):
    return text_classification.Config(data=str(path), **({"length": 30} | settings)).build()


def contents(samples):
    """(text, label) of every sample."""
    batch = samples.__getitems__(range(len(samples)))
    rows = zip(batch["tokens"], batch["mask"], batch["label"].tolist(), strict=True)
    return [(bytes(tokens[mask].tolist()), label) for tokens, mask, label in rows]


def expected(lines, length=30):
    """Labels are numbered in alphabetical order."""
    split = [x.rstrip(b"\r\n").split(b"\t") for x in lines]
    return [(x[-1][:length], int(x[0] == b"good")) for x in split]


def test_a_tenth_is_held_out(file):
    """The same lines each time; training has the others in the order of the file."""
    built = task(file)
    kept = contents(built.validate)
    assert len(kept) == len(LINES) // 10
    assert contents(built.train) == [x for x in expected(LINES) if x not in kept]
    assert sorted(contents(built.train) + kept) == sorted(expected(LINES))
    assert contents(task(file).validate) == kept
    assert built.classes == ["bad", "good"]


@pytest.mark.parametrize("period", [2, 5, 10])
def test_what_is_held_out_has_all_labels_where_they_take_turns(tmp_path, period):
    """Taking every tenth line would give one label only."""
    (tmp_path / "x").write_bytes(b"".join(line(f"{i % period}", f"text {i}") for i in range(1_000)))
    counts = torch.bincount(task(tmp_path / "x").validate.labels, minlength=period)
    assert counts.sum() == 100
    assert (counts > 0.4 * 100 / period).all()


@pytest.fixture
def other(tmp_path):
    """The lines of another file, and its path."""
    lines = [line("good", "new"), line("bad", "x", "y", "newer")] * 8
    (tmp_path / "test.tsv.xz").write_bytes(lzma.compress(b"".join(lines)))
    return lines, str(tmp_path / "test.tsv.xz")


def test_texts_that_are_there_twice_are_reported(tmp_path):
    place = tmp_path / "texts.tsv"
    lines = [f"{i % 2}\ttext {i}\n" for i in range(30)]
    for content, again in ((lines, 0), (lines * 2, 6)):
        place.write_text("".join(content))
        task = text_classification.Config(data=str(place)).build()
        (*_, told) = ["", *task.notices(tmp_path)]
        held_out = task.validate.texts
        assert again == sum(x in task.train.texts for x in held_out)
        expected = f"{again} of the {len(held_out)} texts to validate on are also among" if again else ""
        assert told.startswith(expected)
        assert bool(told) == bool(again)


def test_a_file_to_test_on(file, other):
    """It is for the final scores: a tenth is still held out for validation."""
    lines, path = other
    built, alone = task(file, test=path), task(file)
    assert contents(built.train) == contents(alone.train)
    assert contents(built.validate) == contents(alone.validate) == contents(alone.test)
    assert sorted(contents(built.test)) == sorted(expected(lines))
    assert contents(built.test) != expected(lines)  # a file may be sorted by label
    assert contents(built.test) == contents(task(file, test=path).test)
    assert (built.judged_by, alone.judged_by) == ("test", "validate")


@pytest.mark.parametrize("named", [True, False])
def test_a_run_of_version_0_1_validates_on_what_it_did(file, other, named):
    """Without `validate_on` in run.json: a test file serves for validation, and every line for training."""
    lines, path = other
    content = to_json(text_classification.Config(data=str(file), length=30, test=path if named else None))
    del content["validate_on"], content["held_out"]
    built = from_json(text_classification.Config, content, "task").build()
    assert contents(built.train) == expected(LINES if named else [x for x in LINES if x not in LINES[9::10]])
    assert sorted(contents(built.validate)) == sorted(expected(lines if named else LINES[9::10]))
    assert contents(built.test) == contents(built.validate)


def test_a_run_of_version_0_2_holds_out_what_it_did(file, other):
    """Every tenth line, with a test file and without one."""
    for test in (None, other[1]):
        content = to_json(text_classification.Config(data=str(file), length=30, test=test))
        del content["held_out"]
        built = from_json(text_classification.Config, content, "task").build()
        assert contents(built.train) == expected([x for x in LINES if x not in LINES[9::10]])
        assert sorted(contents(built.validate)) == sorted(expected(LINES[9::10]))


def test_validating_on_a_test_file_that_is_not_there_is_validating_on_drawn_lines(file):
    """Without `test`, validate_on="test" used to take every tenth line, perhaps all of one label."""
    assert contents(task(file, validate_on="test").validate) == contents(task(file).validate)


def test_forms_of_a_line(tmp_path):
    lines = [b"a\tplain\r\n", b" b \ttext with spaces \n", "b\tünï\n".encode(), b"a\tx\ty\tlast"]
    (tmp_path / "x").write_bytes(b"".join(lines) + b"\n\n")
    built = task(tmp_path / "x", test=str(tmp_path / "x"), validate_on="test")
    texts = [b"plain", b"text with spaces ", "ünï".encode(), b"last"]
    assert contents(built.train) == list(zip(texts, [0, 1, 1, 0], strict=True))


@pytest.mark.parametrize(("name", "content"), [("x", "a\tb\na\t\n"), ("x.csv", "label,text\na,\n")])
def test_a_missing_text_is_told(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name}, line 2 has no text: fill it in, or remove the line"):
        _ = task(tmp_path / name).classes


def test_a_byte_order_mark_is_no_part_of_a_label(file):
    file.write_bytes(b"\xef\xbb\xbf" + b"".join(LINES))
    assert task(file).classes == ["bad", "good"]


def test_classes_that_are_given_keep_their_numbers(file):
    """Whatever else the file holds: a model has learned them."""
    built = task(file, classes=("good", "missing", "bad"))
    assert built.classes == ["good", "missing", "bad"]
    found = task(file).train.labels
    assert torch.equal(built.train.labels, torch.where(found == 1, 0, 2))
    file.write_bytes(b"".join(x for x in LINES if x.startswith(b"good")))
    assert set(task(file, classes=("bad", "good")).train.labels.tolist()) == {1}
    for classes, unknown in ((("good", "fair"), "bad"), (("bad", "fair"), "good")):
        file.write_bytes(b"".join(LINES))
        with pytest.raises(
            DataError, match=rf"train\.tsv has the label '{unknown}', which is none of the 2 "
        ):
            _ = task(file, classes=classes).train


def test_a_run_keeps_its_classes(file):
    config = text_classification.Config(data=str(file))
    kept = config.build().freeze_config(config)
    assert kept == dataclasses.replace(config, classes=("bad", "good"))
    assert kept.build().freeze_config(kept) == kept
    model = config.build().model(linear.Config())
    config.build().check(model)
    with pytest.raises(DataError, match="the data have 2 classes, and the model was made for 3"):
        config.build().check(dataclasses.replace(model, outputs=3))


def test_its_files_elsewhere(file):
    """Another file is tested on as a whole, and the training file is not needed."""
    config = text_classification.Config(data="old.tsv", classes=("a", "b"))
    assert config.with_data("./old.tsv") == config
    for known in (config, dataclasses.replace(config, test="old-test.tsv")):
        assert known.with_data("new.tsv") == dataclasses.replace(config, test="new.tsv")
    file.write_bytes(line("a", "one") + line("b", "two"))
    elsewhere = config.with_data(str(file)).build()
    elsewhere.check(encoder.Config(vocabulary=256, pool="mean", outputs=2))
    assert (len(elsewhere.test), elsewhere.judged_by) == (2, "test")
    file.write_bytes(line("a", "one") + line("c", "two"))
    with pytest.raises(DataError, match=r"has the label 'c', which is none of the 2 to learn"):
        _ = config.with_data(str(file)).build().test


def test_padding_is_at_the_end_and_masked(file):
    batch = task(file).train.__getitems__([0, 1, 20])
    assert batch["tokens"].shape == (3, 30)
    assert batch["mask"].sum(1).tolist() == [7, 14, 30]
    assert (batch["tokens"][~batch["mask"]] == 0).all()
    assert batch["label"].dtype == torch.int64


def test_a_batch_is_its_samples(file):
    samples = task(file).train
    batch = samples.__getitems__([3, 1])
    for place, index in enumerate((3, 1)):
        one = samples[index]
        assert torch.equal(batch["tokens"][place][batch["mask"][place]], one["tokens"])
        assert torch.equal(batch["label"][place], one["label"])


def test_loss_and_score(file):
    built = task(file)
    batch = built.train.__getitems__(range(6))
    good = batch["label"].sum().item()
    model = built.model(linear.Config()).build().eval()
    assert model.config.outputs == 2
    assert built.loss(model, batch).isfinite()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, math.log(3)]))
    score = built.score(model, batch)
    assert score["weight"].item() == 6
    assert score["accuracy"].item() == pytest.approx(good / 6)
    loss = -(good * math.log(3 / 4) + (6 - good) * math.log(1 / 4)) / 6
    assert score["loss"].item() == pytest.approx(loss, rel=1e-5)
    assert built.loss(model, batch).item() == pytest.approx(score["loss"].item())
    assert built.loss_unit == "nats a text"
    own = built.per_sample(model, batch)
    torch.testing.assert_close(own["loss"].exp(), torch.where(batch["label"] == 1, 4 / 3, 4.0))
    torch.testing.assert_close(own["accuracy"], (batch["label"] == 1).float())


def test_the_baseline_takes_the_same_batches(file):
    built = task(file)
    model = bilstm.Config(vocabulary=256, layers=1, width=8, outputs=2, pool="mean").build()
    assert built.loss(model, built.train.__getitems__(range(6))).isfinite()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"train\.tsv is empty"),
        (
            b"".join(LINES[:5]) + b"just a text\n" + b"".join(LINES[5:]),
            r"line 6: expected label TAB text, got",
        ),
        (b"".join(LINES[:5]) + b"\n" + b"".join(LINES[5:]), r"line 6: expected label TAB text, got ''"),
        (b"\tno label\n" * 20, r"line 1: expected label TAB text, got '\\tno label'"),
        (b"good\tx\n" * 20, r"has the label 'good' only: there is nothing to tell apart"),
        (b"".join(LINES[:9]), r"holds 9 lines: take 10 or more, of which one in 10 is held out"),
        (
            b"".join(line(f"text {i}", "1") for i in range(2_000)),
            r"has 1,800 different labels.* first column",
        ),
        (
            line("label", "text") + b"".join(LINES),
            r"line 1: 'label' is the label of no other line: remove a head",
        ),
        (  # a held-out line
            b"".join(LINES[:4]) + line("awful", "x") + b"".join(LINES[4:9]),
            r"has the label 'awful', which is none of the 2 to learn "
            r"but held out, every line of it: add lines$",
        ),
        (b"good\t\0\n", r"train\.tsv is not text: byte 6 is 0"),
        (  # two labels of Latin-1, which are not one
            20 * (b"caf\xe9\tx\n" + b"caf\xe8\ty\n"),
            r"train\.tsv, line 1 is not in UTF-8: it has the byte 233",
        ),
    ],
)
def test_bad_files_are_named(file, content, message):
    file.write_bytes(content)
    for split in ("train", "validate"):
        with pytest.raises(DataError, match=message):
            getattr(task(file), split)


def test_a_label_beside_those_that_are_named_is_not_called_held_out(file):
    file.write_bytes(b"".join(LINES) + 20 * line("other", "x"))
    named = tuple(sorted({each.split(b"\t")[0].decode() for each in LINES}))
    with pytest.raises(DataError, match=rf"the label 'other', which is none of the {len(named)} to learn$"):
        _ = task(file, classes=named).train


def test_missing_and_damaged(file, tmp_path):
    with pytest.raises(DataError, match=r"which text\? .* --data PATH"):
        _ = text_classification.Config().build().train
    with pytest.raises(DataError, match="test nowhere does not exist: name a file like that of --data"):
        _ = task(file, test="nowhere").train
    with pytest.raises(DataError, match="is a folder: name a file of lines label TAB text"):
        _ = task(tmp_path).train
    (tmp_path / "cut.xz").write_bytes(lzma.compress(b"".join(LINES))[:-9])
    with pytest.raises(DataError, match=r"cut\.xz cannot be read, it may be cut short"):
        _ = task(tmp_path / "cut.xz").train
    (tmp_path / "other.tsv").write_bytes(line("so-so", "x"))
    with pytest.raises(DataError, match=r"other\.tsv has the label 'so-so', which is none of the 2 to"):
        _ = task(file, test=str(tmp_path / "other.tsv")).train


def test_a_first_line_alone_with_its_label_is_no_heading_where_classes_are_named(file):
    file.write_bytes(line("rare", "x") + b"".join(LINES))
    assert task(file, classes=("bad", "good", "rare")).classes == ["bad", "good", "rare"]


def test_bad_settings():
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        text_classification.Config(length=0)
    with pytest.raises(ValueError, match=r"classes must all be different, got \('a', 'b', 'a'\)"):
        text_classification.Config(classes=("a", "b", "a"))


ROWS = [("good" if i % 3 else "bad", f'text {i}, "{i}"\nof two lines ü' * (i + 1)) for i in range(40)]


def as_csv(rows, separator=",", heading=("id", "sentiment", "review")):
    """A table with an extra column, quoted where necessary."""
    out = io.StringIO(newline="")
    table = csv.writer(out, delimiter=separator)
    table.writerow(heading)
    table.writerows((i, *row) for i, row in enumerate(rows))
    return out.getvalue().encode()


def as_json(rows):
    lines = [{"sentiment": label, "review": text, "id": [i]} for i, (label, text) in enumerate(rows)]
    return "\n".join(map(json.dumps, lines)).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", as_csv(ROWS)),
        ("a.CSV", codecs.BOM_UTF8 + as_csv(ROWS, ";")),
        ("a.csv.xz", lzma.compress(as_csv(ROWS, "\t"))),
        ("a.jsonl", as_json(ROWS)),
        ("a.ndjson", as_json(ROWS) + b"\n\n"),
    ],
)
def test_named_columns(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    built = task(tmp_path / name, label_column="sentiment", text_column="review", length=500)
    expected = [(text.encode()[:500], int(label == "good")) for label, text in ROWS]
    held_out = contents(built.validate)
    assert len(held_out) == 4
    assert contents(built.train) == [x for x in expected if x not in held_out]
    with pytest.raises(DataError, match=r"'label'"):
        _ = task(tmp_path / name).train


def test_labels_may_be_numbers_and_texts_long(tmp_path):
    lines = [json.dumps({"label": i % 2, "text": "x"}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert task(tmp_path / "a.jsonl").classes == ["0", "1"]
    (tmp_path / "a.csv").write_text("label,text\n" + "1,short\n" * 10 + f"0,{'x' * 200_000}\n" * 2)
    assert task(tmp_path / "a.csv").classes == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", as_csv(ROWS), r"has no column 'label': its first row names 'id', 'sentiment', 'review'"),
        ("a.csv", as_csv(ROWS, heading=("label", "label", "text")), r"has several columns 'label'"),
        ("a.csv", b"label,text\n", r"holds no texts"),
        ("a.csv", b"label,text\na,b\na\n", r"line 3: 1 values in 2 columns"),
        ("a.csv", b"label,text\na,b,c\n", r"line 2: 3 values in 2 columns"),
        ("a.csv", b'label,text\na,"b\n', r"line 2 is not CSV: unexpected end of data"),
        ("a.csv", b"label,text\na,b\n ,c\n", r"line 3 has no label"),
        ("a.csv", b"label,text\na,\xff\n", r"is not in UTF-8: byte 14 is 255"),
        (
            "a.jsonl",
            as_json(ROWS),
            r"has 'sentiment', 'review', 'id', and no text or number as 'label'",
        ),
        (
            "a.jsonl",
            b'{"label": null, "text": "x"}',
            r"line 1 has 'label', 'text', and no text or number as",
        ),
        ("a.jsonl", b'\n{"label": 1,', r"line 2 is not JSON: "),
        (
            "a.jsonl",
            b'\n{"label": 1, "text": "\\ud800"}',
            r"line 2 is not text: it has half of a surrogate pair",
        ),
        ("a.jsonl", b"[1, 2]", r"line 1: expected an object with label and text"),
        ("a.tsv", b"".join(LINES), r"columns have names in files that end in \.csv or \.jsonl or \.ndjson"),
    ],
)
def test_bad_tables_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    settings = {"text_column": "text"} if name == "a.tsv" else {}
    with pytest.raises(DataError, match=message):
        _ = task(tmp_path / name, **settings).train

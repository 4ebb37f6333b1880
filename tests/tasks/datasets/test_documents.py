"""Documents from files: whole, or cut if they are long; errors name the line."""

import codecs
import gzip
import json
import lzma

import pytest

from lintra.tasks import DataError
from lintra.tasks.datasets import documents as module
from lintra.tasks.datasets.documents import documents

LINES = "".join(f"{i} naïve words, as before. 日本\n" for i in range(200)).encode()


def texts(*files, **settings):
    return [each.text for each in documents(files, **settings)]


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


def test_a_file_or_a_line_of_json_is_a_document(write):
    rows = [{"text": "one\ntwo"}, {"id": 7, "text": "naïve"}, {"text": ""}]
    lines = "\n\n".join(json.dumps(row) for row in rows).encode()
    files = [
        write("a.txt", LINES),
        write("b.txt.xz", lzma.compress(LINES)),
        write("c.jsonl", lines),
        write("d.JSONL.gz", gzip.compress(lines + b"\n")),
        write("e.ndjson", lines),
        write("e", b""),
    ]
    of_json = [row["text"].encode() for row in rows]
    assert texts(*files) == [LINES, LINES, *of_json, *of_json, *of_json, b""]
    assert texts(write("f.jsonl", b'{"body": "x"}'), field="body") == [b"x"]


def test_a_byte_order_mark_is_no_text(write):
    mark = codecs.BOM_UTF8
    assert texts(write("a.txt", mark + LINES), write("B.TXT.GZ", gzip.compress(mark + LINES))) == [
        LINES,
        LINES,
    ]
    assert b"".join(texts(write("a.txt", mark + LINES), longest=50)) == LINES
    assert texts(write("c.txt", LINES + mark)) == [LINES + mark]


@pytest.mark.parametrize("longest", [7, 50, 1000])
def test_a_long_one_is_cut_at_line_ends(write, longest):
    """Only the last part ends the document."""
    for file in (write("a.txt", LINES), write("a.jsonl", json.dumps({"text": LINES.decode()}).encode())):
        found = list(documents([file], longest=longest))
        assert [each.ends for each in found] == [False] * (len(found) - 1) + [True]
        parts = [each.text for each in found]
        assert b"".join(parts) == LINES
        assert max(map(len, parts)) <= 2 * longest
        assert all(part.decode() for part in parts)
        if longest >= 50:  # longer than a line
            assert all(part.endswith(b"\n") for part in parts)


@pytest.mark.parametrize("content", [b"x" * 1000, b"\x80" * 1000, "日".encode() * 300])
def test_without_lines_or_words_it_is_cut_somewhere(write, content):
    parts = texts(write("a.txt", content), longest=100, utf8=False)
    assert b"".join(parts) == content
    assert max(map(len, parts)) <= 200


def test_how_far_it_is_counts_bytes_of_files(write):
    files = [write("a.xz", lzma.compress(LINES)), write("b.txt", LINES), write("c.jsonl", b"")]
    seen = []
    texts(*files, longest=100, report=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", LINES + b"\xff", r"a\.txt, line 201 is not in UTF-8: it has the byte 255"),
        ("a.txt", b"a\nb\0c", r"a\.txt, line 2 is not text: it has a byte 0"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', r"a\.jsonl, line 2 is not in UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": "x"', r"a\.jsonl, line 3 is not JSON"),
        ("a.jsonl", b"[1]", r"a\.jsonl, line 1 must be an object \{\.\.\.\}, got \[1\]"),
        ("a.jsonl", b'{"body": "x"}', r"line 1 has no text in 'text': it has body\. Name the field with --f"),
        ("a.jsonl", b'{"text": 5}', r"line 1 has no text in 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"line 1: text must be Unicode text, it has '\\ud800'"),
        ("a.jsonl", b"[" * 100_000, r"line 1 is not JSON"),
        ("a.txt.xz", lzma.compress(LINES)[:-9], r"a\.txt\.xz cannot be read, it may be cut short"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-9], r"a\.jsonl\.gz cannot be read|line 1 is not JSON"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(write, name, content, message):
    with pytest.raises(DataError, match=message):
        texts(write(name, content), longest=500)


def test_a_line_that_is_too_long_is_refused(write, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LINE", 20)
    with pytest.raises(DataError, match=r"line 2 has more than 20 bytes: cut it into shorter documents"):
        texts(write("a.jsonl", b'{"text": "x"}\n{"text": "xxxxxxxxxxxxxxx"}'))


def test_of_bytes_any_may_be_there(write):
    assert texts(write("a.txt", b"\xff\xfe"), utf8=False) == [b"\xff\xfe"]

"""Shards: what is written is read back, from numpy too; errors name a file that has changed."""

import json
import os
import shutil
import time
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintra.io.files import Error, leftovers
from lintra.tasks import DataError
from lintra.tasks.datasets.documents import Document
from lintra.tasks.datasets.shard_writer import write_shards
from lintra.tasks.datasets.token_shards import Line, Shard, Shards, dtype_of, is_shards

WORDS = [f"{i}: {'word ' * (i % 7)}".encode() for i in range(300)]


def as_documents(texts):
    return [Document(text, f"line {i}") for i, text in enumerate(texts, 1)]


@pytest.fixture
def shards(tmp_path):
    write_shards(tmp_path / "s", as_documents(WORDS), None, held_out=0.2, shard_tokens=700)
    return tmp_path / "s"


def test_texts_may_be_named_as_shards_are(tmp_path, shards):
    """Like those of WikiText: only a file beside its ends is a shard whose index is missing."""
    (tmp_path / "wiki.train.tokens").write_bytes(b"text")
    assert not is_shards(tmp_path)
    (shards / "index.json").unlink()
    assert is_shards(shards)


def split_up(line):
    """The documents of a line, by their numbers."""
    tokens, documents = line.read(0, len(line))
    assert (np.diff(documents) >= 0).all()
    return [bytes(tokens[documents == i].tolist()) for i in range(line.documents)]


def test_what_is_written_is_read(shards):
    found = Shards(shards)
    found.check()
    train, validate = split_up(found.train), split_up(found.validate)
    held_out = set(validate)
    assert train == [text for text in WORDS if text not in held_out]
    assert validate == [text for text in WORDS if text in held_out]
    assert 0.1 < len(validate) / len(WORDS) < 0.3
    assert len(found.train.shards) > 5
    assert all(shard.tokens <= 700 for shard in found.train.shards)
    assert found.size == sum(file.stat().st_size for file in shards.iterdir() if file.name != "index.json")


def test_a_copy_is_in_the_same_part(tmp_path):
    """Whatever its neighbours are, and in whatever order."""
    write_shards(tmp_path / "s", as_documents([*WORDS, *WORDS[::-1]]), None, held_out=0.2)
    found = Shards(tmp_path / "s")
    train, validate = split_up(found.train), split_up(found.validate)
    assert not set(train) & set(validate)
    assert len(train) + len(validate) == 2 * len(WORDS)


def test_any_part_can_be_read(shards):
    line = Shards(shards).train
    tokens, documents = line.read(0, len(line))
    draw = np.random.default_rng(0)
    for _ in range(200):
        first, last = sorted(draw.integers(0, len(line) + 1, 2).tolist())
        own = line.read(first, last)
        assert np.array_equal(own[0], tokens[first:last])
        assert np.array_equal(own[1], documents[first:last])


@given(lengths=st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=5))
def test_numpy_writes_what_is_read(tmp_path_factory, lengths):
    """With empty documents and empty shards; any other program could write them."""
    folder = tmp_path_factory.mktemp("shards")
    entries, expected = [], []
    for number, own in enumerate(lengths):
        np.arange(sum(own), dtype="<u2").tofile(folder / f"x{number}.tokens")
        np.cumsum(own, dtype="<i8").tofile(folder / f"x{number}.ends")
        entries.append(Shard(name=f"x{number}", tokens=sum(own), documents=len(own)))
        expected += own
    line = Line(folder, entries, np.dtype("<u2"), 100)
    line.check_sizes()
    list(line.check_all())
    tokens, documents = line.read(0, len(line))
    assert tokens.tolist() == [x for own in lengths for x in range(sum(own))]
    assert np.bincount(documents, minlength=len(expected)).tolist() == expected


def test_an_end_stands_behind_what_ends(tmp_path):
    texts = [Document(b"abc", "", ends=False), Document(b"def", ""), Document(b"gh", "")]
    write_shards(tmp_path / "s", texts * 50, None, held_out=0.4, end=7)
    found = Shards(tmp_path / "s")
    assert {*split_up(found.train), *split_up(found.validate)} == {b"abc", b"def\x07", b"gh\x07"}


def test_the_smallest_type_is_taken():
    assert [dtype_of(n).str for n in (1, 256, 257, 65_536, 65_537)] == ["|u1", "|u1", "<u2", "<u2", "<u4"]


def changed(folder, **changes):
    content = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, r"index\.json has format 2, and this lintra reads 1: update lintra"),
        ({"format": 0}, r"format must be 1, got 0"),
        ({"format": "x"}, r"format must be int, got 'x'"),
        ({"train": None}, r"train must be list, got None"),
        ({"train": []}, r"has no tokens to train on"),
        ({"train": [5]}, r"a shard must be dict, got 5"),
        ({"train": [{"name": "x"}]}, r"tokens must be int, got None"),
        ({"train": [{"name": "../x", "tokens": 1, "documents": 1}]}, r"name must be letters.* got '\.\./x'"),
        ({"train": [{"name": "x", "tokens": -1, "documents": 1}]}, r"tokens must be at least 0"),
        ({"validate": [{"name": "train-00000", "tokens": 1, "documents": 1}]}, r"a name of its own"),
        ({"dtype": "float32"}, r"dtype must be one of uint8, uint16, uint32, got 'float32'"),
        ({"vocabulary": 300}, r"vocabulary must fit into uint8, got 300"),
        ({"tokenizer": "/etc/passwd"}, r"tokenizer must be letters.*, got '/etc/passwd'"),
    ],
)
def test_an_index_that_is_none_is_refused(shards, changes, message):
    changed(shards, **changes)
    assert is_shards(shards)
    with pytest.raises(DataError, match=message):
        Shards(shards)


def test_a_damaged_index_is_one(shards, tmp_path):
    (shards / "index.json").write_text("{")
    assert is_shards(shards)
    with pytest.raises(Error, match=r"index\.json is damaged"):
        Shards(shards)
    (shards / "index.json").write_text("[]")  # not an index of shards
    assert not is_shards(shards)
    (shards / "index.json").unlink()
    assert is_shards(shards)
    with pytest.raises(DataError, match=r"index\.json is missing: copy it again"):
        Shards(shards)
    assert not is_shards(tmp_path)


def test_a_file_that_is_missing_or_cut_is_named(shards):
    file = shards / "train-00003.tokens"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"train-00003\.tokens is damaged: it has \d+ bytes, and the index"):
        Shards(shards)
    file.unlink()
    with pytest.raises(DataError, match=r"train-00003\.tokens is missing, a shard of .*index\.json: copy it"):
        Shards(shards)
    file.write_bytes(content)
    ends = shards / "validate-00000.ends"
    ends.write_bytes(ends.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"validate-00000\.ends is damaged: it has"):
        Shards(shards)


def test_a_byte_that_has_changed_is_found(shards):
    file = shards / "train-00002.tokens"
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        DataError, match=r"train-00002\.tokens is damaged: its CRC-32 is \w{8}, and the index"
    ):
        Shards(shards).check()


def test_numbers_that_cannot_be_are_found_while_reading(shards):
    found = Shards(shards)
    (shards / "train-00000.ends").write_bytes(np.full(found.train.shards[0].documents, 5, "<i8").tobytes())
    with pytest.raises(DataError, match=r"train-00000\.ends is damaged: its numbers do not rise"):
        found.train.read(0, 100)
    with pytest.raises(DataError, match=r"train-00000\.ends is damaged: it does not end with"):
        found.check()
    line = Line(shards, found.train.shards, np.dtype("u1"), 50)
    with pytest.raises(DataError, match=r"train-00001\.tokens is damaged: it has token \d+ of 50"):
        line.read(found.train.shards[0].tokens, found.train.shards[0].tokens + 50)


def test_an_index_may_say_less(shards):
    """Those of other programs have no checksums, and no byte counts where tokens are bytes."""
    content = json.loads((shards / "index.json").read_text())
    for split in ("train", "validate"):
        for entry in content[split]:
            del entry["bytes"], entry["crc32"]
    del content["exact"]
    (shards / "index.json").write_text(json.dumps(content))
    found = Shards(shards)
    found.check()
    assert found.bytes_per_token == 1


def test_sums_are_those_of_zlib(shards):
    (entry, *_) = json.loads((shards / "index.json").read_text())["train"]
    for kind in ("tokens", "ends"):
        assert entry["crc32"][kind] == f"{zlib.crc32((shards / f'train-00000.{kind}').read_bytes()):08x}"


def test_nothing_is_left_of_what_failed(tmp_path):
    def broken():
        yield from as_documents(WORDS)
        raise DataError("words.txt, line 9 is not in UTF-8")

    with pytest.raises(DataError, match="line 9"):
        write_shards(tmp_path / "s", broken(), None, shard_tokens=100)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ([], {}, "there is no text to prepare: name files"),
        ([b"", b""], {}, "there is no text to prepare, all 2 documents are empty"),
        (
            [b"x"],
            {"held_out": 1e-9},
            "of 1 documents none is held out to validate on: --validate 1e-09 is too",
        ),
        ([b"x"], {"held_out": 1 - 1e-9}, "none is left to learn from"),
    ],
)
def test_nothing_to_learn_from_or_to_judge_by(tmp_path, texts, settings, message):
    with pytest.raises(DataError, match=message):
        write_shards(tmp_path / "s", as_documents(texts), None, **settings)


def test_a_folder_is_not_written_over(shards):
    before = sorted(shards.iterdir())
    with pytest.raises(Error, match="s exists: name another folder, or remove it first"):
        write_shards(shards, as_documents(WORDS), None)
    assert sorted(shards.iterdir()) == before


def test_what_a_killed_program_left_goes_after_a_day(tmp_path):
    for name, age in ((".s.old", 2 * 86_400), (".s.new", 60)):
        (tmp_path / name / "s").mkdir(parents=True)
        (tmp_path / name / "s" / "train-00000.tokens").write_bytes(b"x")
        for place in (*(tmp_path / name).rglob("*"), tmp_path / name):
            os.utime(place, (time.time() - age,) * 2)
    write_shards(tmp_path / "s", as_documents(WORDS), None)
    assert [x.name for x in leftovers(tmp_path, "s")] == [".s.new"]
    shutil.rmtree(tmp_path / ".s.new")

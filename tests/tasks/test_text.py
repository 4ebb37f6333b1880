"""A user's text: which bytes are trained on, which are held out, and errors about files."""

import gzip
import lzma
import math
from pathlib import Path

import pytest
import torch

from lintra.attention import linear
from lintra.io.files import is_part_of
from lintra.tasks import DataError, image_folder, text
from lintra.tasks.base import elsewhere
from lintra.tasks.datasets import text_files

WORDS = bytes(32 + i % 90 for i in range(1_000))


def task(path, **settings):
    return text.Config(data=str(path), **({"length": 20} | settings)).build()


@pytest.fixture
def file(tmp_path):
    (tmp_path / "words.txt").write_bytes(WORDS)
    return tmp_path / "words.txt"


def as_bytes(tokens):
    return [bytes(row) for row in tokens.tolist()]


def test_the_first_nine_tenths_are_learned_and_the_last_judges(file):
    built = task(file)
    pieces = as_bytes(built.train.__getitems__(range(2_000))["tokens"])
    assert all(len(piece) == 20 and piece in WORDS[:900] for piece in pieces)
    starts = {WORDS[:90].index(piece[:1]) for piece in pieces}
    assert len(starts) == 90  # anywhere, the ends included
    whole = as_bytes(built.validate.__getitems__(range(len(built.validate)))["tokens"])
    assert b"".join(whole) == WORDS[900:]
    with pytest.raises(IndexError):
        built.validate[5]
    with pytest.raises(IndexError):
        built.train[len(built.train)]


def test_every_piece_can_be_drawn_and_nothing_else(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(1, 31)))
    built = text.Config(data=str(tmp_path / "x"), length=3).build()
    first = built.train.__getitems__(range(1_000))["tokens"][:, 0]
    assert set(first.tolist()) == set(range(1, 26))


def test_a_piece_follows_from_seed_and_index(file):
    built = task(file)
    batch = built.train.__getitems__([7, 3, 999_999])["tokens"]
    for row, i in enumerate((7, 3, 999_999)):
        assert torch.equal(task(file).train[i]["tokens"], batch[row])
    others = task(file, data_seed=1).train.__getitems__(range(50))["tokens"]
    assert not torch.equal(others, built.train.__getitems__(range(50))["tokens"])


def test_a_folder_is_its_files_in_order(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".hidden").write_bytes(b"no")
    (folder / ".git" / "config").write_bytes(b"no")
    (folder / "a.txt").write_bytes(WORDS[:300])
    (folder / "b" / "1.txt.xz").write_bytes(lzma.compress(WORDS[300:700] + b"\n"))
    (folder / "c.gz").write_bytes(gzip.compress(WORDS[700:]))
    built = task(folder)
    lines = b"\n".join((WORDS[:300], WORDS[300:700], WORDS[700:]))  # no word spans two files
    assert built.train.text.tobytes() + built.validate.text.tobytes() == lines


def test_loss_and_score(file):
    built = task(file)
    model = built.model(linear.Config()).build().eval()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    batch = built.train.__getitems__(range(4))
    assert built.loss(model, batch).item() == pytest.approx(math.log(256), rel=1e-5)
    score = built.score(model, batch)
    assert score["bits_per_byte"].item() == pytest.approx(8, rel=1e-5)
    assert score["weight"].item() == 80


def test_text_and_back(file):
    built = task(file)
    said = "naïve 日本\n"
    assert built.decode(built.to_tokens(said)[0].tolist()) == said
    assert built.decode([65, 255]) == "A�"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"words\.txt is empty"),
        (b"ab\0c" * 200, r"words\.txt is not text: byte 3 is 0"),
        (b"x" * 190, r"holds 190 bytes.* Take 200 bytes or more, or a --length of at most 19$"),
        (b"x" * 5, r"holds 5 bytes.* Take 200 bytes or more$"),  # no length would be short enough
    ],
)
def test_bad_files_are_named(file, content, message):
    file.write_bytes(content)
    for split in ("train", "validate"):
        with pytest.raises(DataError, match=message):
            getattr(task(file), split)


def test_missing_and_damaged(tmp_path):
    with pytest.raises(DataError, match=r"which text\? .* --data PATH"):
        _ = text.Config().build().train
    with pytest.raises(DataError, match="nowhere does not exist: name a text file or a folder"):
        _ = task(tmp_path / "nowhere").train
    with pytest.raises(DataError, match="holds no files"):
        _ = task(tmp_path).train
    (tmp_path / "cut.xz").write_bytes(lzma.compress(WORDS)[:-9])
    with pytest.raises(DataError, match=r"cut\.xz cannot be read, it may be cut short"):
        _ = task(tmp_path).train


@pytest.mark.parametrize("data", ["x" * 300, "~nobody-of-this-name/book.txt"])
def test_a_configuration_does_not_need_its_data(data):
    """A trained model is used where its data may not be looked at."""
    task = text.Config(data=data).build()
    assert task.config.tokenizer is None
    task.check(task.model(linear.Config()))
    assert elsewhere(data, "mine.txt") == "mine.txt"
    assert not is_part_of(Path("out.json"), Path(data))
    assert not image_folder.Config(data=data).build().at_hand()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"data_seed": -1}, r"data_seed must lie in 0 .. 2\^64 - 1, got -1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        text.Config(**settings)


def test_empty_files_of_a_folder_are_left_out(tmp_path):
    for name, content in (("a.py", b"x" * 100), ("__init__.py", b""), ("b.py", b"y" * 100)):
        (tmp_path / name).write_bytes(content)
    _, train, validate = text_files.split(str(tmp_path))
    assert bytes(train) + bytes(validate) == b"x" * 100 + b"\n" + b"y" * 100
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"holds no text: all of its 3 files are empty"):
        text_files.split(str(tmp_path))


def test_all_of_a_text_is_tested_on(file, tmp_path):
    """The training text is not needed for it."""
    (tmp_path / "new.txt").write_bytes(WORDS[:70])
    tested = text.Config(data="gone.txt", length=20).with_data(str(tmp_path / "new.txt")).build()
    assert (len(tested.test), tested.judged_by) == (3, "test")
    assert bytes(tested.test.__getitems__([0, 1, 2])["tokens"].flatten().tolist()) == WORDS[:60]
    assert task(file).judged_by == "validate"
    (tmp_path / "new.txt").write_bytes(WORDS[:19])
    with pytest.raises(DataError, match="holds 19 bytes, less than one sequence of 20"):
        _ = text.Config(length=20, test=str(tmp_path / "new.txt")).build().test
    with pytest.raises(DataError, match="are numbers: test on shards"):
        _ = text.Config(length=20, vocabulary=300, test=str(tmp_path / "new.txt")).build().test

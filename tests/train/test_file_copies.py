"""Files that a run keeps copies of: found wherever the run is, and identified by their checksums."""

import dataclasses
import json

import pytest

from lintra import train
from lintra.attention import linear
from lintra.checkpoint import Error
from lintra.io.files import read_json
from lintra.tasks import text
from lintra.tokenizer import Tokenizer, pieces

pytest.importorskip("tokenizers")


@pytest.fixture
def run(tmp_path):
    words = ("a few words, and then the same again. " * 40).encode()
    (tmp_path / "words.txt").write_bytes(words)
    Tokenizer.learn(pieces(words), 270).save(tmp_path / "t.json")
    task = text.Config(data=str(tmp_path / "words.txt"), tokenizer=str(tmp_path / "t.json"), length=4)
    model = task.build().model(linear.Config())
    return train.Run.create(tmp_path / "run", task=task, model=model, train=train.Config())


def test_a_run_has_its_own_copy(run, tmp_path):
    (tmp_path / "t.json").unlink()
    run.folder.rename(tmp_path / "moved")
    read = train.Run.read(tmp_path / "moved")
    assert read.task.tokenizer == str(tmp_path / "moved" / "tokenizer.json")
    assert read.task.build().vocabulary == 270
    written = read_json(tmp_path / "moved" / "run.json")
    assert written["task"]["tokenizer"] == "tokenizer.json"
    assert written["copies"] == {"tokenizer": Tokenizer.read(read.task.tokenizer).sum} == run.copies
    read.changed(steps=3)
    assert train.Run.read(tmp_path / "moved").task == read.task


def test_another_or_none_is_refused(run):
    copy = run.folder / "tokenizer.json"
    content = copy.read_bytes()
    copy.write_bytes(content + b"\n")
    with pytest.raises(
        Error, match=r"tokenizer\.json is not the tokenizer that the run was begun with: .* Put it"
    ):
        train.Run.read(run.folder)
    copy.unlink()
    with pytest.raises(Error, match=r"tokenizer\.json is missing, the tokenizer of the run: copy it from"):
        train.Run.read(run.folder)
    copy.write_bytes(content)
    file = run.folder / "run.json"
    file.write_text(json.dumps(read_json(file) | {"copies": 3}))
    with pytest.raises(Error, match=r"run\.json: copies must be an object, got 3"):
        train.Run.read(run.folder)


def test_a_file_of_that_name_stays(run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    given = {"task": run.task, "model": run.model, "train": run.train}
    with pytest.raises(Error, match=r"other has another tokenizer\.json in it: choose another folder"):
        train.Run.create(tmp_path / "other", **given)
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "{}"
    gone = dataclasses.replace(run.task, tokenizer=str(tmp_path / "gone.json"))
    with pytest.raises(Error, match=r"gone\.json cannot be read"):
        train.Run.create(tmp_path / "lost" / "run", **given | {"task": gone})
    assert not (tmp_path / "lost").exists()
    again = train.Run.create(tmp_path / "new" / "run", **given)
    assert again.copies == run.copies

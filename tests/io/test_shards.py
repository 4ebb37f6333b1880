"""Sharded tensors equal those that were written, whichever part is read; errors name what is missing."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import staging

from lintra.io.files import Error
from lintra.io.shards import describe, files_of, index, read_into, read_whole
from lintra.io.tensors import write_tensors

TENSORS = {
    "a": torch.arange(12.0).reshape(4, 3),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "counts": torch.tensor([[True], [False]]),
    "step": torch.tensor(7, dtype=torch.int64),
}


@pytest.fixture
def shards(tmp_path):
    """Shards as two processes write them: each has some rows, and where they begin."""
    sizes = {}
    for i, (first, end) in enumerate([(0, 3), (3, 4)]):
        part = {"a": TENSORS["a"][first:end]} | ({} if i else {k: v for k, v in TENSORS.items() if k != "a"})
        places = {name: {"saved_offsets": [0] * x.dim()} for name, x in part.items()}
        places["a"] = {"saved_offsets": [first, 0]}
        file = tmp_path / f"shard-0000{i + 1}-model-00001-of-00001.safetensors"
        save_file(
            {k: v.contiguous() for k, v in part.items()}, file, {"DCP_SHARDING_INFO": json.dumps(places)}
        )
        sizes[file.name] = file.stat().st_size
    (tmp_path / "shards.json").write_text(index(sizes, {"model": TENSORS, "training": {}}))
    return tmp_path


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_read_is_what_was_written(shards, tmp_path, whole):
    folder = shards
    if whole:
        folder = tmp_path / "whole"
        folder.mkdir()
        write_tensors(TENSORS, folder / "model.safetensors")
    described, read = describe(folder, "model"), read_whole(folder, "model")
    assert described.keys() == read.keys() == TENSORS.keys()
    into = {name: torch.empty_like(x) for name, x in TENSORS.items()}
    read_into(folder, into)
    for name, x in TENSORS.items():
        assert described[name].is_meta
        assert (described[name].dtype, described[name].shape) == (x.dtype, x.shape)
        assert torch.equal(read[name], x)
        assert torch.equal(into[name], x)


def test_the_files_of_a_model_are_those_with_its_tensors(shards, tmp_path):
    save_file({"moment": torch.zeros(1)}, shards / "shard-00001-model-00002-of-00002.safetensors")
    names = [f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2)]
    assert [x.name for x in files_of(shards, "model")] == names
    with pytest.raises(Error, match="holds no tensors of the training"):
        files_of(shards, "training")
    (tmp_path / "whole").mkdir()
    write_tensors(TENSORS, tmp_path / "whole" / "model.safetensors")
    assert [x.name for x in files_of(tmp_path / "whole", "model")] == ["model.safetensors"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_shard_that_is_cut_or_missing(shards, number):
    file = shards / f"shard-0000{number}-model-00001-of-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(
        Error, match=rf"shard-0000{number}.* has {len(content) - 1:,} bytes .* {len(content):,}; copy"
    ):
        describe(shards, "model")
    file.unlink()
    with pytest.raises(Error, match=rf"shard-0000{number}.* cannot be read: No such file"):
        read_whole(shards, "model")


def test_a_damaged_shard_of_the_right_length(shards, caplog):
    """Detected before PyTorch's reader, which would log a traceback and name no file."""
    file = shards / "shard-00001-model-00001-of-00001.safetensors"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(Error, match=r"shard-00001.* cannot be read: .*header.*; copy") as found:
        read_whole(shards, "model")
    assert "\n" not in str(found.value)
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "does not say which shards and tensors there are"),
        ('{"format": 3}', "has format 3, this lintra reads format 2"),
        ('{"format": 2, "files": {}, "tensors": {"model": {"a": ["float99", [1]]}}}', "does not say which"),
        ('{"format": 2, "files": {}, "tensors": {"model": {"a": ["float32", [-1]]}}}', "does not say which"),
    ],
)
def test_a_damaged_list(shards, content, message):
    (shards / "shards.json").write_text(content)
    with pytest.raises(Error, match=message):
        describe(shards, "model")


def test_a_pytorch_without_shards(shards, monkeypatch):
    monkeypatch.delattr(staging, "DefaultStager")  # of PyTorch before 2.9
    with pytest.raises(Error, match=r"newer versions of PyTorch, such as 2\.13, and this is 2\."):
        read_whole(shards, "model")
